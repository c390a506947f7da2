"""Filter steps of sampling: pure functions from candidates to candidates.

Their semantics are llama.cpp's. Every filter leaves at least one candidate. To add a step, write it
here and list it in `sampling.sampler`; paths that sample without calling the steps
(`sampling.slices`, GPU kernels) leave unknown steps to the host; see `all_known`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.errors import EngineError

FloatArray: TypeAlias = NDArray[np.float32]
IntArray: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Tokens that may come next; at least one.

    Args:
        ids: distinct token ids, (n,); ascending, unless `is_sorted`.
        logits: their logits, (n,), at least one of them finite; -inf for a banned token.
        is_sorted: whether they are ordered by descending logit, then by ascending id.
    """

    ids: IntArray
    logits: FloatArray
    is_sorted: bool = False

    @staticmethod
    def from_logits(logits: FloatArray) -> Candidates:
        """Return all tokens of a vocabulary as candidates.

        Raises:
            EngineError: the logits contain a NaN or +inf, or are all -inf.
        """
        if not np.isfinite(logits.max(initial=-np.inf)):  # max propagates NaN
            raise EngineError(
                "The model produced no usable probabilities for the next token (infinite or not"
                " a number).",
                "Load the model again; if this happens again, the file may be corrupted.",
            )
        return Candidates(np.arange(logits.size), logits)

    def __len__(self) -> int:
        return int(self.ids.size)

    def take(self, index: IntArray | NDArray[np.bool_] | slice, is_sorted: bool) -> Candidates:
        """Return the candidates at `index`."""
        return Candidates(self.ids[index], self.logits[index], is_sorted)

    def sort(self) -> Candidates:
        """Return the candidates sorted; see `is_sorted`."""
        if self.is_sorted:
            return self
        return self.take(np.argsort(-self.logits, kind="stable"), is_sorted=True)

    def top(self, k: int) -> Candidates:
        """Return the `k` most likely candidates, sorted, without sorting the rest."""
        if k >= len(self) or self.is_sorted:
            return self.sort().take(slice(k), is_sorted=True)
        threshold = _at_most_kth_largest(self.logits, k)
        above = self.take(np.flatnonzero(self.logits >= threshold), is_sorted=False)
        return above.sort().take(slice(k), is_sorted=True)

    def probabilities(self) -> NDArray[np.float64]:
        """Return the candidates' probabilities, (n,), which sum to 1."""
        weights = self.weights()
        normalised: NDArray[np.float64] = weights / weights.sum()
        return normalised

    def weights(self) -> NDArray[np.float64]:
        """Return the probabilities relative to the largest one, (n,)."""
        below_best = self.logits.astype(np.float64) - float(self.logits.max())
        weights: NDArray[np.float64] = np.exp(below_best)
        return weights


def _at_most_kth_largest(values: FloatArray, k: int) -> np.float32:
    """Return a bound that at least `k` values reach and, in a large vocabulary, hardly more.

    The values are split into many blocks. The k-th largest of the blocks' maxima is such a bound,
    because each maximum is one of the values. This takes one pass over the values and almost no
    sorting.
    """
    block = max(1, values.size // (16 * k))
    whole = values.size // block * block
    maxima = values[:whole].reshape(-1, block).max(axis=1)
    bound: np.float32 = np.partition(maxima, maxima.size - k)[maxima.size - k]
    return bound


Step: TypeAlias = Callable[[Candidates], Candidates]
"""Filter or transformation of the candidates; leaves at least one."""


class TokenHistory:
    """The tokens of a sequence, and counts of the last `n_last` of them (-1 for all)."""

    def __init__(self, n_last: int) -> None:
        self.n_last = n_last
        self._tokens: list[int] = []  # including older ones, for `take_back`
        self._counts: Counter[int] = Counter()

    def append(self, token: int) -> None:
        """Add a token; only the last `n_last` count."""
        if self.n_last == 0:
            return
        self._tokens.append(token)
        self._counts[token] += 1
        if 0 < self.n_last < len(self._tokens):
            self._forget(self._tokens[-self.n_last - 1])

    def extend(self, tokens: Sequence[int]) -> None:
        """Add many tokens."""
        if self.n_last == 0:
            return
        self._tokens += tokens
        self._counts = Counter(self.tokens)

    def take_back(self, n: int) -> None:
        """Remove the last n tokens; older ones count again instead."""
        for _ in range(n if self.n_last else 0):
            if 0 < self.n_last < len(self._tokens):
                self._counts[self._tokens[-self.n_last - 1]] += 1
            self._forget(self._tokens.pop())

    def _forget(self, token: int) -> None:
        self._counts[token] -= 1
        if not self._counts[token]:
            del self._counts[token]

    @property
    def tokens(self) -> list[int]:
        """The tokens that count, oldest first."""
        return self._tokens[-self.n_last :] if self.n_last > 0 else list(self._tokens)

    def counts(self) -> tuple[IntArray, IntArray]:
        """Return the distinct tokens in ascending order, and the count of each: (n,), (n,)."""
        tokens = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
        counts = np.fromiter(self._counts.values(), np.int64, len(self._counts))
        order = np.argsort(tokens)
        return tokens[order], counts[order]


@dataclass(frozen=True, slots=True)
class Penalties:
    """Step that lowers the logits of tokens in the history."""

    history: TokenHistory
    repeat: float
    frequency: float
    presence: float

    def __call__(self, candidates: Candidates) -> Candidates:
        if candidates.is_sorted:
            candidates = candidates.take(np.argsort(candidates.ids), is_sorted=False)
        tokens, counts = self.history.counts()
        at, which = find_ids(candidates.ids, tokens)
        if not at.size:
            return candidates
        logits = candidates.logits.copy()
        seen = logits[at]
        seen = np.where(seen > 0, seen / self.repeat, seen * self.repeat)
        logits[at] = seen - (counts[which] * self.frequency + self.presence)
        return Candidates(candidates.ids, logits)


def find_ids(ids: IntArray, tokens: IntArray) -> tuple[IntArray, IntArray]:
    """Return the indices of common tokens in `ids` (ascending) and in `tokens`."""
    at = np.searchsorted(ids, tokens)
    is_here = at < ids.size
    is_here[is_here] = ids[at[is_here]] == tokens[is_here]
    return at[is_here], np.flatnonzero(is_here)


@dataclass(frozen=True, slots=True)
class TopK:
    """Step that keeps the `k` most likely candidates."""

    k: int

    def __call__(self, candidates: Candidates) -> Candidates:
        return candidates.top(self.k)


@dataclass(frozen=True, slots=True)
class TypicalP:
    """Step that keeps the most typical candidates until their probabilities sum to more than `p`.

    A candidate is typical if its surprise, -log(probability), is close to the expected surprise,
    the entropy.

    Meister et al., "Locally Typical Sampling" (arXiv 2202.00666).
    """

    p: float

    def __call__(self, candidates: Candidates) -> Candidates:
        probabilities = candidates.probabilities()
        possible = probabilities > 0
        surprise = np.full(probabilities.shape, np.inf)
        surprise[possible] = -np.log(probabilities[possible])
        entropy = float(np.sum(probabilities[possible] * surprise[possible]))
        order = np.argsort(np.abs(surprise - entropy), kind="stable")
        reached = np.cumsum(probabilities[order])
        n = int(np.searchsorted(reached, self.p, side="right")) + 1
        return candidates.take(np.sort(order[:n]), candidates.is_sorted)


@dataclass(frozen=True, slots=True)
class TopP:
    """Step that keeps the most likely candidates until their probabilities add up to `p`."""

    p: float
    N_FIRST = 1024
    """Number of candidates to sort at first, nearly always enough."""

    def __call__(self, candidates: Candidates) -> Candidates:
        total = float(candidates.weights().sum())
        # sorting a whole vocabulary is slow
        for n_sorted in (min(self.N_FIRST, len(candidates)), len(candidates)):
            top = candidates.top(n_sorted)
            kept = self.among_top(top, total)
            if kept is not None:
                return kept
        return top

    def among_top(self, top: Candidates, total: float) -> Candidates | None:
        """Apply the step to only the top candidates, sorted; None if they do not reach `p`.

        `total` is the sum of `Candidates.weights` over all candidates.
        """
        reached = np.cumsum(np.exp(top.logits.astype(np.float64) - float(top.logits[0]))) / total
        n = int(np.searchsorted(reached, self.p, side="left")) + 1
        return top.take(slice(n), is_sorted=True) if n <= len(top) else None


@dataclass(frozen=True, slots=True)
class MinP:
    """Step that keeps candidates at least `p` times as likely as the most likely one."""

    p: float

    def __call__(self, candidates: Candidates) -> Candidates:
        threshold = candidates.logits.max() + np.float32(math.log(self.p))
        return candidates.take(candidates.logits >= threshold, candidates.is_sorted)


@dataclass(frozen=True, slots=True)
class SamplingTemperature:
    """Step that divides the logits by the temperature.

    The largest logit is subtracted first, so that none can overflow to +inf.
    """

    temperature: float

    def __call__(self, candidates: Candidates) -> Candidates:
        below_best = candidates.logits.astype(np.float64) - float(candidates.logits.max())
        with np.errstate(over="ignore"):  # to -inf, a probability of 0, which is correct
            logits = (below_best / self.temperature).astype(np.float32)
        return replace(candidates, logits=logits)


def all_known(steps: Sequence[Step], known: Sequence[type]) -> bool:
    """Return whether all steps are of the `known` types, each at most once and in that order.

    Paths that sample without calling the steps check this first, so that a new step is never
    silently dropped. A subclass counts as a different type.
    """
    order = {kind: n for n, kind in enumerate(known)}
    places = [order.get(type(step), -1) for step in steps]
    return all(before < place for before, place in pairwise([-1, *places]))


MIN_TEMPERATURE = float(np.finfo(np.float64).tiny)
"""Replacement for a temperature of 0: only the best candidates remain."""


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Step that adds biases to tokens' logits, unless that would ban all candidates."""

    biases: tuple[tuple[int, float], ...]

    def __call__(self, candidates: Candidates) -> Candidates:
        tokens = np.array([token for token, _ in self.biases], np.int64)
        order = np.argsort(tokens, kind="stable")
        at, which = find_ids(candidates.ids, tokens[order])
        values = np.array([bias for _, bias in self.biases], np.float32)[order]
        logits = candidates.logits.copy()
        np.add.at(logits, at, values[which])  # a token may have several biases
        return Candidates(candidates.ids, logits) if np.isfinite(logits.max()) else candidates


@dataclass(frozen=True, slots=True)
class TopNSigma:
    """Step that keeps candidates within `n` standard deviations of the best logit.

    Tang et al., "Top-nσ: Not All Logits Are You Need" (arXiv 2411.07641).
    """

    n: float

    def __call__(self, candidates: Candidates) -> Candidates:
        logits = candidates.logits
        spread = float(logits[np.isfinite(logits)].std(dtype=np.float64))
        return candidates.take(logits >= logits.max() - self.n * spread, candidates.is_sorted)


@dataclass(frozen=True, slots=True)
class Xtc:
    """Step that sometimes, by a random `draw`, removes all likely candidates except the least
    likely."""

    probability: float
    threshold: float
    draw: Callable[[], float]

    def __call__(self, candidates: Candidates) -> Candidates:
        if self.threshold > 0.5 or len(candidates) < 2 or self.draw() >= self.probability:
            return candidates
        best_first = candidates.sort()
        n_likely = int(np.count_nonzero(best_first.probabilities() >= self.threshold))
        return best_first.take(slice(max(0, n_likely - 1), None), is_sorted=True)


@dataclass(frozen=True, slots=True)
class DynamicTemperature:
    """Step that divides the logits by a temperature that rises with the candidates' entropy.

    Args:
        lowest, highest: temperatures at zero and at maximum entropy.
        exponent: if above 1, mainly high entropy raises the temperature.
    """

    lowest: float
    highest: float
    exponent: float

    def __call__(self, candidates: Candidates) -> Candidates:
        if len(candidates) < 2:
            return candidates
        chances = candidates.probabilities()
        chances = chances[chances > 0]
        entropy = max(0.0, -float(np.sum(chances * np.log(chances)))) / np.log(len(candidates))
        temperature = self.lowest + (self.highest - self.lowest) * entropy**self.exponent
        return SamplingTemperature(max(temperature, MIN_TEMPERATURE))(candidates)


class Mirostat:
    """Step that keeps the candidates with a surprise below an adaptive bound.

    Basu et al., "Mirostat: A Neural Text Decoding Algorithm that Directly Controls Perplexity"
    (arXiv 2007.14966), version 2.

    Args:
        target: mean surprise of the text, in bits per token.
        rate: learning rate of the bound.
    """

    def __init__(self, target: float, rate: float) -> None:
        self._target, self._rate = target, rate
        self._bounds = [2 * target]  # before each token, and before the next one

    def __call__(self, candidates: Candidates) -> Candidates:
        best_first = candidates.sort()
        with np.errstate(divide="ignore"):
            surprise = -np.log2(best_first.probabilities())
        n_kept = max(1, int(np.searchsorted(surprise, self._bounds[-1], side="right")))
        return best_first.take(slice(n_kept), is_sorted=True)

    def observe(self, surprise: float) -> None:
        """Update the bound with the surprise of a token among the kept candidates, in bits."""
        self._bounds.append(self._bounds[-1] - self._rate * (surprise - self._target))

    def take_back(self, n: int) -> None:
        """Remove the last n observed tokens."""
        del self._bounds[max(1, len(self._bounds) - n) :]
