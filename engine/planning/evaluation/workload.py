"""What each rank has to do for one token: what memory it reads, what it computes, whom it meets.

Made from a file's header and a split; `engine.planning.speed.speed_model` turns it into seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

DEQUANTISED = "packed"
"""The kind of weights that are dequantised on each use; the others are called as their GGML type,
such as "Q4_K", and "F32" where they were dequantised at load."""


class Weights(NamedTuple):
    """What one token has to do with weights of one kind.

    Attributes:
        kind: how they are held: a GGML type, or `DEQUANTISED`.
        read_bytes, flop: the parts of `RankWorkload.read_bytes` and `RankWorkload.flop`.
    """

    kind: str
    read_bytes: float
    flop: float


@dataclass(frozen=True, slots=True)
class RankWorkload:
    """One token on one rank, in one block or at one end of the model.

    Attributes:
        read_bytes: of weights, as the rank holds them; of routed experts only those that a token
            goes to, of an embedding one row.
        flop: multiplications and additions with weights.
        kv_bytes: of keys and values that are read for each position that the token sees.
        window: the most positions that it sees; 0 for all.
        n_op: matrices that the token is multiplied with: what costs time however small they are.
        kinds: `read_bytes` and `flop` once more, by how weights are held; what is missing there
            counts as F32.
        kv_flop: multiplications and additions with keys and values for each of these positions.
        batch_bytes: of weights that a batch of many tokens reads: of all routed experts; 0 where
            that is `read_bytes`.
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
    """Blocks of one group of ranks that are alike, or the same part of each of them.

    Ranks wait for each other at the end, so what lies between two sums (a mixer, then an FFN) is a
    part of its own. Those of neighbouring blocks with the same group may stand in any order: what
    is alike is counted together.

    Attributes:
        count: how many.
        group: the ranks that compute them, one block after the other, each together.
        ranks: what each rank of the group does in one of them.
        n_reduce: sums over the group in one of them: one of a residual stream, and what few
            architectures need inside a part, of a few numbers.
    """

    count: int
    group: tuple[int, ...]
    ranks: Mapping[int, RankWorkload]
    n_reduce: int


@dataclass(frozen=True, slots=True)
class ModelWorkload:
    """One token of a whole model.

    Attributes:
        blocks: in order.
        embedding, head: of the ranks that have rows of them.
        n_embd: numbers of the residual stream, of which a sum or a move is one.
        n_vocab: numbers that the head's ranks make together.
    """

    blocks: tuple[BlockWorkload, ...]
    embedding: Mapping[int, RankWorkload]
    head: Mapping[int, RankWorkload]
    n_embd: int
    n_vocab: int

    @property
    def n_move(self) -> int:
        """How often the stream moves to other ranks."""
        groups = [block.group for block in self.blocks]
        return sum(not set(after) <= set(before) for before, after in pairwise(groups))

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of weights that occur."""
        ranks = [*self.embedding.values(), *self.head.values()]
        ranks += [load for block in self.blocks for load in block.ranks.values()]
        return frozenset(weights.kind for load in ranks for weights in load.kinds)
