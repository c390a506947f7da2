"""The work per token on each rank: bytes read, operations and all-reduces.

Derived from a file's header and a split; `engine.planning.speed.speed_model` turns it into seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from engine.model.sharding.shares import Ranges
from engine.model.sharding.split import BlockDims, BlockSplit, ModelSplit

DEQUANTISED = "packed"
"""Kind of weights that are dequantised on each use. Other kinds are GGML types such as "Q4_K";
"F32" stands for weights dequantised during loading."""


class Weights(NamedTuple):
    """Work per token with weights of one kind.

    Attributes:
        kind: format in memory: a GGML type, or `DEQUANTISED`.
        read_bytes, flop: parts of `RankWorkload.read_bytes` and `RankWorkload.flop` for this kind.
    """

    kind: str
    read_bytes: float
    flop: float


@dataclass(frozen=True, slots=True)
class RankWorkload:
    """Work per token on one rank, in one block or at one end of the model.

    Attributes:
        read_bytes: weight bytes read, in the rank's format; only the chosen ones among routed
            experts, and one row from an embedding.
        kv_bytes: key and value bytes per attended position.
        window: size of the attention window; 0 if there is none.
        n_op: number of matrix products, each with an overhead.
        kinds: `read_bytes` and `flop` by kind of weights; the rest counts as F32.
        kv_flop: multiplications and additions with keys and values per attended position.
        batch_bytes: weight bytes that a large batch reads, including all routed experts; 0 if equal
            to `read_bytes`.
    """

    read_bytes: float = 0.0
    flop: float = 0.0
    kv_bytes: float = 0.0
    window: int = 0
    n_op: int = 0
    kinds: tuple[Weights, ...] = ()
    kv_flop: float = 0.0
    batch_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class BlockWorkload:
    """Work per token in equal blocks on one group of ranks, or in the same part of each block.

    Ranks wait for each other at the end, so the work between two all-reduces (a mixer, then an FFN)
    is one part. Neighbouring parts on the same group are unordered, so equal ones count together.

    Attributes:
        group: ranks that compute each block together.
        n_reduce: all-reduces over the group per block: one for the hidden state, and in a few
            architectures another for a few numbers.
        is_ending: whether the blocks follow the last layer with a state, so that only those prompt
            tokens whose logits are needed pass through them.
    """

    count: int
    group: tuple[int, ...]
    ranks: Mapping[int, RankWorkload]
    n_reduce: int
    is_ending: bool = False


@dataclass(frozen=True, slots=True)
class ModelWorkload:
    """Work per token in a whole model."""

    blocks: tuple[BlockWorkload, ...]
    embedding: Mapping[int, RankWorkload]
    head: Mapping[int, RankWorkload]
    n_embd: int
    n_vocab: int

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of weights that occur."""
        ranks = [*self.embedding.values(), *self.head.values()]
        ranks += [load for block in self.blocks for load in block.ranks.values()]
        return frozenset(weights.kind for load in ranks for weights in load.kinds)


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
"""Attributes of `BlockSplit` with the cut of each part of a block."""

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
"""Owners of tensors that all ranks in a block hold, and of those at the model's two ends."""

OWNERS = (*FIELDS, MEMBERS, EMBEDDING, OUTPUT)
"""Parts of the model that the ranks of a probe represent, in rank order."""

NOTHING: Span = (0, 0)

SEEN = 1
"""The rank in `one_rank` that is evaluated."""


def probe_split(dims: Sequence[BlockDims], n_vocab: int, *, tied: bool) -> ModelSplit:
    """Return the probe, in which each part of a block is entirely on a separate rank."""
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
    after = len(OWNERS) - rank - 1
    return Ranges((NOTHING,) * rank + ((0, total),) + ((total, total),) * after, total)


def owner_of(ranks: Sequence[int]) -> str | None:
    """Return the part that a tensor's owners in a probe stand for; None if it has no owners."""
    if not ranks:
        return None
    (rank,) = ranks
    return OWNERS[rank]


def one_rank(dims: BlockDims, spans: Mapping[str, Span], *, is_member: bool) -> BlockSplit:
    """Return the split of a block with these spans on rank `SEEN` and all before them on rank 0."""
    cuts = {}
    for field, size in SIZES.items():
        start, stop = spans.get(field, NOTHING)
        cuts[field] = Ranges(((0, start), (start, stop)), getattr(dims, size))
    return BlockSplit((SEEN,) if is_member else (), **cuts)
