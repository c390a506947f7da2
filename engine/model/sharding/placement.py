"""Placements of tensors on ranks, `Shard` and `Replicate` as in DTensor, with uneven intervals."""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.sharding.ranges import Ranges

Slices = tuple[slice, ...]
"""One slice per dimension of a tensor."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Placement where each rank holds an interval of dimension `dim`, or of each of its segments.

    Segments are tensors that a file stores as one, such as gate and up: they follow each other in
    the dimension, and a rank holds its interval of each, in the same order.

    The intervals may count coarser units than the dimension's elements (heads instead of rows).
    The dimension is then a whole multiple of all units together, with one factor for all segments.
    """

    dim: int
    ranges: Ranges | tuple[Ranges, ...]

    @property
    def segments(self) -> tuple[Ranges, ...]:
        """Intervals of each segment; one segment where the dimension is a single tensor."""
        return (self.ranges,) if isinstance(self.ranges, Ranges) else self.ranges

    def owners(self) -> tuple[int, ...]:
        """Return the ranks that hold anything."""
        return tuple(sorted({rank for segment in self.segments for rank in segment.owners()}))

    def pieces(self, shape: tuple[int, ...], rank: int) -> tuple[Slices, ...]:
        """Return the parts of a tensor of `shape` that `rank` holds, in order; may be empty.

        Joined along `dim` they are what the rank computes with. Adjacent intervals are one part.
        """
        factor, rest = divmod(shape[self.dim], sum(s.total for s in self.segments))
        assert rest == 0, f"dimension {self.dim} of {shape} is no multiple of its units"
        whole = tuple(slice(0, n) for n in shape)
        return tuple(
            (*whole[: self.dim], slice(a * factor, b * factor), *whole[self.dim + 1 :])
            for a, b in self._intervals(rank)
        )

    def _intervals(self, rank: int) -> list[tuple[int, int]]:
        """Return the intervals of `rank` in all segments laid end to end, in their units."""
        found: list[tuple[int, int]] = []
        begin = 0
        for segment in self.segments:
            start, stop = (begin + end for end in segment.spans[rank])
            begin += segment.total
            if found and stop > start == found[-1][1]:
                found[-1] = (found[-1][0], stop)
            elif stop > start:
                found.append((start, stop))
        return found


@dataclass(frozen=True, slots=True)
class Replicate:
    """Placement where each rank of `ranks` holds the whole tensor."""

    ranks: tuple[int, ...]

    def owners(self) -> tuple[int, ...]:
        """Return the ranks that hold the tensor."""
        return self.ranks

    def pieces(self, shape: tuple[int, ...], rank: int) -> tuple[Slices, ...]:
        """Return the whole of a tensor of `shape`, or nothing if `rank` does not hold it."""
        return (tuple(slice(0, n) for n in shape),) if rank in self.ranks else ()


Placement = Shard | Replicate
