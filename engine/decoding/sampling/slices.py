"""Sampling from logits that are sharded over processes: each sends the top candidates of its slice.

Every rank has the logits of one slice of the vocabulary, and one rank also has a `Sampler`.
`slice_query` returns the request to the others. `slice_candidates` applies the penalties to a slice
and returns its most likely tokens. `sample_gathered` samples from the gathered candidates. It
returns the token that the sampler would choose from all logits:

- greedy, and with top-k: always;
- with min-p and neither top-k nor top-p: always;
- with top-p and no top-k: up to rounding. The sum of all weights is the sum of the ranks' sums, so
  its last bits may differ; the token can differ if the cumulative probability equals top-p within
  these bits.

If `slice_query` or `sample_gathered` returns None, all logits must be gathered instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.decoding.sampling.sampler import Sampler
from engine.decoding.sampling.steps import (
    Candidates,
    FloatArray,
    IntArray,
    MinP,
    Penalties,
    SamplingTemperature,
    Step,
    TokenHistory,
    TopK,
    TopP,
    TypicalP,
    all_known,
)
from engine.sampling_params import SAMPLERS

KNOWN_STEPS = (Penalties, TopK, TypicalP, TopP, MinP, SamplingTemperature)
"""Step types that can be applied to slices, in this order; any other needs all logits."""

N_WITHOUT_TOP_K = TopP.N_FIRST  # number of candidates per slice without top-k

N_LIMIT = 4096
"""Maximum number of candidates per slice; beyond it, sending all logits costs hardly more."""

N_HEAD = 5
"""Words of a message before the candidates: count, `has_more`, `max_logit`, `weight_sum` (2)."""


class SliceQuery(NamedTuple):
    """Request for a slice's top candidates, as plain values that can be sent.

    Attributes:
        n: number of candidates; see `n_candidates`.
        never: banned token ids, in any slice.
        is_weighed: whether the sum of all tokens' weights is needed.
        penalties: repetition, frequency and presence penalty; () if they change nothing.
        counted: tokens that the penalties count, each with its count.
    """

    n: int
    never: Sequence[int] = ()
    is_weighed: bool = False
    penalties: Sequence[float] = ()
    counted: Sequence[Sequence[int]] = ()


@dataclass(frozen=True, slots=True, eq=False)
class SliceCandidates:
    """The most likely tokens in one slice of the vocabulary.

    Args:
        ids: token ids, (n,), by descending logit, then by ascending id.
        logits: their logits after penalties, (n,).
        has_more: whether the slice has other, less likely tokens that could be sampled.
        max_logit: largest logit of the slice; not finite if the slice is unusable, or if all its
            tokens are banned.
        weight_sum: sum of the weights of all tokens in the slice, as in `Candidates.weights`; 0 if
            no step needs it.
    """

    ids: IntArray
    logits: FloatArray
    has_more: bool
    max_logit: float
    weight_sum: float

    def pack(self, capacity: int) -> NDArray[np.int32]:
        """Return the candidates as a message of fixed length, (N_HEAD + 2 * capacity,)."""
        n = len(self.ids)
        words = np.zeros(packed_words(capacity), np.int32)
        words[:2] = n, self.has_more
        words[2:3] = np.array([self.max_logit], np.float32).view(np.int32)
        words[3:N_HEAD] = np.array([self.weight_sum], np.float64).view(np.int32)
        words[N_HEAD : N_HEAD + n] = self.ids
        words[N_HEAD + capacity : N_HEAD + capacity + n] = self.logits.view(np.int32)
        return words

    @staticmethod
    def unpack(words: NDArray[np.int32]) -> SliceCandidates:
        """Return the candidates of a message from `pack`."""
        n, has_more = words[:2].tolist()
        capacity = (len(words) - N_HEAD) // 2
        max_logit, weight_sum = words[2:3].view(np.float32), words[3:N_HEAD].copy().view(np.float64)
        ids = words[N_HEAD : N_HEAD + n].astype(np.int64)
        logits = words[N_HEAD + capacity : N_HEAD + capacity + n].view(np.float32)
        return SliceCandidates(
            ids, logits, bool(has_more), float(max_logit[0]), float(weight_sum[0])
        )


def packed_words(capacity: int) -> int:
    """Return the length of a message for this many candidates."""
    return N_HEAD + 2 * capacity


def n_candidates(sampler: Sampler, n_vocab: int) -> int | None:
    """Return the number of candidates that a sampler needs per slice; None if it needs all
    logits."""
    p = sampler.params
    if p.samplers != SAMPLERS or not all_known(sampler.steps, KNOWN_STEPS):
        return None
    if p.temperature <= 0:
        return 1
    if p.top_k:
        return min(p.top_k, n_vocab) if p.top_k <= N_LIMIT else None
    is_unlimited = p.typical_p < 1 or (p.top_p >= 1 and p.min_p <= 0)
    return None if is_unlimited else min(N_WITHOUT_TOP_K, n_vocab)


def slice_query(sampler: Sampler, n_vocab: int, never: Sequence[int] = ()) -> SliceQuery | None:
    """Return the request for the next token's candidates; None if all logits are needed.

    `never` contains the banned token ids.
    """
    n = n_candidates(sampler, n_vocab)
    if n is None:
        return None
    p = sampler.params
    is_weighed = p.temperature > 0 and p.top_k == 0 and p.top_p < 1
    query = SliceQuery(n, never, is_weighed)
    if not any(isinstance(step, Penalties) for step in sampler.steps):
        return query
    counted = np.stack(sampler.history.counts(), axis=1).tolist()
    penalties = p.repeat_penalty, p.frequency_penalty, p.presence_penalty
    return query._replace(penalties=penalties, counted=counted)


def slice_candidates(logits: FloatArray, first: int, query: SliceQuery) -> SliceCandidates:
    """Return the most likely tokens in a slice of the vocabulary, after penalties.

    `logits` (size,) may be empty and are not modified; `first` is the slice's first token id.
    """
    ids = np.arange(first, first + logits.size)
    logits = np.array(logits, np.float32)
    logits[[token - first for token in query.never if 0 <= token - first < logits.size]] = -np.inf
    best = float(logits.max(initial=-np.inf))
    if not math.isfinite(best):
        return SliceCandidates(ids[:0], logits[:0], has_more=False, max_logit=best, weight_sum=0.0)
    all_ = Candidates(ids, logits)
    if query.penalties:
        all_ = Penalties(_history(query.counted), *query.penalties)(all_)
    top = all_.top(query.n)
    can_come = top.logits > -np.inf
    has_more = bool(len(top) < len(all_) and can_come.all())
    weight_sum = float(all_.weights().sum()) if query.is_weighed else 0.0
    top = top.take(can_come, is_sorted=True)
    max_logit = float(top.logits.max(initial=-np.inf))
    return SliceCandidates(top.ids, top.logits, has_more, max_logit, weight_sum)


def _history(counted: Sequence[Sequence[int]]) -> TokenHistory:
    history = TokenHistory(-1)
    for token, count in counted:
        for _ in range(count):
            history.append(token)
    return history


def sample_gathered(sampler: Sampler, slices: Sequence[SliceCandidates]) -> int | None:
    """Return the next token; None, without side effects, if the candidates do not suffice.

    Args:
        slices: candidates of slices that together cover the vocabulary once.

    Raises:
        EngineError: the logits are unusable; see `Candidates.from_logits`.
    """
    bests = np.array([part.max_logit for part in slices], np.float32)
    Candidates.from_logits(bests)  # raises the same error as for all logits
    known, has_more = _merge(slices)
    steps = [step for step in sampler.steps if not isinstance(step, Penalties)]
    if sampler.params.top_k == 0 and not sampler.is_greedy:
        least = max((_least_logit(step, known) for step in steps), default=-math.inf)
        is_enough = not has_more or float(known.logits.min()) < least
        first = steps[0]
        if isinstance(first, TopP):
            best = float(bests.max())
            total = sum(part.weight_sum * math.exp(part.max_logit - best) for part in slices)
            known, steps = known.sort(), steps[1:]
            kept = first.among_top(known, total)
            is_enough = is_enough or kept is not None
            known = known if kept is None else kept
        if not is_enough:
            return None
    for step in steps:
        known = step(known)
    return sampler.pick(known)


def _least_logit(step: Step, known: Candidates) -> float:
    if not isinstance(step, MinP):
        return -math.inf
    return float(known.logits.max() + np.float32(math.log(step.p)))


def _merge(slices: Sequence[SliceCandidates]) -> tuple[Candidates, bool]:
    """Return the most likely tokens of all slices, without gaps, and whether others may matter."""
    ids = np.concatenate([part.ids for part in slices])
    logits = np.concatenate([part.logits for part in slices])
    order = np.argsort(ids)
    top = Candidates(ids[order], logits[order]).sort()
    ends = [part.ids[-1] for part in slices if part.has_more]
    n = min((int(np.flatnonzero(top.ids == end)[0]) + 1 for end in ends), default=len(top))
    ids, logits = top.ids[:n], top.logits[:n]
    order = np.argsort(ids)
    return Candidates(ids[order], logits[order]), bool(ends)
