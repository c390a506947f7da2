"""Cutting a number of units into one interval per rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import floor


@dataclass(frozen=True, slots=True)
class Ranges:
    """One half-open interval of units for each rank.

    Intervals follow each other in rank order. They may be empty, and they overlap only where units
    are held more than once (key-value heads shared by ranks).

    Attributes:
        spans: (start, stop) of every rank.
        total: number of units in the whole.
    """

    spans: tuple[tuple[int, int], ...]
    total: int

    def size(self, rank: int) -> int:
        start, stop = self.spans[rank]
        return stop - start

    def owners(self) -> tuple[int, ...]:
        """The ranks whose interval is not empty."""
        return tuple(r for r, (start, stop) in enumerate(self.spans) if stop > start)

    def first_held(self, rank: int) -> slice:
        """The part of this rank's interval, counted from its start, that no rank before it has."""
        start, stop = self.spans[rank]
        taken = max((end for begin, end in self.spans[:rank] if end > begin), default=0)
        return slice(min(max(taken - start, 0), stop - start), stop - start)

    def scaled(self, factor: int) -> Ranges:
        """The same cut in units `factor` times finer."""
        spans = tuple((start * factor, stop * factor) for start, stop in self.spans)
        return Ranges(spans, self.total * factor)


class Apportioner:
    """Largest-remainder rounding that carries its error from one call to the next.

    Cutting each of `n` blocks by itself would round the same way every time and drift from what
    was asked; carrying the error keeps the sum over all blocks within about one unit of it.
    """

    def __init__(self, n_ranks: int) -> None:
        self._carry = [0.0] * n_ranks

    def cut(self, shares: Sequence[float], total: int, unit: int = 1) -> Ranges:
        """Divide `total` by `shares` (which sum to 1) at multiples of `unit`.

        A share of 0 always gets nothing; the last unit may be a short one.
        """
        wanted = [s * total + c if s else 0.0 for s, c in zip(shares, self._carry, strict=True)]
        counts = _round([w / unit for w in wanted], shares, -(-total // unit))
        stops = [min(stop * unit, total) for stop in accumulate(counts)]
        spans = tuple(pairwise([0, *stops]))
        for rank, (start, stop) in enumerate(spans):
            self._carry[rank] = wanted[rank] - (stop - start)
        return Ranges(spans, total)


def _round(wanted: Sequence[float], shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers near `wanted` that sum to `total`; ranks without a share stay at 0."""
    counts = [max(0, floor(w)) for w in wanted]
    while (missing := total - sum(counts)) != 0:
        step = 1 if missing > 0 else -1
        movable = [r for r, s in enumerate(shares) if s > 0 and counts[r] + step >= 0]
        rank = max(movable, key=lambda r: (step * (wanted[r] - counts[r]), -r))
        counts[rank] += step
    return counts
