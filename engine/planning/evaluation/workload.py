"""The work of one token on each rank: bytes read, operations, and all-reduces with other ranks.

Made from a file's header and a split; `engine.planning.speed.speed_model` turns it into seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from engine.model.sharding.shares import Ranges
from engine.model.sharding.split import BlockDims, BlockSplit, ModelSplit

DEQUANTISED = "packed"
"""Kind of weights that are dequantised on each use. Other kinds are named by their GGML type, such
as "Q4_K", and "F32" if they were dequantised at load."""


class Weights(NamedTuple):
    """Work of one token with weights of one kind.

    Attributes:
        kind: format in which they are held: a GGML type, or `DEQUANTISED`.
        read_bytes, flop: their parts of `RankWorkload.read_bytes` and `RankWorkload.flop`.
    """

    kind: str
    read_bytes: float
    flop: float


@dataclass(frozen=True, slots=True)
class RankWorkload:
    """Work of one token on one rank, in one block or at one end of the model.

    Attributes:
        read_bytes: bytes of weights that are read, as the rank holds them: of routed experts only
            those that the token is routed to, of an embedding one row.
        flop: multiplications and additions with weights.
        kv_bytes: bytes of keys and values that are read for each position that the token sees.
        window: largest number of positions that it sees; 0 for all.
        n_op: number of matrices that the token is multiplied with: each costs time however small.
        kinds: `read_bytes` and `flop` by the format of weights; the rest counts as F32.
        kv_flop: multiplications and additions with keys and values for each of these positions.
        batch_bytes: bytes of weights that a batch of many tokens reads, those of all routed
            experts; 0 where that is `read_bytes`.
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

    Ranks wait for each other at the end, so what lies between two all-reduces (a mixer, then an
    FFN) is a part of its own. Parts of neighbouring blocks with the same group may stand in any
    order: equal ones are counted together.

    Attributes:
        count: number of blocks.
        group: the ranks that compute each of them together.
        ranks: work of each rank of the group in one of them.
        n_reduce: number of all-reduces over the group in one of them: one of the hidden state, and
            of few architectures another one of a few numbers.
        is_ending: whether they come behind all that is remembered of a token, so that of a
            prompt's tokens only those go through them whose logits are wanted.
    """

    count: int
    group: tuple[int, ...]
    ranks: Mapping[int, RankWorkload]
    n_reduce: int
    is_ending: bool = False


@dataclass(frozen=True, slots=True)
class ModelWorkload:
    """Work of one token in a whole model.

    Attributes:
        blocks: work in the blocks, in order.
        embedding, head: work of the ranks that hold rows of them.
        n_embd: number of elements of the hidden state, which all-reduces and moves transfer.
        n_vocab: number of logits that the head's ranks compute together.
    """

    blocks: tuple[BlockWorkload, ...]
    embedding: Mapping[int, RankWorkload]
    head: Mapping[int, RankWorkload]
    n_embd: int
    n_vocab: int

    @property
    def n_move(self) -> int:
        """Number of times that the hidden state moves to other ranks."""
        groups = [block.group for block in self.blocks]
        return sum(not set(after) <= set(before) for before, after in pairwise(groups))

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
