"""Builds the share table that a person asks for: split mode, parts on the CPU, and overrides.

It is built at every move of a mouse, so whatever depends on tensor names alone is cached.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.errors import SplitError
from engine.model.sharding.shares import (
    BlockShares,
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

EXPERTS = "_exps"
"""Pattern that the names of routed experts' tensors contain, and no others."""


@dataclass(frozen=True, slots=True)
class WantedShares:
    """The shares that a person asks for.

    Attributes:
        devices: device of each rank: first those that were asked for, then those without a share
            that take only what is moved there.
        shares: wanted share of each rank.
        table: wanted shares of each part of the model.
    """

    devices: tuple[str, ...]
    shares: Shares
    table: ShareTable


def wanted_shares(
    params: LoadParams,
    n_layer: int,
    *,
    tied: bool,
    tensors: Collection[str],
    recurrent: Sequence[bool] = (),
    n_mtp: int = 0,
) -> WantedShares:
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
    return WantedShares(devices, shares, replace(table, output=table.embedding) if tied else table)


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
