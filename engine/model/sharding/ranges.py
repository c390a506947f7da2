"""Cuts a number of units into one interval per rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf


@dataclass(frozen=True, slots=True)
class Ranges:
    """One half-open interval of units for each rank.

    Intervals follow each other in rank order. They may be empty, and they overlap only where units
    are held more than once (key-value heads shared by ranks).

    Attributes:
        spans: interval (start, stop) of each rank.
        total: number of units.
    """

    spans: tuple[tuple[int, int], ...]
    total: int

    def __hash__(self) -> int:
        return hash(self.spans)

    def size(self, rank: int) -> int:
        """Return the number of units of a rank."""
        start, stop = self.spans[rank]
        return stop - start

    def owners(self) -> tuple[int, ...]:
        """Return the ranks whose interval is not empty."""
        return tuple(r for r, (start, stop) in enumerate(self.spans) if stop > start)

    def first_held(self, rank: int) -> slice:
        """Return the part of a rank's interval that no earlier rank has, counted from its start."""
        start, stop = self.spans[rank]
        taken = max((end for begin, end in self.spans[:rank] if end > begin), default=0)
        return slice(min(max(taken - start, 0), stop - start), stop - start)

    def shortened(self, total: int) -> Ranges:
        """Return a cut of fewer units in the same proportions; whoever has any keeps at least one.

        Args:
            total: number of units, at least that of the ranks.
        """
        return _shortened(self, total)

    def scaled(self, factor: int) -> Ranges:
        """Return the same cut, in units `factor` times finer."""
        return _scaled(self, factor)


@lru_cache(maxsize=1 << 14)
def _scaled(ranges: Ranges, factor: int) -> Ranges:
    spans = tuple((start * factor, stop * factor) for start, stop in ranges.spans)
    return Ranges(spans, ranges.total * factor)


@lru_cache(maxsize=1 << 14)
def _shortened(ranges: Ranges, total: int) -> Ranges:
    sizes = [float(stop - start) for start, stop in ranges.spans]
    wanted = [size * total / ranges.total for size in sizes]
    counts = [
        max(n, int(size > 0))
        for n, size in zip(largest_remainder(wanted, sizes, total), sizes, strict=True)
    ]
    counts[counts.index(max(counts))] -= sum(counts) - total
    return _from_counts(tuple(counts), total, 1)


@lru_cache(maxsize=1 << 14)
def _from_counts(counts: tuple[int, ...], total: int, unit: int) -> Ranges:
    """Return the cut with so many units for each rank; the last unit may be short.

    Cached, as most blocks of a model are cut alike.
    """
    stops = [min(stop * unit, total) for stop in accumulate(counts)]
    return Ranges(tuple(pairwise([0, *stops])), total)


def empty_ranges(n_ranks: int) -> Ranges:
    """Return the empty cut of a part that a block does not have."""
    return _from_counts((0,) * n_ranks, 0, 1)


class Apportioner:
    """Largest-remainder apportionment that carries its rounding error from call to call.

    Cutting each of `n` blocks by itself would round the same way every time and drift from the
    wanted shares; carrying the error keeps the sum over all blocks within about one unit of them.
    """

    def __init__(self, n_ranks: int) -> None:
        self._carry = [0.0] * n_ranks

    def cut(self, shares: Sequence[float], total: int, unit: int = 1) -> Ranges:
        """Divide `total` by `shares` (which sum to 1) at multiples of `unit`.

        A share of 0 always gets nothing and leaves that rank's error unchanged; a total of 0 leaves
        all errors unchanged. The last unit may be short.
        """
        if not total:
            return empty_ranges(len(shares))
        wanted = [s * total + c if s else 0.0 for s, c in zip(shares, self._carry, strict=True)]
        units = [w / unit for w in wanted] if unit > 1 else wanted
        ranges = _from_counts(
            tuple(largest_remainder(units, shares, -(-total // unit))), total, unit
        )
        self._carry = [
            w - (b - a) if s else c
            for w, (a, b), s, c in zip(wanted, ranges.spans, shares, self._carry, strict=True)
        ]
        return ranges


def largest_remainder(wanted: Sequence[float], shares: Sequence[float], total: int) -> list[int]:
    """Round `wanted` to whole numbers that sum to `total`; ranks without a share stay at 0."""
    counts = [int(w) if w > 0 else 0 for w in wanted]
    missing = total - sum(counts)
    if missing:
        step = 1 if missing > 0 else -1
        gaps = [
            step * (w - c) if s else -inf for w, c, s in zip(wanted, counts, shares, strict=True)
        ]
        while missing:
            rank = gaps.index(max(gaps))
            if counts[rank] + step >= 0:
                counts[rank] += step
                missing -= step
                gaps[rank] = step * (wanted[rank] - counts[rank])
            else:
                gaps[rank] = -inf
    return counts
