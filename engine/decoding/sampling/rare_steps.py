"""Steps of sampling that are off unless somebody asks for them; only hosts compute them.

The meaning of each is llama.cpp's, unless it says otherwise. Every step leaves at least one
candidate that may come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.decoding.sampling.steps import Candidates, FloatArray, SamplingTemperature, find_ids

__all__ = ["DynamicTemperature", "LogitBias", "Mirostat", "TopNSigma", "Xtc"]


SMALLEST = float(np.finfo(np.float64).tiny)
"""Temperature that stands for 0: it leaves the best candidates alone."""


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Step that adds numbers to the logits of tokens; where it forbids all, it changes nothing."""

    biases: tuple[tuple[int, float], ...]

    def __call__(self, candidates: Candidates) -> Candidates:
        tokens = np.array([token for token, _ in self.biases], np.int64)
        order = np.argsort(tokens, kind="stable")
        at, which = find_ids(candidates.ids, tokens[order])
        values = np.array([bias for _, bias in self.biases], np.float32)[order]
        logits = candidates.logits.copy()
        np.add.at(logits, at, values[which])  # a token may be named twice
        return _if_any(candidates, logits)


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
    """Step that sometimes leaves out all likely candidates but the least likely of them.

    Args:
        draw: returns a random number from [0, 1).
    """

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
        lowest, highest: temperatures at an entropy of 0, and where all are equally likely.
        exponent: above 1, only a high entropy raises it.
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
        return SamplingTemperature(max(temperature, SMALLEST))(candidates)


class Mirostat:
    """Step that keeps the candidates whose surprise is below a bound, which follows the text.

    Basu et al., "Mirostat: A Neural Text Decoding Algorithm that Directly Controls Perplexity"
    (arXiv 2007.14966), version 2.

    Args:
        target: surprise that the text should have on average, in bits per token.
        rate: part of the error by which the bound moves.
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
        """Move the bound after a token.

        Args:
            surprise: that of the token among the candidates that were kept, in bits.
        """
        self._bounds.append(self._bounds[-1] - self._rate * (surprise - self._target))

    def take_back(self, n: int) -> None:
        """Forget the last n observed tokens, or all if there are fewer."""
        del self._bounds[max(1, len(self._bounds) - n) :]


def _if_any(candidates: Candidates, logits: FloatArray) -> Candidates:
    """Return candidates with other logits, or as they were if none of them could come."""
    if not np.isfinite(logits.max()):
        return candidates
    return Candidates(candidates.ids, logits)
