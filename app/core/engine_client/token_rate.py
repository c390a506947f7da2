"""The figures of an answer while it is written."""

from __future__ import annotations

import time

RATE_WINDOW_S = 1.0


class TokenRate:
    """Meter of tokens per second over a short window."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._n_tokens = 0

    def count(self, n_tokens: int) -> None:
        if self._since is None:  # the first token says nothing about decoding
            self._since = time.perf_counter()
        else:
            self._n_tokens += n_tokens

    def due(self) -> float | None:
        """Return the rate if the window is full, else None."""
        if self._since is None:
            return None
        seconds = time.perf_counter() - self._since
        if seconds < RATE_WINDOW_S:
            return None
        rate = self._n_tokens / seconds
        self._since, self._n_tokens = time.perf_counter(), 0
        return rate


class AnswerMeter:
    """Meter of one answer, for the figures of one that is cut off.

    Attributes:
        asked_at: time of the question, by `time.perf_counter`.
        n_tokens: number of tokens so far.
        first_token_s: seconds from the question to the first token; 0 while there is none.
    """

    def __init__(self) -> None:
        self.asked_at = self._first = self._last = time.perf_counter()
        self.n_tokens = self._n_later = 0
        self.first_token_s = 0.0

    def count(self, n_tokens: int) -> None:
        """Count tokens that have arrived together."""
        self._last = time.perf_counter()
        if self.n_tokens:
            self._n_later += n_tokens
        elif n_tokens:
            self._first, self.first_token_s = self._last, self._last - self.asked_at
        self.n_tokens += n_tokens

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second since the first ones arrived; 0 while that is unknown."""
        seconds = self._last - self._first
        return self._n_later / seconds if seconds > 0 else 0.0
