"""The probe split, which shows which part of a split each tensor of a model follows.

In the probe every part of every block lies whole on a rank of its own. So the rank that owns a
tensor of the declared model says what its slices depend on: the cut of attention, that of the
experts, or only which ranks compute the block at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from engine.model.sharding.ranges import Ranges
from engine.model.sharding.split import BlockDims, BlockSplit, ModelSplit

Span = tuple[int, int]
Spans = tuple[Span, ...]

FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attention": ("heads", "kv_heads"),
        "recurrent": ("state_heads", "state_groups"),
        "ffn": ("ffn",),
        "experts": ("experts",),
        "shared": ("shared",),
    }
)
"""Attributes of `BlockSplit` with the cuts of each part of a block."""

SIZES: Mapping[str, str] = MappingProxyType(
    {
        "heads": "n_head",
        "kv_heads": "n_head_kv",
        "state_heads": "n_state_head",
        "state_groups": "n_state_group",
        "ffn": "n_ff",
        "experts": "n_ff_exp",
        "shared": "n_ff_shexp",
    }
)
"""Attribute of `BlockDims` with the size that each cut divides."""

MEMBERS, EMBEDDING, OUTPUT = "members", "embedding", "output"
"""Owners of tensors that all ranks of a block hold, and of those at the model's two ends."""

OWNERS = (*FIELDS, MEMBERS, EMBEDDING, OUTPUT)
"""Parts that the ranks of a probe stand for, in rank order."""

NOTHING: Span = (0, 0)
"""The empty interval."""

SEEN = 1
"""The rank of `one_rank` whose costs are counted."""


def probe_split(dims: Sequence[BlockDims], n_vocab: int, *, tied: bool) -> ModelSplit:
    """Return the probe: every part whole on a rank of its own."""
    blocks = []
    for block in dims:
        cuts = {
            field: _whole(part, getattr(block, SIZES[field]))
            for part, fields in FIELDS.items()
            for field in fields
        }
        blocks.append(BlockSplit((OWNERS.index(MEMBERS),), **cuts))
    embedding = _whole(EMBEDDING, n_vocab)
    output = embedding if tied else _whole(OUTPUT, n_vocab)
    return ModelSplit(len(OWNERS), tuple(blocks), embedding, output)


def _whole(owner: str, total: int) -> Ranges:
    rank = OWNERS.index(owner)
    behind = len(OWNERS) - rank - 1
    return Ranges((NOTHING,) * rank + ((0, total),) + ((total, total),) * behind, total)


def owner_of(ranks: Sequence[int]) -> str | None:
    """Return the part that a tensor's owners in a probe stand for; None where nobody owns it."""
    if not ranks:
        return None
    (rank,) = ranks
    return OWNERS[rank]


def one_rank(dims: BlockDims, spans: Mapping[str, Span], *, is_member: bool) -> BlockSplit:
    """Return the split of a block whose rank `SEEN` has these spans, and rank 0 all before them.

    Args:
        spans: intervals by the name of the cut; missing ones are empty.
        is_member: whether the rank takes part in the block.
    """
    cuts = {}
    for field, size in SIZES.items():
        start, stop = spans.get(field, NOTHING)
        cuts[field] = Ranges(((0, start), (start, stop)), getattr(dims, size))
    return BlockSplit((SEEN,) if is_member else (), **cuts)
