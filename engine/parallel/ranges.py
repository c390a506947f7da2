"""Cutting a number of units into one interval per rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

    def scaled(self, factor: int, total: int) -> Ranges:
        """The same cut in units `factor` times finer; the last unit may be cut short at `total`."""
        spans = tuple((min(a * factor, total), min(b * factor, total)) for a, b in self.spans)
        return Ranges(spans, total)

    @classmethod
    def from_counts(cls, counts: Sequence[int]) -> Ranges:
        spans, start = [], 0
        for count in counts:
            spans.append((start, start + count))
            start += count
        return cls(tuple(spans), start)


class Apportioner:
    """Largest-remainder rounding that carries its error from one call to the next.

    Cutting each of `n` blocks by itself would round the same way every time and drift from what
    was asked; carrying the error keeps the sum over all blocks within about one unit of it.
    """

    def __init__(self, n_ranks: int) -> None:
        self._carry = [0.0] * n_ranks

    def cut(self, shares: Sequence[float], n_units: int) -> Ranges:
        """Divide `n_units` by `shares` (which sum to 1); a share of 0 always gets nothing."""
        wanted = [
            s * n_units + c if s > 0 else 0.0 for s, c in zip(shares, self._carry, strict=True)
        ]
        active = [r for r, s in enumerate(shares) if s > 0]
        counts = [max(0, floor(w)) for w in wanted]
        while (missing := n_units - sum(counts)) != 0:
            step = 1 if missing > 0 else -1
            movable = [r for r in active if counts[r] + step >= 0]
            rank = max(movable, key=lambda r: (step * (wanted[r] - counts[r]), -r))
            counts[rank] += step
        for rank in active:
            self._carry[rank] = wanted[rank] - counts[rank]
        return Ranges.from_counts(counts)
