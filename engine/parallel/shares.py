"""Who wants how much of what: the table that every kind of split is a pattern in.

For each block and part (attention, FFN, experts) and for the two ends of the model (embedding,
output head) the table holds the share of every rank. Tensor parallelism has the same fractions
everywhere, a layer split is one-hot per block, an override is one-hot for the parts it names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from engine.errors import SplitError
from engine.parallel.ranges import Apportioner

Shares = tuple[float, ...]

ATTENTION_TENSORS = ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output")
FFN_TENSORS = ("ffn_gate", "ffn_up", "ffn_down")
EXPERT_TENSORS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


@dataclass(frozen=True, slots=True)
class BlockShares:
    """The wanted share of each rank in the parts of one block; each sums to 1."""

    attention: Shares
    ffn: Shares
    experts: Shares


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
        return ShareTable((BlockShares(shares, shares, shares),) * n_layer, shares, shares)
    owners = _layer_owners(shares, n_layer)
    hot = [_one_hot(rank, len(shares)) for rank in owners]
    first, last = (hot[0], hot[-1]) if hot else (shares, shares)
    return ShareTable(tuple(BlockShares(h, h, h) for h in hot), last if tied else first, last)


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
) -> ShareTable:
    """Put the parts whose tensors match a pattern on one device, whole.

    Args:
        overrides: (regular expression on GGUF tensor names, device); later ones win.
        devices: the device of each rank; the first rank on the named device takes the part.
        tensors: the names in the file.

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
        moved = _moved(table, set(found), _one_hot(list(devices).index(device), len(devices)))
        if moved is table:
            raise SplitError(
                f"The override '{pattern}' matches no tensor that can be moved.",
                "`tandem inspect MODEL --tensors` lists the names.",
            )
        table = moved
    return table


def _moved(table: ShareTable, names: Collection[str], hot: Shares) -> ShareTable:
    """`table` with the parts of these tensors one-hot; `table` itself if there are none."""
    blocks = []
    for layer, block in enumerate(table.blocks):
        parts = {
            part: hot
            for part, tensors in _PARTS.items()
            if any(f"blk.{layer}.{tensor}.weight" in names for tensor in tensors)
        }
        blocks.append(replace(block, **parts) if parts else block)
    ends = {end: hot for end, name in _ENDS.items() if name in names}
    if not ends and all(a is b for a, b in zip(blocks, table.blocks, strict=True)):
        return table
    return replace(table, blocks=tuple(blocks), **ends)


_PARTS = {"attention": ATTENTION_TENSORS, "ffn": FFN_TENSORS, "experts": EXPERT_TENSORS}
_ENDS = {"embedding": "token_embd.weight", "output": "output.weight"}


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise SplitError(
            f"The override '{pattern}' is not a regular expression: {error}.",
            "For example 'ffn_.*_exps=cpu'.",
        ) from None
