"""The few tokens of a slice of the vocabulary from which another process draws the next one.

Ranks that are processes have the logits of a slice each. Each keeps a `Sampler` that accepts every
token, for its history; `shortlist` penalises a slice and tells the likeliest of it, and on one rank
`draw` lets the sampler that has the random numbers draw from the lists of all:

- greedy, and with top-k: the token that it would draw from all logits;
- with min-p and neither top-k nor top-p: the same;
- with top-p and no top-k: the same, but that the total of all probabilities adds up the ranks', so
  its last bits may be others, and with them the token where what some tokens reach lies that close
  to top-p.

Where the lists do not suffice, or `room_of` is None, all logits have to be gathered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.config import SamplingParams
from engine.sampling.sampler import (
    Candidates,
    FloatArray,
    IntArray,
    MinP,
    Penalties,
    Sampler,
    Step,
    TopP,
)

N_OPEN = TopP.N_FIRST
"""Tokens of a list where no setting says how many are enough."""

MOST = 4096
"""The longest list: of more, all logits are hardly longer."""

N_HEAD = 5
"""Words before the tokens: how many, whether there are others, the largest logit, the total."""


@dataclass(frozen=True, slots=True, eq=False)
class Shortlist:
    """The likeliest tokens of a slice.

    Args:
        ids, logits: (n,), after penalties, sorted: falling logits, of equal ones rising ids.
        lacks: there are others, less likely ones, that may count.
        best: the largest logit of the slice, not finite if that is not usable, or nothing can come.
        total: of the weights of all tokens of the slice, as multiples of the largest; 0 if nobody
            asks for it.
    """

    ids: IntArray
    logits: FloatArray
    lacks: bool
    best: float
    total: float

    def packed(self, room: int) -> NDArray[np.int32]:
        """As so many words for any list of up to `room` tokens: (N_HEAD + 2 * room,)."""
        n = len(self.ids)
        words = np.zeros(N_HEAD + 2 * room, np.int32)
        words[:2] = n, self.lacks
        words[2:3] = np.array([self.best], np.float32).view(np.int32)
        words[3:N_HEAD] = np.array([self.total], np.float64).view(np.int32)
        words[N_HEAD : N_HEAD + n] = self.ids
        words[N_HEAD + room : N_HEAD + room + n] = self.logits.view(np.int32)
        return words

    @staticmethod
    def unpacked(words: NDArray[np.int32]) -> Shortlist:
        """What `packed` made."""
        n, lacks = words[:2].tolist()
        room = (len(words) - N_HEAD) // 2
        best, total = words[2:3].view(np.float32), words[3:N_HEAD].copy().view(np.float64)
        ids = words[N_HEAD : N_HEAD + n].astype(np.int64)
        logits = words[N_HEAD + room : N_HEAD + room + n].view(np.float32)
        return Shortlist(ids, logits, bool(lacks), float(best[0]), float(total[0]))


def room_of(params: SamplingParams, n_vocab: int) -> int | None:
    """Tokens that a list may have; None where only all logits do."""
    p = params
    if p.temperature <= 0:
        return 1
    if p.top_k:
        return min(p.top_k, n_vocab) if p.top_k <= MOST else None
    is_open = p.typical_p < 1 or (p.top_p >= 1 and p.min_p <= 0)
    return None if is_open else min(N_OPEN, n_vocab)


def shortlist(
    logits: FloatArray, first: int, sampler: Sampler, room: int, never: Sequence[int] = ()
) -> Shortlist:
    """The likeliest tokens of a slice.

    Args:
        logits: (n,), of the ids from `first` on; may be none. They are left as they are.
        sampler: for its settings and its history; it draws nothing.
        room: see `room_of`.
        never: tokens that must not come, of any rank.
    """
    ids = np.arange(first, first + logits.size)
    logits = np.array(logits, np.float32)
    logits[[token - first for token in never if 0 <= token - first < logits.size]] = -np.inf
    best = float(logits.max(initial=-np.inf))
    if not math.isfinite(best):
        return Shortlist(ids[:0], logits[:0], lacks=False, best=best, total=0.0)
    all_ = Candidates(ids, logits)
    for step in sampler.steps:
        if isinstance(step, Penalties):
            all_ = step(all_)
    top = all_.top(room)
    can_come = top.logits > -np.inf
    lacks = bool(len(top) < len(all_) and can_come.all())
    total = float(all_.weights().sum()) if _needs_total(sampler.params) else 0.0
    top = top.take(can_come, is_sorted=True)
    return Shortlist(top.ids, top.logits, lacks, float(top.logits.max(initial=-np.inf)), total)


def draw(sampler: Sampler, lists: Sequence[Shortlist]) -> int | None:
    """The next token; None where the lists do not suffice, and nothing has changed.

    Args:
        sampler: has the random numbers.
        lists: of slices that together have every token once.

    Raises:
        EngineError: the logits are not usable, see `Candidates.from_logits`.
    """
    bests = np.array([found.best for found in lists], np.float32)
    Candidates.from_logits(bests)  # raises where it would with all logits
    known, lacks = _joined(lists)
    steps = [step for step in sampler.steps if not isinstance(step, Penalties)]
    if sampler.params.top_k == 0 and not sampler.is_greedy:
        least = max((_least(step, known) for step in steps), default=-math.inf)
        is_whole = not lacks or float(known.logits.min()) < least
        first = steps[0]
        if isinstance(first, TopP):
            best = float(bests.max())
            total = sum(found.total * math.exp(found.best - best) for found in lists)
            known, steps = known.sort(), steps[1:]
            enough = first.of_likeliest(known, total)
            is_whole = is_whole or enough is not None
            known = known if enough is None else enough
        if not is_whole:
            return None
    for step in steps:
        known = step(known)
    return sampler.pick(known)


def _least(step: Step, known: Candidates) -> float:
    """What a logit must at least be to pass a step, as far as that is known."""
    if not isinstance(step, MinP):
        return -math.inf
    return float(known.logits.max() + np.float32(math.log(step.p)))


def _joined(lists: Sequence[Shortlist]) -> tuple[Candidates, bool]:
    """The likeliest tokens of all slices, without a gap; whether others may count."""
    ids = np.concatenate([found.ids for found in lists])
    logits = np.concatenate([found.logits for found in lists])
    order = np.argsort(ids)
    top = Candidates(ids[order], logits[order]).sort()
    ends = [found.ids[-1] for found in lists if found.lacks]
    n = min((int(np.flatnonzero(top.ids == end)[0]) + 1 for end in ends), default=len(top))
    ids, logits = top.ids[:n], top.logits[:n]
    order = np.argsort(ids)
    return Candidates(ids[order], logits[order]), bool(ends)


def _needs_total(params: SamplingParams) -> bool:
    return params.temperature > 0 and params.top_k == 0 and params.top_p < 1
