"""How a tensor lies on the ranks: DTensor's words, with uneven intervals."""

from __future__ import annotations

from dataclasses import dataclass

from engine.parallel.ranges import Ranges

Slices = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank holds one interval of dimension `dim`.

    `ranges` may count coarser units than the dimension has elements (heads instead of rows): the
    dimension is then a whole multiple of `ranges.total`.
    """

    dim: int
    ranges: Ranges

    def slices(self, shape: tuple[int, ...], rank: int) -> Slices | None:
        """The part of a tensor of `shape` that `rank` holds; None if it holds nothing."""
        start, stop = self.ranges.spans[rank]
        if start == stop:
            return None
        factor, rest = divmod(shape[self.dim], self.ranges.total)
        assert rest == 0, f"dimension {shape[self.dim]} is not a multiple of {self.ranges.total}"
        whole = [slice(0, n) for n in shape]
        whole[self.dim] = slice(start * factor, stop * factor)
        return tuple(whole)


@dataclass(frozen=True, slots=True)
class Replicate:
    """Each rank of `ranks` holds the whole tensor."""

    ranks: tuple[int, ...]

    def slices(self, shape: tuple[int, ...], rank: int) -> Slices | None:
        """The whole of a tensor of `shape`, or None if `rank` does not take part."""
        return tuple(slice(0, n) for n in shape) if rank in self.ranks else None


Placement = Shard | Replicate
