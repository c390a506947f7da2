"""The work of one token on each rank: bytes read, operations and all-reduces.

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
"F32" stands for weights dequantised at load."""


class Weights(NamedTuple):
    """Work of one token with weights of one kind.

    Attributes:
        kind: format in memory: a GGML type, or `DEQUANTISED`.
        read_bytes, flop: their parts of `RankWorkload.read_bytes` and `RankWorkload.flop`.
    """

    kind: str
    read_bytes: float
    flop: float


@dataclass(frozen=True, slots=True)
class RankWorkload:
    """Work of one token on one rank, in one block or at one end of the model.

    Attributes:
        read_bytes: bytes of weights read, in the rank's format: of routed experts only the chosen
            ones, of an embedding one row.
        kv_bytes: bytes of keys and values per attended position.
        window: size of the attention window; 0 for none.
        n_op: number of matrix products, each with an overhead.
        kinds: `read_bytes` and `flop` by kind of weights; the rest counts as F32.
        kv_flop: multiplications and additions with keys and values per attended position.
        batch_bytes: bytes of weights that a large batch reads, including all routed experts; 0 if
            equal to `read_bytes`.
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
    """Work of one token in equal blocks of one group of ranks, or in the same part of each.

    Ranks wait for each other at the end, so the work between two all-reduces (a mixer, then an FFN)
    is one part. Neighbouring parts of the same group are unordered: equal ones count together.

    Attributes:
        group: ranks that compute each of them together.
        n_reduce: all-reduces over the group in one of them: one of the hidden state, and in a few
            architectures another one of a few numbers.
        is_ending: whether they follow the last layer with a state, so that only those tokens of a
            prompt pass through them of which logits are needed.
    """

    count: int
    group: tuple[int, ...]
    ranks: Mapping[int, RankWorkload]
    n_reduce: int
    is_ending: bool = False


@dataclass(frozen=True, slots=True)
class ModelWorkload:
    """Work of one token in a whole model."""

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
"""Parts of the model represented by the ranks of a probe, in rank order."""

NOTHING: Span = (0, 0)

SEEN = 1
"""The rank of `one_rank` that is evaluated."""


def probe_split(dims: Sequence[BlockDims], n_vocab: int, *, tied: bool) -> ModelSplit:
    """Return the probe: each part of a block whole on a separate rank."""
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
    """Return the part for a tensor's owners in a probe; None without owners."""
    if not ranks:
        return None
    (rank,) = ranks
    return OWNERS[rank]


def one_rank(dims: BlockDims, spans: Mapping[str, Span], *, is_member: bool) -> BlockSplit:
    """Return the split of a block with these spans on rank `SEEN` and all before on rank 0."""
    cuts = {}
    for field, size in SIZES.items():
        start, stop = spans.get(field, NOTHING)
        cuts[field] = Ranges(((0, start), (start, stop)), getattr(dims, size))
    return BlockSplit((SEEN,) if is_member else (), **cuts)
