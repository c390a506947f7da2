"""Placements of tensors on ranks: `Shard` and `Replicate` as in DTensor, with uneven intervals."""

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

Slices = tuple[slice, ...]  # one slice per dimension of a tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """Placement in which each rank has an interval of dimension `dim` or of each of its segments.

    Segments are tensors (e.g. gate and up) that a file stores as one, concatenated along the
    dimension; a rank holds its interval of each, in the same order.

    The intervals may count coarser units than the dimension's elements (heads instead of rows). The
    dimension is then a multiple of the total number of units, with the same factor for all
    segments.
    """

    dim: int
    ranges: Ranges | tuple[Ranges, ...]

    @property
    def segments(self) -> tuple[Ranges, ...]:
        """Intervals of each segment; a single one unless the file fuses tensors."""
        return (self.ranges,) if isinstance(self.ranges, Ranges) else self.ranges

    def owners(self) -> tuple[int, ...]:
        """Return the ranks that hold anything."""
        return tuple(sorted({rank for segment in self.segments for rank in segment.owners()}))

    def pieces(self, shape: tuple[int, ...], rank: int) -> tuple[Slices, ...]:
        """Return the parts of a tensor of `shape` that `rank` holds, in order; possibly none.

        Concatenated along `dim`, they are the rank's tensor. Adjacent intervals form one part.
        """
        factor, rest = divmod(shape[self.dim], sum(s.total for s in self.segments))
        assert rest == 0, f"dimension {self.dim} of {shape} is not a multiple of its units"
        whole = tuple(slice(0, n) for n in shape)
        return tuple(
            (*whole[: self.dim], slice(a * factor, b * factor), *whole[self.dim + 1 :])
            for a, b in self._intervals(rank)
        )

    def _intervals(self, rank: int) -> list[tuple[int, int]]:
        intervals: list[tuple[int, int]] = []
        begin = 0
        for segment in self.segments:
            start, stop = (begin + end for end in segment.spans[rank])
            begin += segment.total
            if intervals and stop > start == intervals[-1][1]:
                intervals[-1] = (intervals[-1][0], stop)
            elif stop > start:
                intervals.append((start, stop))
        return intervals


@dataclass(frozen=True, slots=True)
class Replicate:
    """Placement in which each of `ranks` holds the whole tensor."""

    ranks: tuple[int, ...]

    def owners(self) -> tuple[int, ...]:
        """Return the ranks that hold the tensor."""
        return self.ranks

    def pieces(self, shape: tuple[int, ...], rank: int) -> tuple[Slices, ...]:
        """Return the whole tensor of `shape`, or nothing if `rank` does not hold it."""
        return (tuple(slice(0, n) for n in shape),) if rank in self.ranks else ()


Placement = Shard | Replicate


EXPERTS = "_exps"  # substring found only in the names of routed experts' tensors


@dataclass(frozen=True, slots=True)
class RequestedShares:
    """The shares that a load requests.

    Attributes:
        devices: device of each rank: first the load's devices, then devices without a share that
            only take overrides.
        shares: requested share of each rank.
        table: requested shares for each part of the model.
    """

    devices: tuple[str, ...]
    shares: Shares
    table: ShareTable


def requested_shares(
    params: LoadParams, n_layer: int, *, tied: bool, tensors: Collection[str],
    recurrent: Sequence[bool] = (), n_mtp: int = 0,
) -> RequestedShares:  # fmt: skip
    """Return the shares that `params` request.

    Blocks on the CPU do not count when the others are split. The embedding goes with the CPU
    blocks, unless it is also the output head. MTP blocks have the shares of the last block before
    them.

    Args:
        n_layer: number of blocks, excluding MTP blocks.
        tied: whether the output head is the embedding.
        tensors: names of the tensors in the file.
        recurrent: whether each block is recurrent; see `apply_overrides`.

    Raises:
        SplitError: this model cannot be split that way over these devices.
    """
    devices = params.all_devices
    n_chosen, n_ranks = len(params.devices), len(devices)
    shares = normalise(params.split, n_chosen) + (0.0,) * (n_ranks - n_chosen)
    n_first = min(params.n_cpu_blocks, n_layer)
    groups = params.group_sizes
    if params.split_mode == "groups" and sum(groups) != n_chosen:
        raise SplitError(
            "The groups {groups} contain {n} ranks, but there are {other} devices.",
            "Specify sizes that add up, for example --devices cpu,cpu,cpu --groups 2,1.",
            groups=",".join(map(str, groups)), n=sum(groups), other=n_chosen,
        )  # fmt: skip
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


def _with_first_blocks(table: ShareTable, n: int, hot: Shares, *, tied: bool) -> ShareTable:
    """Prepend `n` blocks on one rank to the blocks of `table`, with the embedding unless it is
    tied."""
    if not n:
        return table
    blocks = (BlockShares.alike(hot),) * n + table.blocks
    return replace(table, blocks=blocks, embedding=table.embedding if tied else hot)


def _with_experts(table: ShareTable, n: int, hot: Shares) -> ShareTable:
    made = {row: replace(row, experts=hot) for row in set(table.blocks[:n])}
    first = tuple(made[row] for row in table.blocks[:n])
    return replace(table, blocks=first + table.blocks[n:])


def _require_experts(tensors: tuple[str, ...], recurrent: tuple[bool, ...]) -> None:
    if not movable_tensors(tensors, recurrent).matching(EXPERTS).blocks:
        raise SplitError(
            "This model has no experts to put on the CPU.",
            "Use --n-cpu-blocks to put whole blocks there.",
        )
