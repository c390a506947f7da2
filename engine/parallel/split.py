"""Boundaries of every part of a model, computed once and used by everything that cuts.

The loader, the KV cache and the memory estimate all take their slices from here; nothing rounds a
tensor by itself, so the slices of one block always fit together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.parallel.ranges import Apportioner, Ranges
from engine.parallel.shares import Shares, ShareTable

FFN_UNIT = 32
"""Columns: the smallest sub-block that every quantised format can be cut at."""


@dataclass(frozen=True, slots=True)
class BlockDims:
    """Sizes of one block that a split cuts; 0 where the block has no such part."""

    n_head: int
    n_head_kv: int
    n_ff: int = 0
    n_ff_exp: int = 0


@dataclass(frozen=True, slots=True)
class BlockSplit:
    """The cut of one block.

    Attributes:
        group: the ranks that have a slice of any part; the others do not see this block.
        heads: query heads of each rank.
        kv_heads: key-value heads of each rank; ranks share a head when there are more ranks than
            heads.
        ffn: columns of the dense FFN.
        experts: columns inside every routed expert.
    """

    group: tuple[int, ...]
    heads: Ranges
    kv_heads: Ranges
    ffn: Ranges
    experts: Ranges


@dataclass(frozen=True, slots=True)
class ModelSplit:
    """The cut of a whole model; `embedding` and `output` are rows of the vocabulary."""

    n_ranks: int
    blocks: tuple[BlockSplit, ...]
    embedding: Ranges
    output: Ranges

    @property
    def last_group(self) -> tuple[int, ...]:
        return self.output.owners()


def cut_model(
    table: ShareTable, blocks: Sequence[BlockDims], n_vocab: int, *, tied: bool = False
) -> ModelSplit:
    """Turn wanted shares into boundaries.

    Args:
        blocks: the sizes of each block, as many as `table` has.
        tied: the output head is the embedding and is held once.
    """
    n_ranks = table.n_ranks
    kv_heads_of, heads_of, ffn, experts = (Apportioner(n_ranks) for _ in range(4))
    cuts = []
    for shares, dims in zip(table.blocks, blocks, strict=True):
        if sum(s > 0 for s in shares.attention) <= dims.n_head_kv:
            heads, kv_heads = _cut_kv_heads(kv_heads_of, shares.attention, dims)
        else:
            heads, kv_heads = _cut_heads(heads_of, shares.attention, dims)
        columns = ffn.cut(shares.ffn, dims.n_ff, FFN_UNIT)
        inner = experts.cut(shares.experts, dims.n_ff_exp, FFN_UNIT)
        owners = {*heads.owners(), *columns.owners(), *inner.owners()}
        cuts.append(BlockSplit(tuple(sorted(owners)), heads, kv_heads, columns, inner))
    output = Apportioner(n_ranks).cut(table.output, n_vocab)
    embedding = output if tied else Apportioner(n_ranks).cut(table.embedding, n_vocab)
    return ModelSplit(n_ranks, tuple(cuts), embedding, output)


def _cut_kv_heads(rounder: Apportioner, shares: Shares, dims: BlockDims) -> tuple[Ranges, Ranges]:
    """Cut attention by key-value heads, each with its group of query heads."""
    kv_heads = rounder.cut(shares, dims.n_head_kv)
    return kv_heads.scaled(dims.n_head // dims.n_head_kv), kv_heads


def _cut_heads(rounder: Apportioner, shares: Shares, dims: BlockDims) -> tuple[Ranges, Ranges]:
    """Cut attention by query heads; key-value heads that ranks have in common are held by each."""
    heads = rounder.cut(shares, dims.n_head)
    if not dims.n_head:
        return heads, heads
    group = dims.n_head // dims.n_head_kv
    spans = tuple((a // group, -(-b // group)) if b > a else (0, 0) for a, b in heads.spans)
    return heads, Ranges(spans, dims.n_head_kv)
