"""Plans at the speed of a drag: what `make_plan` would say, from costs that were counted before.

`Evaluator` declares a model once, on a probe that shows which part of a split each tensor follows.
An evaluation then cuts the model as the loader would and looks up what each rank's intervals cost;
only an interval that was never seen is declared anew, for one block. The numbers are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.forward.state import KVState
from engine.models.declare import bind_model, block_dims, read_sizes, with_context
from engine.planning.evaluation.block_costs import NO_WORK, BlockKind, Cost, Formats, Stage
from engine.planning.evaluation.end_costs import EndCost, Ends
from engine.planning.evaluation.part_probe import NOTHING, Spans, owner_of, probe_split
from engine.planning.evaluation.workload import BlockWorkload, ModelWorkload, RankWorkload
from engine.planning.footprint import WorkingSizes
from engine.planning.plan import Plan, RankSize, choose_plan
from engine.sharding.patterns import wanted_shares
from engine.sharding.split import cut_model

if TYPE_CHECKING:
    from engine.config import LoadParams
    from engine.gguf import GGUFFile
    from engine.layers.hparams import HParams
    from engine.models.base import CausalLM
    from engine.sharding.ranges import Ranges
    from engine.sharding.split import BlockDims, ModelSplit

    StageCuts = tuple[Stage, Ranges | tuple[Ranges, ...]]

MAX_CONTEXTS = 256
"""Context lengths of which the sizes of a model are remembered."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a split would take.

    Attributes:
        plan: where the bytes go.
        load: what each rank does for a token.
        split: the cut of every block.
    """

    plan: Plan
    load: ModelWorkload
    split: ModelSplit


class Evaluator:
    """Evaluates splits of one file."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._names = tuple(file.tensors)
        self._models: dict[bool, _Model] = {}
        self._read: tuple[type[CausalLM], HParams] | None = None
        self._sizes: dict[int | None, HParams] = {}

    def evaluate(
        self, params: LoadParams, free_bytes: Mapping[str, int] | None = None
    ) -> Evaluation:
        """Plan a split.

        Args:
            free_bytes: free memory by device; decides how weights are formats. Without it they are
                taken to be dequantised.

        Raises:
            ModelFileError: the architecture is unknown, or a tensor is missing or misshapen.
            SplitError: the split cannot be made.
            EngineError: the KV type does not fit the heads.
        """
        cls, hp = self._sizes_for(params)
        wanted = wanted_shares(
            params, hp.n_layer, tied=hp.tied, tensors=self._names, recurrent=hp.recurrent
        )
        model = self._model(cls, hp)
        split = cut_model(wanted.table, model.dims, hp.n_vocab, tied=hp.tied)
        model.check_kv_type(params.kv_type)
        tally = _Tally(model, split)
        costs: dict[tuple[str, ...], list[_RankCosts]] = {}

        def sizes(storages: tuple[str, ...]) -> list[RankSize]:
            costs[storages] = [
                tally.costs(rank, Formats(storage, params.kv_type))
                for rank, storage in enumerate(storages)
            ]
            return [of_rank.size(hp.n_ctx) for of_rank in costs[storages]]

        plan = choose_plan(params, hp, wanted.devices, wanted.shares, sizes, free_bytes)
        chosen = costs[tuple(device.storage for device in plan.devices)]
        return Evaluation(plan, tally.load(chosen, hp), split)

    def dims(self, params: LoadParams) -> Sequence[BlockDims]:
        """The sizes by which each block is cut.

        Raises:
            ModelFileError: as `evaluate`.
        """
        return self._model(*self._sizes_for(params)).dims

    def _sizes_for(self, params: LoadParams) -> tuple[type[CausalLM], HParams]:
        """The class of the model, and its sizes with the context that is asked for."""
        if self._read is None:
            self._read = read_sizes(self._file)
        cls, hp = self._read
        if params.n_ctx not in self._sizes:
            if len(self._sizes) >= MAX_CONTEXTS:
                self._sizes.clear()
            self._sizes[params.n_ctx] = with_context(cls, hp, params)
        return cls, self._sizes[params.n_ctx]

    def _model(self, cls: type[CausalLM], hp: HParams) -> _Model:
        """The declared model; its context decides at most about a table of frequencies."""
        is_long = hp.n_ctx > hp.rope.n_ctx_orig
        if is_long not in self._models:
            self._models[is_long] = _Model(self._file, cls, hp)
        return self._models[is_long]


class _Model:
    """What does not change between evaluations.

    Attributes:
        dims: the sizes by which each block is cut.
        kinds: of each block.
        ends: what belongs to no block.
    """

    def __init__(self, file: GGUFFile, cls: type[CausalLM], hp: HParams) -> None:
        self.dims = block_dims(cls, hp)
        probe = probe_split(self.dims, hp.n_vocab, tied=hp.tied)
        model, source, slots = bind_model(file, cls, hp, probe)
        self.kinds: list[BlockKind] = []
        known: dict[object, BlockKind] = {}
        in_blocks: set[int] = set()
        for layer, (block, dims) in enumerate(zip(model.blk, self.dims, strict=True)):
            mine = block.bind(source, f"blk.{layer}")
            in_blocks |= {id(slot.owner) for slot in mine}
            owners = tuple(owner_of(slot.placement.owners()) for slot in mine)
            tensors = tuple((s.attribute, s.tensor.type.number, s.tensor.shape) for s in mine)
            same = (type(block), _alike(dims), owners, tensors, *_layer_sizes(hp, layer))
            if same not in known:
                known[same] = BlockKind(model, source, layer, dims, owners)
            self.kinds.append(known[same])
        self.ends = Ends(model, [slot for slot in slots if id(slot.owner) not in in_blocks])
        caches = [state for state in model.states() if isinstance(state, KVState)]
        self._caches = {(s.head_dim_k, s.head_dim_v): s for s in reversed(caches)}

    def check_kv_type(self, kv_type: str) -> None:
        """Make sure that keys and values are whole blocks of a KV type.

        Raises:
            EngineError: they are not.
        """
        for state in reversed(self._caches.values()):
            state.check_type(kv_type)


def _alike(dims: BlockDims) -> BlockDims:
    """Sizes that are the same wherever another block's keys and values are."""
    return dims if dims.kv_of is None else replace(dims, kv_of=0)


def _layer_sizes(hp: HParams, layer: int) -> tuple[object, ...]:
    """What of a layer its tensors need not show."""
    return hp.head_dim_k[layer], hp.head_dim_v[layer], hp.n_expert_used[layer], hp.swa[layer]


@dataclass(frozen=True, slots=True)
class _Item:
    """Stages that are alike and cut alike, among neighbouring blocks of one group of ranks."""

    group: tuple[int, ...]
    stage: Stage
    cuts: tuple[Ranges, ...]
    count: int

    def spans(self, rank: int) -> Spans:
        """The intervals of a rank; all empty ones are alike."""
        found = [cut.spans[rank] for cut in self.cuts]
        return tuple(span if span[1] > span[0] else NOTHING for span in found)


class _Tally:
    """How often each cut of each stage occurs in a split."""

    def __init__(self, model: _Model, split: ModelSplit) -> None:
        self._split, self._ends = split, model.ends
        self._items: list[_Item] = []
        group: tuple[int, ...] = ()
        counts: dict[StageCuts, int] = {}
        for block, kind in zip(split.blocks, model.kinds, strict=True):
            if block.group != group and block.group:
                self._add(group, counts)
                group, counts = block.group, {}
            for stage in kind.stages if block.group else ():
                key = stage, stage.cuts_of(block)
                counts[key] = counts.get(key, 0) + 1
        self._add(group, counts)

    def _add(self, group: tuple[int, ...], counts: Mapping[StageCuts, int]) -> None:
        for (stage, found), n in counts.items():
            cuts = found if isinstance(found, tuple) else (found,)
            self._items.append(_Item(group, stage, cuts, n))

    def costs(self, rank: int, formats: Formats) -> _RankCosts:
        """What everything costs a rank."""
        found = [
            (item.count, item.stage.cost(item.spans(rank), formats) if rank in item.group else None)
            for item in self._items
        ]
        return _RankCosts(found, self._ends.cost(self._split, rank, formats))

    def load(self, ranks: Sequence[_RankCosts], hp: HParams) -> ModelWorkload:
        """One token of the whole model."""
        blocks = []
        for index, item in enumerate(self._items):
            loads = {rank: ranks[rank].load(index) for rank in item.group}
            blocks.append(BlockWorkload(item.count, item.group, loads, item.stage.n_reduce))
        rows = {r: cost.ends.embedding for r, cost in enumerate(ranks)}
        head = {r: cost.ends.head for r, cost in enumerate(ranks)}
        return ModelWorkload(
            tuple(blocks),
            {rank: rows[rank] for rank in self._split.embedding.owners()},
            {rank: head[rank] for rank in self._split.output.owners()},
            hp.n_embd,
            hp.n_vocab,
        )


class _RankCosts:
    """What a split costs one rank.

    Args:
        items: how often each cut of each stage occurs, and what it costs, if anything.
    """

    def __init__(self, items: Sequence[tuple[int, Cost | None]], ends: EndCost) -> None:
        self._items = items
        self.ends = ends

    def load(self, index: int) -> RankWorkload:
        """One token in one of the stages."""
        cost = self._items[index][1]
        return NO_WORK if cost is None else cost.load

    def size(self, n_ctx: int) -> RankSize:
        """Bytes with a context of so many tokens."""
        end = self.ends.cost
        weights, file_bytes, elements, kv, state = end[:5]
        working = [end.working]
        for count, cost in self._items:
            if cost is not None:
                weights += count * cost.weights
                file_bytes += count * cost.file_bytes
                elements += count * cost.elements
                kv += count * cost.kv
                state += count * cost.state
                working.append(cost.working)
        return RankSize(
            weights, kv * n_ctx, state, elements, file_bytes, WorkingSizes.largest(working)
        )
