"""Who wants how much of what: the table that every kind of split is a pattern in.

For each block and part (attention, recurrent layer, FFN, experts, shared expert) and for the two
ends of the model (embedding, output head) the table holds the share of every rank. Tensor
parallelism has the same fractions everywhere, a layer split is one-hot per block, an override is
one-hot for the parts it names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from engine.errors import SplitError
from engine.gguf.tensors import split_name
from engine.parallel.ranges import Apportioner

Shares = tuple[float, ...]

PARTS = (
    ("experts", re.compile(r"ffn_(gate|up|down|gate_up)_exps\.")),
    ("shared", re.compile(r"ffn_(gate|up|down)_shexp\.")),
    ("ffn", re.compile(r"ffn_(gate|up|down)\.")),
    ("recurrent", re.compile(r"(ssm|shortconv)[_.](?!.*norm)")),
    ("attention", re.compile(r"attn_(?!.*norm)")),
)
"""Which part of a block a tensor belongs to, by its name; the others are held by all ranks."""


@dataclass(frozen=True, slots=True)
class BlockShares:
    """The wanted share of each rank in the parts of one block; each sums to 1."""

    attention: Shares
    recurrent: Shares
    ffn: Shares
    experts: Shares
    shared: Shares

    @classmethod
    def alike(cls, shares: Shares) -> BlockShares:
        """The same shares in every part."""
        return cls(shares, shares, shares, shares, shares)


@dataclass(frozen=True, slots=True)
class ShareTable:
    """The wanted shares of a whole model."""

    blocks: tuple[BlockShares, ...]
    embedding: Shares
    output: Shares

    @property
    def n_ranks(self) -> int:
        return len(self.output)


def normalise(split: Sequence[float] | None, n_ranks: int) -> Shares:
    """Turn relative weights such as (3, 1) into shares that sum to 1; None means even.

    Raises:
        SplitError: the wrong number of weights, a negative or non-finite one, or only zeros.
    """
    if split is None:
        return (1.0 / n_ranks,) * n_ranks
    if len(split) != n_ranks:
        raise SplitError(
            f"The split has {len(split)} numbers but there are {n_ranks} devices.",
            "Give one number for each device, for example --devices cpu,cpu --split 3,1.",
        )
    if any(not 0 <= s < float("inf") for s in split) or max(split) <= 0:
        raise SplitError(
            "The split must be numbers of at least 0, one of them above 0.",
            "For example --split 3,1.",
        )
    largest = max(split)  # first, so that the sum of huge numbers stays finite
    total = sum(s / largest for s in split)
    return tuple(s / largest / total for s in split)


def share_table(mode: str, shares: Shares, n_layer: int, *, tied: bool) -> ShareTable:
    """The pattern of a split mode.

    Args:
        mode: "tensor" (the same fractions everywhere) or "layer" (whole blocks, in rank order).
        shares: the wanted share of each rank.
        tied: the output head is the embedding, so both ends must be cut alike.
    """
    if mode == "tensor":
        return ShareTable((BlockShares.alike(shares),) * n_layer, shares, shares)
    owners = _layer_owners(shares, n_layer)
    hot = [_one_hot(rank, len(shares)) for rank in owners]
    first, last = (hot[0], hot[-1]) if hot else (shares, shares)
    return ShareTable(tuple(BlockShares.alike(h) for h in hot), last if tied else first, last)


def _layer_owners(shares: Shares, n_layer: int) -> list[int]:
    cut = Apportioner(len(shares)).cut(shares, n_layer)
    return [rank for rank in range(len(shares)) for _ in range(cut.size(rank))]


def _one_hot(rank: int, n_ranks: int) -> Shares:
    return tuple(1.0 if r == rank else 0.0 for r in range(n_ranks))


def apply_overrides(
    table: ShareTable,
    overrides: Iterable[tuple[str, str]],
    devices: Sequence[str],
    tensors: Collection[str],
    recurrent: Sequence[bool] = (),
) -> ShareTable:
    """Put the parts whose tensors match a pattern on one device, whole.

    Args:
        overrides: (regular expression on GGUF tensor names, device); later ones win.
        devices: the device of each rank; the first rank on the named device takes the part.
        tensors: the names in the file.
        recurrent: the blocks that have a recurrent layer in place of attention; their `attn_…`
            tensors belong to it.

    Raises:
        SplitError: a pattern that is no regular expression or matches no part, or a device that
            no rank is on.
    """
    for pattern, device in overrides:
        if device not in devices:
            raise SplitError(
                f"The override '{pattern}={device}' names a device that is not in use.",
                f"Use one of: {', '.join(devices)}.",
            )
        found = list(filter(_compile(pattern).search, tensors))
        hot = _one_hot(list(devices).index(device), len(devices))
        moved = _moved(table, found, hot, recurrent)
        if moved is table:
            raise SplitError(
                f"The override '{pattern}' matches no tensor that can be moved.",
                "`tandem inspect MODEL --tensors` lists the names.",
            )
        table = moved
    return table


def _moved(
    table: ShareTable, names: Iterable[str], hot: Shares, recurrent: Sequence[bool]
) -> ShareTable:
    """`table` with the parts of these tensors one-hot; `table` itself if there are none."""
    blocks, ends = list(table.blocks), {}
    for name in names:
        if name in _ENDS:
            ends[_ENDS[name]] = hot
        elif (found := _part_of(name, recurrent)) is not None and found[0] < len(blocks):
            layer, part = found
            blocks[layer] = replace(blocks[layer], **{part: hot})
    if not ends and all(a is b for a, b in zip(blocks, table.blocks, strict=True)):
        return table
    return replace(table, blocks=tuple(blocks), **ends)


_ENDS = {"token_embd.weight": "embedding", "output.weight": "output"}


def _part_of(name: str, recurrent: Sequence[bool]) -> tuple[int, str] | None:
    """The block and the part of it that a tensor belongs to; None if it cannot be moved."""
    found = split_name(name)
    if found is None:
        return None
    layer, stem = found
    part = next((part for part, pattern in PARTS if pattern.match(stem)), None)
    if part == "attention" and layer < len(recurrent) and recurrent[layer]:
        part = "recurrent"
    return None if part is None else (layer, part)


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise SplitError(
            f"The override '{pattern}' is not a regular expression: {error}.",
            "For example 'ffn_.*_exps=cpu'.",
        ) from None
