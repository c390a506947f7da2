"""DRY ("don't repeat yourself"): a penalty on tokens that would continue a repetition."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.decoding.sampling.steps import Candidates, IntArray, find_ids

MAX_LOG = 88.7228391  # logarithm of the largest 32-bit float, which limits penalties

TokenBytes = Callable[[int], bytes]


class DryHistory:
    """The tokens of a sequence, and the penalties on tokens that would continue a repetition.

    A repetition of n tokens (n ≥ `allowed`) makes the token that would continue it less likely by
    `strength * growth ** (n - allowed)`. It is counted only back to the last breaker, and tokens
    that contain a breaker are not penalised, because names and lists may legitimately recur.

    p-e-w, "DRY: A modern repetition penalty that reliably prevents looping"
    (github.com/oobabooga/text-generation-webui/pull/5677).

    Args:
        n_last: number of recent tokens to search; -1 for all.
        breakers: strings at which repetitions end.
        token_bytes: returns the bytes that a token adds to a text; None for models without text.
    """

    def __init__(
        self, strength: float, growth: float, allowed: int, n_last: int,
        breakers: Sequence[str] = (), token_bytes: TokenBytes | None = None,
    ) -> None:  # fmt: skip
        self._strength, self._growth, self._allowed = strength, growth, allowed
        self._n_last = n_last
        self._breakers = [text.encode() for text in breakers]
        self._token_bytes = token_bytes
        self._n_kept_bytes = max(map(len, self._breakers), default=1) - 1
        self._tail = b""  # end of the text, in which a breaker may have started
        self._tokens = np.zeros(256, np.int64)
        self._n = self._n_since = 0  # number of all tokens, and of those since the last breaker
        self._all_since: list[int] = []  # `_n_since` after each token

    def append(self, token: int) -> None:
        """Add a token."""
        if self._n == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
        self._tokens[self._n] = token
        self._n += 1
        self._n_since += 1
        if self._token_bytes is not None:
            text = self._tail + self._token_bytes(token)
            if any(breaker in text for breaker in self._breakers):
                self._n_since, text = 0, b""
            self._tail = text[max(0, len(text) - self._n_kept_bytes) :]
        self._all_since.append(self._n_since)

    def take_back(self, n: int) -> None:
        """Remove the last n tokens."""
        self._n -= n
        del self._all_since[self._n :]
        self._n_since = self._all_since[-1] if self._all_since else 0
        if self._token_bytes is not None:
            since = self._tokens[self._n - self._n_since : self._n].tolist()
            text = b"".join(map(self._token_bytes, since))
            self._tail = text[max(0, len(text) - self._n_kept_bytes) :]

    def penalties(self) -> tuple[IntArray, np.ndarray]:
        """Return the tokens that would continue a repetition, ascending, and their penalties."""
        lengths = self._repetitions()
        tokens = np.array(sorted(token for token in lengths if not self._breaks(token)), np.int64)
        exponents = np.array([lengths[int(token)] - self._allowed for token in tokens], np.float64)
        return tokens, self._strength * self._growth**exponents

    def _repetitions(self) -> dict[int, int]:
        n = self._n if self._n_last < 0 else min(self._n, self._n_last)
        longest = min(self._n_since, n - 1, self._allowed + self._most_growth())
        if n <= self._allowed or min(self._n_since, n) < self._allowed:
            return {}
        tokens = self._tokens[self._n - n : self._n]
        ends = np.arange(n - 1)  # possible ends of earlier occurrences
        repetitions: dict[int, int] = {}
        for length in range(longest + 1):
            if length:
                ends = ends[ends >= length - 1]
                ends = ends[tokens[ends - (length - 1)] == tokens[n - length]]
            if not ends.size:
                break
            if length >= self._allowed:
                repetitions.update(dict.fromkeys(tokens[ends + 1].tolist(), length))
        return repetitions

    def _most_growth(self) -> int:
        return int(MAX_LOG / math.log(self._growth)) if self._growth > 1.000001 else 0

    def _breaks(self, token: int) -> bool:
        if self._token_bytes is None:
            return False
        text = self._token_bytes(token)
        return any(breaker in text for breaker in self._breakers)


@dataclass(frozen=True, slots=True)
class Dry:
    """Step that lowers the logits of tokens that would continue a repetition."""

    history: DryHistory

    def __call__(self, candidates: Candidates) -> Candidates:
        tokens, penalties = self.history.penalties()
        if candidates.is_sorted:
            candidates = candidates.take(np.argsort(candidates.ids), is_sorted=False)
        at, which = find_ids(candidates.ids, tokens)
        if not at.size:
            return candidates
        logits = candidates.logits.copy()
        with np.errstate(over="ignore"):
            logits[at] = np.maximum(logits[at] - penalties[which], np.finfo(np.float32).min)
        return Candidates(candidates.ids, logits)
