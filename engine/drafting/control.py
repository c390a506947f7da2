"""Choice of how many guesses are worth checking, by what this has brought and taken so far."""

from __future__ import annotations

from collections.abc import Sequence

LENGTHS = (1, 3, 7, 15)
"""Numbers of guesses that are checked at once: with the token before them, rows of a pass that is
recorded."""

ALIKE = (2, 3, 5, 9)
"""Numbers of last tokens that stood in the text before, from each of which on the share of right
guesses is measured apart: the more tokens are alike, the more guesses are right."""

FIRST_SHARES = (0.3, 0.45, 0.6, 0.8)
"""Shares of right guesses for each number of `ALIKE`, as long as none have been checked."""

WEIGHT = 0.1
"""Weight of a new measurement in a mean."""

N_UNSTEADY = 3
"""Number of passes of one size whose times do not count: what they need is allocated and recorded
then."""

ROW_COST = 0.04
"""Time of one more row as a part of that of the first, as long as it has not been measured."""

LEAST_GAIN = 1.03
"""Expected gain in tokens per second from which on guesses are checked."""

PROBE_EVERY = 64
"""Number of times that guesses are left out before one is checked, to measure once more."""


class DraftControl:
    """Measured times of passes and shares of right guesses, and what follows from them."""

    def __init__(self) -> None:
        self._shares = list(FIRST_SHARES)
        self._times: dict[int, float] = {}
        self._n_passes: dict[int, int] = {}
        self._n_left_out = 0

    def note_pass(self, n_rows: int, seconds: float) -> None:
        """Note how long a pass took that computed nothing but rows of this kind."""
        self._n_passes[n_rows] = self._n_passes.get(n_rows, 0) + 1
        if self._n_passes[n_rows] > N_UNSTEADY:
            before = self._times.get(n_rows, seconds)
            # one that was held up by something else says little
            self._times[n_rows] = before + WEIGHT * (min(seconds, 2 * before) - before)

    def note_check(self, n_alike: int, n_guessed: int, n_right: int) -> None:
        """Note how many of the guesses were right, the first ones."""
        place = _place(n_alike)
        for number in range(min(n_right + 1, n_guessed)):
            is_right = float(number < n_right)
            self._shares[place] += WEIGHT * (is_right - self._shares[place])

    def choose(self, n_alike: Sequence[int], most: int) -> int:
        """Return how many guesses to check for each of some answers; 0 for none.

        Args:
            n_alike: of each answer, the number of last tokens that stood in the text before.
            most: largest number of guesses that all of them have.
        """
        n, shares = len(n_alike), [self._shares[_place(alike)] for alike in n_alike]
        lengths = [length for length in LENGTHS if length <= most]
        gains = {
            length: sum(_expected(share, length) for share in shares) / n
            * self._seconds(n) / self._seconds(n * (1 + length))
            for length in lengths
        }  # fmt: skip
        best = max(lengths, key=gains.__getitem__, default=0)
        if best and gains[best] < LEAST_GAIN:
            self._n_left_out = (self._n_left_out + 1) % PROBE_EVERY
            return 0 if self._n_left_out else lengths[0]
        return best

    def _seconds(self, n_rows: int) -> float:
        """Return the time of a pass; from that of the next smaller size where it is not known."""
        found = self._times.get(n_rows)
        if found is not None:
            return found
        smaller = max((size for size in self._times if size < n_rows), default=0)
        known = self._times.get(smaller, 1.0)
        return known * (1 + ROW_COST * n_rows) / (1 + ROW_COST * smaller)


def _place(n_alike: int) -> int:
    """Return in which of the shares a guess counts."""
    return max(0, sum(n_alike >= least for least in ALIKE) - 1)


def _expected(share: float, length: int) -> float:
    """Return the mean number of tokens that a pass gives: one, and the guesses that are right."""
    return sum(share**n for n in range(length + 1))
