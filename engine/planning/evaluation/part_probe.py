"""Which part of a split each tensor of a model follows, found by declaring the model once.

In a probe every part of every block lies whole on a rank of its own. So the rank that owns a tensor
says what decides about it: the cut of attention, that of the experts, or only who computes the
block at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from engine.sharding.ranges import Ranges
from engine.sharding.split import BlockDims, BlockSplit, ModelSplit

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
"""The parts of a block and where `BlockSplit` has their cuts."""

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
"""Where `BlockDims` has what they cut."""

MEMBERS, EMBEDDING, OUTPUT = "members", "embedding", "output"
"""What all ranks of a block hold, and what follows the two ends of the model."""

OWNERS = (*FIELDS, MEMBERS, EMBEDDING, OUTPUT)
"""What the ranks of a probe stand for."""

NOTHING: Span = (0, 0)
SEEN = 1
"""The rank of `one_rank` that is looked at."""


def probe_split(dims: Sequence[BlockDims], n_vocab: int, *, tied: bool) -> ModelSplit:
    """Every part whole on a rank of its own."""
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
    """What the owners of a tensor in a probe stand for; None where nobody needs it."""
    if not ranks:
        return None
    (rank,) = ranks
    return OWNERS[rank]


def one_rank(dims: BlockDims, spans: Mapping[str, Span], *, is_member: bool) -> BlockSplit:
    """A block of which the rank `SEEN` has these spans, and another one what lies before them.

    Args:
        spans: by the name of the cut; what is missing is empty.
    """
    cuts = {}
    for field, size in SIZES.items():
        start, stop = spans.get(field, NOTHING)
        cuts[field] = Ranges(((0, start), (start, stop)), getattr(dims, size))
    return BlockSplit((SEEN,) if is_member else (), **cuts)
