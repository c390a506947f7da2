"""The generation rate shown while an answer is written."""

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
