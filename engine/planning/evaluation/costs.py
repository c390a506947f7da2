"""Costs of a model's blocks and ends for one rank, cached by kind of block and cut.

A model has few kinds of blocks, and the cost of a part depends only on the rank's interval in it,
so each is declared once and then looked up. The ends are the embedding, the output head and tensors
that all ranks hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from engine.formats.gguf.tensors import split_name
from engine.model.forward.state import State
from engine.model.layers.linear import Embedding, ExpertLinear
from engine.model.layers.mixers.attention import Attention
from engine.model.layers.mixers.mla import LatentAttention
from engine.model.sharding.placement import Replicate, Shard
from engine.model.sharding.shares import Ranges
from engine.planning.evaluation.workload import (
    DEQUANTISED,
    EMBEDDING,
    FIELDS,
    MEMBERS,
    NOTHING,
    OUTPUT,
    SEEN,
    SIZES,
    RankWorkload,
    Span,
    Spans,
    Weights,
    one_rank,
    owner_of,
)
from engine.planning.footprint import TensorPart, WorkingSizes, n_elements, tensor_parts
from engine.planning.rank_size import RankSize

if TYPE_CHECKING:
    from engine.model.architectures.base import CausalLM
    from engine.model.layers.block import Block
    from engine.model.layers.module import Module, Slot, TensorSource
    from engine.model.sharding.split import BlockDims, BlockSplit, ModelSplit

MIXER, FEED = ("attention", "recurrent"), ("ffn", "experts", "shared")
"""Parts of a block between two all-reduces."""

MAX_COSTS = 1 << 16
"""Maximum number of cached costs per kind of block; a long drag adds a few thousand."""


class Formats(NamedTuple):
    """Formats of a rank's weights and KV cache; see `DevicePlan.storage`, `LoadParams.kv_type`."""

    storage: str
    kv_type: str


class Cost(NamedTuple):
    """Cost of some tensors and their states for one rank: bytes, and the work per token."""

    size: RankSize = RankSize()
    load: RankWorkload = RankWorkload()


NO_WORK, NO_COST = RankWorkload(), Cost()


def join_workloads(loads: Iterable[RankWorkload]) -> RankWorkload:
    """Return the sum of several workloads."""
    found = [load for load in loads if load is not NO_WORK]
    if len(found) < 2:
        return found[0] if found else NO_WORK
    kinds: dict[str, Weights] = {}
    for load in found:
        for kind, n_bytes, flop in load.kinds:
            known = kinds.get(kind, Weights(kind, 0.0, 0.0))
            kinds[kind] = Weights(kind, known.read_bytes + n_bytes, known.flop + flop)
    is_routed = any(load.batch_bytes for load in found)
    return RankWorkload(
        sum(load.read_bytes for load in found), sum(load.flop for load in found),
        sum(load.kv_bytes for load in found), max(load.window for load in found),
        sum(load.n_op for load in found), tuple(kinds.values()),
        sum(load.kv_flop for load in found),
        sum(load.batch_bytes or load.read_bytes for load in found) if is_routed else 0.0,
    )  # fmt: skip


def sum_costs(costs: Iterable[Cost]) -> Cost:
    """Return the sum of several costs."""
    found = [cost for cost in costs if cost is not NO_COST]
    if len(found) < 2:
        return found[0] if found else NO_COST
    size = RankSize.total((1, cost.size) for cost in found)
    return Cost(size, join_workloads(cost.load for cost in found))


def cost_of(
    slots: Sequence[Slot], states: Sequence[State], rank: int, formats: Formats, n_used: int = 0
) -> Cost:
    """Return a rank's cost for the given tensors and their layer's states."""
    parts = tensor_parts(slots, rank, formats.storage)
    load = join_workloads(weight_workload(part, formats.storage, n_used) for part in parts)
    return Cost(RankSize.of(parts, states, rank, *formats), load)


def weight_workload(part: TensorPart, storage: str, n_used: int) -> RankWorkload:
    """Return the work per token with a rank's part of one tensor."""
    slot, n_bytes = part.slot, sum(part.sizes)
    used = n_used / slot.tensor.shape[0] if isinstance(slot.owner, ExpertLinear) else 1.0
    read = used * n_bytes
    batch = float(n_bytes) if used < 1 else 0.0
    if not slot.is_matrix:
        return RankWorkload(read, batch_bytes=batch)
    flop = 2 * used * sum(map(n_elements, part.pieces))
    holding = slot.holding(storage)
    names = {"packed": DEQUANTISED, "f32": "F32"}
    kinds = (Weights(names.get(holding, slot.tensor.type.name), read, flop),)
    return RankWorkload(read, flop, n_op=1, kinds=kinds, batch_bytes=batch)


class Stage:
    """The parts of a block between two all-reduces; `cuts_of` returns their cuts in a block."""

    def __init__(
        self, kind: BlockKind, parts: tuple[str, ...], n_reduce: int, *, is_last: bool
    ) -> None:
        self._kind = kind
        self._parts = parts
        self._is_last = is_last
        self.n_reduce = n_reduce
        self.fields = tuple(name for part in parts for name in FIELDS[part])
        self.cuts_of: Callable[[BlockSplit], Ranges | tuple[Ranges, ...]]
        self.cuts_of = attrgetter(*self.fields)
        self._costs: dict[tuple[Spans, Formats], Cost] = {}

    def cost(self, spans: Spans, formats: Formats) -> Cost:
        """Return the cost for a rank that has these intervals of `fields` in the block."""
        key = spans, formats
        found = self._costs.get(key)
        if found is None:
            mine = dict(zip(self.fields, spans, strict=True))
            found = self._costs[key] = self._joined(mine, formats)
        return found

    def _joined(self, spans: Mapping[str, Span], formats: Formats) -> Cost:
        # tensors that all members hold count in the last stage
        costs = [self._kind.cost(MEMBERS, (), formats)] if self._is_last else []
        for part in self._parts:
            mine = tuple(spans[name] for name in FIELDS[part])
            if mine[0] != NOTHING:
                costs.append(self._kind.cost(part, mine, formats))
        return sum_costs(costs)


class BlockKind:
    """A kind of block: all that declare the same tensors and are cut by the same sizes.

    Args:
        model: the model as declared under a probe split, bound to the tensors of `source`.
        owners: part of the split that each tensor follows.
    """

    def __init__(
        self, model: CausalLM, source: TensorSource, layer: int, dims: BlockDims,
        owners: tuple[str | None, ...],
    ) -> None:  # fmt: skip
        self._model, self._source, self._layer = model, source, layer
        self._dims, self._owners = dims, owners
        self._costs: dict[tuple[str, Spans, Formats], Cost] = {}
        reduces = model.blk[layer].reduces()
        groups = (MIXER, FEED) if len(reduces) > 1 else ((*MIXER, *FEED),)
        sizes = {part: getattr(dims, SIZES[FIELDS[part][0]]) for part in (*MIXER, *FEED)}
        parts = [tuple(part for part in group if sizes[part]) for group in groups]
        found = [(mine, n) for mine, n in zip(parts, reduces, strict=True) if mine]
        self.stages = tuple(Stage(self, mine, n, is_last=mine is found[-1][0]) for mine, n in found)

    def cost(self, owner: str, spans: Spans, formats: Formats) -> Cost:
        """Return the cost for a rank with these intervals of a part, or for one of `MEMBERS`."""
        key = owner, spans, formats
        found = self._costs.get(key)
        if found is None:
            if len(self._costs) >= MAX_COSTS:
                self._costs.clear()
            found = self._costs[key] = self._declared(owner, spans, formats)
        return found

    def _declared(self, owner: str, spans: Spans, formats: Formats) -> Cost:
        hp, layer = self._model.hp, self._layer
        mine = dict(zip(FIELDS.get(owner, ()), spans, strict=True))
        split = one_rank(self._dims, mine, is_member=owner == MEMBERS)
        block = type(self._model.blk[layer])(hp, split, layer, self._model.rope_of(layer))
        slots = block.bind(self._source, f"blk.{layer}")
        chosen = [s for s, o in zip(slots, self._owners, strict=True) if o == owner]
        cost = cost_of(chosen, block.states(), SEEN, formats, hp.n_expert_used[layer])
        working = WorkingSizes.largest((cost.size.working, WorkingSizes.of_block(split, SEEN)))
        load = join_workloads((cost.load, attention_workload(block, formats.kv_type)))
        return Cost(cost.size._replace(working=working), load)


def attention_workload(block: Block, kv_type: str) -> RankWorkload:
    """Return rank `SEEN`'s attention work per token, even if it uses another layer's KV cache."""
    loads = []
    for module in _modules(block):
        if isinstance(module, Attention | LatentAttention):
            state = module.attended()
            elements = state.heads.size(SEEN) * (state.head_dim_k + state.head_dim_v)
            loads.append(
                RankWorkload(
                    kv_bytes=state.token_bytes(SEEN, kv_type),
                    kv_flop=2 * elements,
                    window=module.scores.window or module.scores.chunk,
                )
            )
    return join_workloads(loads)


def _modules(module: Module) -> Iterator[Module]:
    yield module
    for _, child in module.children():
        yield from _modules(child)


MAX_END_COSTS = 1 << 12
"""Maximum number of cached costs; each position in a drag cuts the vocabulary elsewhere."""

SHORTENED = "shortened output"
"""Owner of a head that has only the rows for an MTP block's draft vocabulary."""


class EndCost(NamedTuple):
    """Cost for a rank outside its blocks."""

    cost: Cost = NO_COST
    embedding: RankWorkload = NO_WORK
    head: RankWorkload = NO_WORK


class Ends:
    """The tensors of a model that belong to no block."""

    def __init__(self, model: CausalLM, slots: Sequence[Slot]) -> None:
        self._n_guessed = model.hp.n_guessed
        self._slots = [(slot, _owner(slot, self._n_guessed)) for slot in slots]
        self._heads = {id(model.output_norm)}
        self._heads.add(id(model.token_embd if model.hp.tied else model.output))
        self._known: dict[tuple[str, Span, Formats], EndCost] = {}

    def cost(self, split: ModelSplit, rank: int, formats: Formats) -> EndCost:
        """Return the cost for `rank` under a split."""
        rows = Cost(RankSize(working=WorkingSizes(rows=split.output.size(rank))))
        spans = {
            EMBEDDING: split.embedding.spans[rank],
            OUTPUT: split.output.spans[rank],
            MEMBERS: (0, 1 if rank in split.used else 0),
        }
        if self._n_guessed:
            spans[SHORTENED] = split.output.shortened(self._n_guessed).spans[rank]
        found = [
            self._of(owner, span, formats) for owner, span in spans.items() if span[1] > span[0]
        ]
        return _all([EndCost(rows), *found])

    def _of(self, owner: str, span: Span, formats: Formats) -> EndCost:
        key = owner, span, formats
        if key not in self._known:
            if len(self._known) >= MAX_END_COSTS:
                self._known.clear()
            mine = (slot for slot, of_slot in self._slots if of_slot == owner)
            self._known[key] = _all([self._slot_cost(slot, span, formats) for slot in mine])
        return self._known[key]

    def _slot_cost(self, slot: Slot, span: Span, formats: Formats) -> EndCost:
        # cost of one tensor for a rank with these rows, or for a member
        part, placement = 1.0, slot.placement
        if isinstance(placement, Shard):
            start, stop = span
            cuts = tuple(Ranges(((0, start), span), s.total) for s in placement.segments)
            placement = Shard(placement.dim, cuts)
            part = (stop - start) / cuts[0].total
        else:
            placement = Replicate((SEEN,))
        mine = replace(slot, placement=placement)
        cost = cost_of([mine], (), SEEN, formats)
        load, is_head = cost.load, id(slot.owner) in self._heads
        cost = cost._replace(load=NO_WORK)
        if split_name(slot.tensor.name) is not None:  # an MTP block only drafts
            return EndCost(cost)
        is_table = not slot.is_matrix and len(slot.tensor.shape) > 1
        if isinstance(slot.owner, Embedding) or is_table:
            row = RankWorkload(part * slot.tensor.row_bytes)
            return EndCost(cost, row, load if is_head else NO_WORK)
        return EndCost(cost, NO_WORK, load) if is_head else EndCost(cost, load, NO_WORK)


def _owner(slot: Slot, n_guessed: int) -> str | None:
    placement = slot.placement
    is_cut = isinstance(placement, Shard) and placement.segments[0].total == n_guessed
    return SHORTENED if is_cut else owner_of(placement.owners())


def _all(costs: Sequence[EndCost]) -> EndCost:
    return EndCost(
        sum_costs(end.cost for end in costs),
        join_workloads(end.embedding for end in costs),
        join_workloads(end.head for end in costs),
    )
