"""Placements of tensors on ranks, `Shard` and `Replicate` as in DTensor, with uneven intervals."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.errors import SplitError
from engine.model.sharding.shares import (
    BlockShares,
    Ranges,
    Shares,
    ShareTable,
    apply_overrides,
    movable_tensors,
    normalise,
    one_hot,
    share_table,
)

if TYPE_CHECKING:
    from engine.load_params import LoadParams

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


EXPERTS = "_exps"
"""Pattern that the names of routed experts' tensors contain, and no others."""


@dataclass(frozen=True, slots=True)
class RequestedShares:
    """The shares that a load asks for.

    Attributes:
        devices: device of each rank: first those that were asked for, then those without a share
            that take only what is moved there.
        shares: wanted share of each rank.
        table: wanted shares of each part of the model.
    """

    devices: tuple[str, ...]
    shares: Shares
    table: ShareTable


def requested_shares(
    params: LoadParams,
    n_layer: int,
    *,
    tied: bool,
    tensors: Collection[str],
    recurrent: Sequence[bool] = (),
    n_mtp: int = 0,
) -> RequestedShares:
    """Return the shares that `params` ask for.

    Blocks on the CPU do not count in the split of the others. The embedding goes with them, unless
    it is the output head too. Blocks that only guess have the shares of the last one before them.

    Args:
        n_layer: number of blocks that every token goes through.
        tied: whether the output head is the embedding.
        tensors: names of the tensors in the file.
        recurrent: whether each block is recurrent, see `apply_overrides`.
        n_mtp: number of blocks behind them that only guess.

    Raises:
        SplitError: this model cannot be split like that over these devices.
    """
    devices = params.all_devices
    n_asked, n_ranks = len(params.devices), len(devices)
    shares = normalise(params.split, n_asked) + (0.0,) * (n_ranks - n_asked)
    n_first = min(params.n_cpu_blocks, n_layer)
    groups = _groups_of(params)
    table = share_table(params.split_mode, shares, n_layer - n_first, tied=tied, groups=groups)
    if params.n_cpu_blocks or params.n_cpu_moe:
        hot = one_hot(devices.index("cpu"), n_ranks)
        table = _with_first_blocks(table, n_first, hot, tied=tied)
        if params.n_cpu_moe:
            _require_experts(tuple(tensors), tuple(recurrent))
            table = _with_experts(table, params.n_cpu_moe, hot)
    table = replace(table, blocks=table.blocks + table.blocks[-1:] * n_mtp)
    table = apply_overrides(table, params.overrides, devices, tensors, recurrent)
    return RequestedShares(
        devices, shares, replace(table, output=table.embedding) if tied else table
    )


def _groups_of(params: LoadParams) -> tuple[int, ...]:
    """Return the sizes of the groups of ranks; empty in modes without groups.

    Raises:
        SplitError: they do not add up to the number of ranks.
    """
    n_ranks, groups = len(params.devices), params.group_sizes
    if params.split_mode == "groups" and sum(groups) != n_ranks:
        shown = ",".join(map(str, groups))
        raise SplitError(
            f"The groups {shown} have {sum(groups)} ranks, but there are {n_ranks} devices.",
            "Give sizes that add up, for example --devices cpu,cpu,cpu --groups 2,1.",
        )
    return groups


def _with_first_blocks(table: ShareTable, n: int, hot: Shares, *, tied: bool) -> ShareTable:
    """Put `n` blocks, whole on one rank, before those of `table`, and the embedding with them."""
    if not n:
        return table
    blocks = (BlockShares.alike(hot),) * n + table.blocks
    return replace(table, blocks=blocks, embedding=table.embedding if tied else hot)


def _with_experts(table: ShareTable, n: int, hot: Shares) -> ShareTable:
    """Return `table` with the experts of its first `n` blocks on one rank."""
    made = {row: replace(row, experts=hot) for row in set(table.blocks[:n])}
    first = tuple(made[row] for row in table.blocks[:n])
    return replace(table, blocks=first + table.blocks[n:])


def _require_experts(tensors: tuple[str, ...], recurrent: tuple[bool, ...]) -> None:
    if not movable_tensors(tensors, recurrent).matching(EXPERTS).blocks:
        raise SplitError(
            "This model has no experts to put on the CPU.",
            "Put whole blocks there, with --n-cpu-blocks.",
        )
