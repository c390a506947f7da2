"""How much of a prompt is computed at once while other answers are running."""

from __future__ import annotations

LONGEST_S = 0.25
"""Seconds that a pass may take where somebody reads other answers meanwhile."""

LEAST = 32
"""Smallest piece of a prompt, in tokens: with fewer, products wait for weights."""

FIRST = 128
"""Piece of a prompt, in tokens, until a pass has been measured."""


class Pace:
    """Measured time of prompts' pieces, and the piece that takes about `LONGEST_S`."""

    def __init__(self) -> None:
        self._token_s: float | None = None

    @property
    def n(self) -> int:
        """Number of tokens of a piece."""
        if self._token_s is None:
            return FIRST
        return max(LEAST, int(LONGEST_S / self._token_s))

    def note(self, n: int, seconds: float) -> None:
        """Note how long a pass with n tokens of a prompt took."""
        token_s = max(seconds, 1e-9) / n
        before = token_s if self._token_s is None else self._token_s
        self._token_s = (before + token_s) / 2
