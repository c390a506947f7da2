"""Computes the boundaries of every part of a model, once for loader, caches and memory estimate.

Nothing else rounds, so a block's slices always fit together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.model.sharding.shares import Apportioner, Ranges, Shares, ShareTable, empty_ranges

COLUMN_UNIT = 32  # granularity in columns at which every quantised format can be split


@dataclass(frozen=True, slots=True)
class BlockDims:
    """The sizes in one block that can be split; 0 for missing parts.

    Attributes:
        n_head_kv: number of key-value heads; each serves n_head / n_head_kv adjacent query heads.
        n_state_head: number of heads in a recurrent state, or of channels if each has its own
            state.
        n_state_group: number of groups that these heads share (keys of linear attention, Mamba 2's
            B and C), as query heads share key-value heads.
        state_unit: granularity in heads at which the state can be split.
        n_ff: columns of the dense FFN.
        n_ff_exp: columns of each routed expert.
        n_ff_shexp: columns of the shared expert.
        kv_of: earlier block that provides the keys and values, so both have the same split.
    """

    n_head: int = 0
    n_head_kv: int = 0
    n_state_head: int = 0
    n_state_group: int = 0
    state_unit: int = 1
    n_ff: int = 0
    n_ff_exp: int = 0
    n_ff_shexp: int = 0
    kv_of: int | None = None


@dataclass(frozen=True, slots=True)
class BlockSplit:
    """The split of one block: units per rank.

    Attributes:
        group: ranks that have a slice of any part; the others skip this block.
        kv_heads: key-value heads; ranks share them if there are more ranks than heads.
        state_heads: heads (or channels) of the recurrent state.
        state_groups: groups that these heads belong to; ranks may share them like key-value heads.
        ffn: columns of the dense FFN.
        experts: columns inside every routed expert.
        shared: columns of the shared expert.
    """

    group: tuple[int, ...]
    heads: Ranges
    kv_heads: Ranges
    state_heads: Ranges
    state_groups: Ranges
    ffn: Ranges
    experts: Ranges
    shared: Ranges


@dataclass(frozen=True, slots=True)
class ModelSplit:
    """The split of a model: blocks, and rows of the embedding and the output head."""

    n_ranks: int
    blocks: tuple[BlockSplit, ...]
    embedding: Ranges
    output: Ranges

    @property
    def last_group(self) -> tuple[int, ...]:
        """Ranks that have a slice of the output head."""
        return self.output.owners()

    @property
    def used(self) -> tuple[int, ...]:
        """Ranks that have a slice of any block."""
        return tuple(sorted({rank for block in self.blocks for rank in block.group}))

    def blocks_of(self, rank: int) -> tuple[int, ...]:
        """Return the indices of the blocks in which a rank has a slice."""
        return tuple(number for number, block in enumerate(self.blocks) if rank in block.group)

    @property
    def holders(self) -> tuple[int, ...]:
        """Ranks that have a slice of anything; the others store and compute nothing."""
        return tuple(sorted({*self.used, *self.embedding.owners(), *self.output.owners()}))


def cut_model(
    table: ShareTable, blocks: Sequence[BlockDims], n_vocab: int, *, tied: bool = False
) -> ModelSplit:
    """Split blocks, and the `n_vocab` rows of embedding and output head, by the requested shares;
    the rows are stored once if `tied`."""
    n_ranks = table.n_ranks
    attention, state = _HeadCutter(n_ranks), _HeadCutter(n_ranks)
    ffn, experts, shared = (Apportioner(n_ranks) for _ in range(3))
    cuts: list[BlockSplit] = []
    groups: dict[tuple[Ranges, ...], tuple[int, ...]] = {}
    for shares, dims in zip(table.blocks, blocks, strict=True):
        if dims.kv_of is None:
            heads, kv_heads = attention.cut(shares.attention, dims.n_head, dims.n_head_kv)
        else:
            heads, kv_heads = cuts[dims.kv_of].heads, cuts[dims.kv_of].kv_heads
        state_heads, state_groups = state.cut(
            shares.recurrent, dims.n_state_head, dims.n_state_group, dims.state_unit
        )
        columns = ffn.cut(shares.ffn, dims.n_ff, COLUMN_UNIT)
        inner = experts.cut(shares.experts, dims.n_ff_exp, COLUMN_UNIT)
        common = shared.cut(shares.shared, dims.n_ff_shexp, COLUMN_UNIT)
        parts = heads, state_heads, columns, inner, common
        group = groups.get(parts)
        if group is None:
            group = groups[parts] = tuple(sorted({r for part in parts for r in part.owners()}))
        cuts.append(
            BlockSplit(group, heads, kv_heads, state_heads, state_groups, columns, inner, common)
        )
    output = Apportioner(n_ranks).cut(table.output, n_vocab)
    embedding = output if tied else Apportioner(n_ranks).cut(table.embedding, n_vocab)
    return ModelSplit(n_ranks, tuple(cuts), embedding, output)


class _HeadCutter:
    """Splitter of heads that share groups, by whole groups if there are enough for all ranks."""

    def __init__(self, n_ranks: int) -> None:
        self._by_group = Apportioner(n_ranks)
        self._by_head = Apportioner(n_ranks)

    def cut(
        self, shares: Shares, n_head: int, n_group: int, unit: int = 1
    ) -> tuple[Ranges, Ranges]:  # heads, groups
        if not n_head:
            return empty_ranges(len(shares)), empty_ranges(len(shares))
        size = n_head // n_group
        if len(shares) - shares.count(0.0) <= n_group:
            groups = self._by_group.cut(shares, n_group, unit)
            return groups.scaled(size), groups
        heads = self._by_head.cut(shares, n_head)
        spans = tuple((a // size, -(-b // size)) if b > a else (0, 0) for a, b in heads.spans)
        return heads, Ranges(spans, n_group)


def head_groups(heads: Ranges, groups: Ranges, rank: int) -> list[int]:
    """Return, for each of the rank's heads, the index of its group among the rank's groups."""
    size = heads.total // groups.total
    first = groups.spans[rank][0]
    return [head // size - first for head in range(*heads.spans[rank])]


def tiles(heads: Ranges, n_group: int) -> tuple[Ranges, ...]:
    """Return a split of heads for a file that tiles them: one head from each group, then the next.

    `heads` numbers heads group by group (head h belongs to group h // size). In the file, tile j
    holds head g × size + j of every group g. The result gives each rank's groups for each tile.
    """
    size = heads.total // n_group

    def first_group(head: int, tile: int) -> int:
        return max(0, -(-(head - tile) // size))

    return tuple(
        Ranges(tuple((first_group(a, j), first_group(b, j)) for a, b in heads.spans), n_group)
        for j in range(size)
    )


@dataclass(frozen=True, slots=True)
class SplitPart:
    """A part of a model, its number of pieces per block, and a name for the smallest piece."""

    name: str
    n_layer: int
    n_pieces: int
    unit: str


def split_parts(blocks: Sequence[BlockDims], n_vocab: int) -> tuple[SplitPart, ...]:
    """Return the parts of a model with these blocks, in the order of a forward pass.

    If blocks differ, the coarsest split is reported.
    """
    kinds: tuple[tuple[str, str, Callable[[BlockDims], int]], ...] = (
        ("attention", "a head", lambda d: d.n_head),
        ("recurrent layer", "a head", lambda d: 0 if d.state_unit > 1 else d.n_state_head),
        (
            "recurrent layer", f"{COLUMN_UNIT} channels",
            lambda d: -(-d.n_state_head // d.state_unit) if d.state_unit > 1 else 0,
        ),
        ("FFN", f"{COLUMN_UNIT} columns", lambda d: _columns(d.n_ff)),
        ("experts", f"{COLUMN_UNIT} columns of every expert", lambda d: _columns(d.n_ff_exp)),
        ("shared expert", f"{COLUMN_UNIT} columns", lambda d: _columns(d.n_ff_shexp)),
    )  # fmt: skip
    parts = []
    for name, unit, pieces_of in kinds:
        pieces = [n for block in blocks if (n := pieces_of(block))]
        if pieces:
            parts.append(SplitPart(name, len(pieces), min(pieces), unit))
    return (*parts, SplitPart("vocabulary", 0, n_vocab, "a row"))


def _columns(n: int) -> int:
    return -(-n // COLUMN_UNIT)


Segments = tuple[Ranges, ...]
"""Splits of several segments; a rank holds its interval of the first, then of the second, …"""


@dataclass(frozen=True, slots=True)
class Run:
    """A run of adjacent units that one rank receives from another.

    Attributes:
        source: rank that sends the units.
        start: index of the first unit among the source's units.
        goal: index of the first unit among the receiver's units.
        n: number of units.
    """

    source: int
    start: int
    goal: int
    n: int


def runs(old: Segments, new: Segments, rank: int, sources: Sequence[int]) -> list[Run]:
    """Return, as runs, the ranks of `old` that supply the units of `rank` in `new`.

    Replicated units are taken from their first owner in `sources`, which lists the ranks of `old`.
    """
    result: list[Run] = []
    goal = 0
    for index, (was, now) in enumerate(zip(old, new, strict=True)):
        at, stop = now.spans[rank]
        while at < stop:
            source = next(r for r in sources if was.spans[r][0] <= at < was.spans[r][1])
            first, last = was.spans[source]
            before = sum(segment.size(source) for segment in old[:index])
            n = min(stop, last) - at
            result.append(Run(source, before + at - first, goal, n))
            at, goal = at + n, goal + n
    return result


def as_one(cut: Segments) -> Segments:
    """Return the split in which a single rank has all units, each once."""
    return tuple(Ranges(((0, segment.total),), segment.total) for segment in cut)


@dataclass(frozen=True, slots=True)
class Move:
    """A one-step change of placement: bytes that it first `adds` and then `drops` on each
    device."""

    adds: Mapping[str, int]
    drops: Mapping[str, int]


def next_move(
    moves: Sequence[Move], held: Mapping[str, int], spare: Mapping[str, int],
    limits: Mapping[str, int],
) -> int:  # fmt: skip
    """Return the index of the move that leaves the fullest device the most room.

    This way, devices exchange parts in turn, and none ever holds much more than before or after all
    moves.

    Args:
        held: bytes in use on each device.
        spare: how many of these bytes can be freed at any time.
        limits: maximum number of bytes that each device should hold.
    """

    def excess(move: Move) -> int:
        return max(
            held[device] + move.adds.get(device, 0) - spare.get(device, 0) - limit
            for device, limit in limits.items()
        )

    return min(range(len(moves)), key=lambda index: excess(moves[index]))
