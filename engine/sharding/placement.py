"""How a tensor lies on the ranks: DTensor's words, with uneven intervals."""

from __future__ import annotations

from dataclasses import dataclass

from engine.sharding.ranges import Ranges

Slices = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank holds one interval of dimension `dim`, or one of each of its segments.

    Several tensors that a file stores as one, such as gate and up, are segments: the dimension has
    them one after another, and a rank holds its interval of each, in the same order.

    Ranges may count coarser units than the dimension has elements (heads instead of rows): the
    dimension is then a whole multiple of all units together, alike for all segments.
    """

    dim: int
    ranges: Ranges | tuple[Ranges, ...]

    @property
    def segments(self) -> tuple[Ranges, ...]:
        return (self.ranges,) if isinstance(self.ranges, Ranges) else self.ranges

    def owners(self) -> tuple[int, ...]:
        """The ranks that hold something."""
        return tuple(sorted({rank for segment in self.segments for rank in segment.owners()}))

    def pieces(self, shape: tuple[int, ...], rank: int) -> tuple[Slices, ...]:
        """The parts of a tensor of `shape` that `rank` holds, in order; empty if it has nothing.

        Joined along `dim` they are what the rank computes with. Neighbours are one part.
        """
        factor, rest = divmod(shape[self.dim], sum(s.total for s in self.segments))
        assert rest == 0, f"dimension {self.dim} of {shape} is no multiple of its units"
        whole = tuple(slice(0, n) for n in shape)
        return tuple(
            (*whole[: self.dim], slice(a * factor, b * factor), *whole[self.dim + 1 :])
            for a, b in self._intervals(rank)
        )

    def _intervals(self, rank: int) -> list[tuple[int, int]]:
        """What `rank` holds of all segments together, in their units."""
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
    """Each rank of `ranks` holds the whole tensor."""

    ranks: tuple[int, ...]

    def owners(self) -> tuple[int, ...]:
        """The ranks that hold it."""
        return self.ranks

    def pieces(self, shape: tuple[int, ...], rank: int) -> tuple[Slices, ...]:
        """The whole of a tensor of `shape`, or nothing if `rank` does not take part."""
        return (tuple(slice(0, n) for n in shape),) if rank in self.ranks else ()


Placement = Shard | Replicate
