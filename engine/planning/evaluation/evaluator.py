"""Plans fast enough to follow a drag: the same numbers as from `make_plan`, from cached costs.

`Evaluator` declares a model once, under a probe split that shows which part of a split each tensor
follows. An evaluation then cuts the model as the loader would and looks up the cost of each rank's
intervals; it declares a block only for new intervals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.model.architectures.declare import (
    bind_model,
    block_dims,
    copies_head,
    read_sizes,
    with_context,
)
from engine.model.forward.state import KVState, windows_of
from engine.model.sharding.placement import requested_shares
from engine.model.sharding.split import cut_model
from engine.planning.evaluation.costs import NO_WORK, BlockKind, Cost, EndCost, Ends, Formats, Stage
from engine.planning.evaluation.workload import (
    NOTHING,
    BlockWorkload,
    ModelWorkload,
    RankWorkload,
    Spans,
    owner_of,
    probe_split,
)
from engine.planning.plan import Plan, choose_plan, with_held_types
from engine.planning.rank_size import RankSize

if TYPE_CHECKING:
    from engine.formats.gguf.reader import GGUFFile
    from engine.load_params import LoadParams
    from engine.model.architectures.base import CausalLM
    from engine.model.layers.hparams import HParams
    from engine.model.sharding.shares import Ranges
    from engine.model.sharding.split import BlockDims, ModelSplit

    StageCuts = tuple[Stage, Ranges | tuple[Ranges, ...], bool]

MAX_CONTEXTS = 256
"""Maximum number of context lengths with cached sizes."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Predicted bytes and work for a split."""

    plan: Plan
    load: ModelWorkload
    split: ModelSplit


class Evaluator:
    """Evaluator for splits of one file."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self._names = tuple(file.tensors)
        self._models: dict[tuple[bool, int, int, bool], _Model] = {}
        self._read: dict[object, tuple[type[CausalLM], HParams]] = {}
        self._sizes: dict[tuple[int | None, object], HParams] = {}

    def evaluate(
        self, params: LoadParams, free_bytes: Mapping[str, int] | None = None
    ) -> Evaluation:
        """Predict the bytes and work per rank.

        An optional MTP block is left out if it does not fit.

        Args:
            free_bytes: free memory by device, which decides whether weights are dequantised; if
                None, they are.

        Raises:
            ModelFileError: the architecture is unknown, or a tensor is missing or misshapen.
            SplitError: the split is impossible.
            EngineError: the KV type does not fit the heads.
        """
        found = self._evaluated(params, free_bytes)
        if not params.may_leave_mtp or not self._sizes_for(params)[1].n_mtp:
            return found
        if not found.plan.shortages(free_bytes or {}):
            return found
        return self._evaluated(params.without_mtp, free_bytes)

    def _evaluated(self, params: LoadParams, free_bytes: Mapping[str, int] | None) -> Evaluation:
        cls, hp = self._sizes_for(params)
        requested = requested_shares(
            params, hp.n_trunk, tied=hp.tied, tensors=self._names, recurrent=hp.recurrent,
            n_mtp=hp.n_mtp,
        )  # fmt: skip
        model = self._model(cls, hp)
        split = cut_model(requested.table, model.dims, hp.n_vocab, tied=hp.tied)
        model.check_kv_type(params.kv_type)
        tally = _Tally(model, split)
        costs: dict[tuple[str, ...], list[_RankCosts]] = {}

        def sizes(storages: tuple[str, ...]) -> list[RankSize]:
            costs[storages] = [
                tally.costs(rank, Formats(storage, params.kv_type))
                for rank, storage in enumerate(storages)
            ]
            return [of_rank.size() for of_rank in costs[storages]]

        plan = choose_plan(params, hp, requested.devices, requested.shares, sizes, free_bytes)
        chosen = costs[tuple(device.storage for device in plan.devices)]
        return Evaluation(with_held_types(plan, model.caches), tally.load(chosen, hp), split)

    def dims(self, params: LoadParams) -> Sequence[BlockDims]:
        """Return the sizes by which each block in the trunk is cut."""
        cls, hp = self._sizes_for(params)
        return self._model(cls, hp).dims[: hp.n_trunk]

    def _sizes_for(self, params: LoadParams) -> tuple[type[CausalLM], HParams]:
        key = params.draft, params.draft_vocab, frozenset(params.all_devices), copies_head(params)
        if key not in self._read:
            self._read[key] = read_sizes(self.file, params)
        cls, hp = self._read[key]
        sizes_key = params.n_ctx, key
        if sizes_key not in self._sizes:
            if len(self._sizes) >= MAX_CONTEXTS:
                self._sizes.clear()
            self._sizes[sizes_key] = with_context(cls, hp, params)
        return cls, self._sizes[sizes_key]

    def _model(self, cls: type[CausalLM], hp: HParams) -> _Model:
        # the context length matters only for long-context RoPE frequencies
        key = hp.n_ctx > hp.rope.n_ctx_orig, hp.n_mtp, hp.n_guessed, hp.copies_head
        if key not in self._models:
            self._models[key] = _Model(self.file, cls, hp)
        return self._models[key]


class _Model:
    """The declared model, shared by evaluations.

    Attributes:
        guessing: stages of the MTP blocks, which are not part of a token's work.
        caches: one declaration of keys and values per shape.
    """

    def __init__(self, file: GGUFFile, cls: type[CausalLM], hp: HParams) -> None:
        self.dims = block_dims(cls, hp)
        probe = probe_split(self.dims, hp.n_vocab, tied=hp.tied)
        model, source, slots = bind_model(file, cls, hp, probe)
        self.last_full_layer = model.last_full_layer
        self.kinds: list[BlockKind] = []
        known: dict[object, BlockKind] = {}
        in_blocks: set[int] = set()
        for layer, (block, dims) in enumerate(zip(model.blk, self.dims, strict=True)):
            mine = block.bind(source, f"blk.{layer}")
            in_blocks |= {id(slot.owner) for slot in mine}
            owners = tuple(owner_of(slot.placement.owners()) for slot in mine)
            tensors = tuple((s.attribute, s.tensor.type.number, s.tensor.shape) for s in mine)
            seen = windows_of(block.states())
            lists = hp.head_dim_k, hp.head_dim_v, hp.n_expert_used, hp.swa
            sizes = (values[layer] for values in lists)
            same = (type(block), _unshared(dims), owners, tensors, seen, *sizes)
            if same not in known:
                known[same] = BlockKind(model, source, layer, dims, owners)
            self.kinds.append(known[same])
        self.guessing = {stage for kind in self.kinds[hp.n_trunk :] for stage in kind.stages}
        self.ends = Ends(model, [slot for slot in slots if id(slot.owner) not in in_blocks])
        caches = [state for state in model.states() if isinstance(state, KVState)]
        shapes = {(s.head_dim_k, s.head_dim_v, s.v_in_k): s for s in reversed(caches)}
        self.caches = tuple(reversed(shapes.values()))

    def check_kv_type(self, kv_type: str) -> None:
        for state in self.caches:
            state.check_type(kv_type)


def _unshared(dims: BlockDims) -> BlockDims:
    # the same for all blocks that use another block's KV cache
    return dims if dims.kv_of is None else replace(dims, kv_of=0)


@dataclass(frozen=True, slots=True)
class _Item:
    """`count` equal stages with equal cuts, in neighbouring blocks on one group of ranks."""

    group: tuple[int, ...]
    stage: Stage
    cuts: tuple[Ranges, ...]
    count: int
    is_ending: bool

    def spans(self, rank: int) -> Spans:
        # all empty spans become `NOTHING`
        found = [cut.spans[rank] for cut in self.cuts]
        return tuple(span if span[1] > span[0] else NOTHING for span in found)


class _Tally:
    """Number of times each cut of each stage occurs in a split."""

    def __init__(self, model: _Model, split: ModelSplit) -> None:
        self._split, self._ends, self._guessing = split, model.ends, model.guessing
        self._items: list[_Item] = []
        group: tuple[int, ...] = ()
        counts: dict[StageCuts, int] = {}
        for layer, (block, kind) in enumerate(zip(split.blocks, model.kinds, strict=True)):
            if block.group != group and block.group:
                self._add(group, counts)
                group, counts = block.group, {}
            for number, stage in enumerate(kind.stages if block.group else ()):
                is_ending = (layer, number) > (model.last_full_layer, 0)
                key = stage, stage.cuts_of(block), is_ending
                counts[key] = counts.get(key, 0) + 1
        self._add(group, counts)

    def _add(self, group: tuple[int, ...], counts: Mapping[StageCuts, int]) -> None:
        for (stage, found, is_ending), n in counts.items():
            cuts = found if isinstance(found, tuple) else (found,)
            self._items.append(_Item(group, stage, cuts, n, is_ending))

    def costs(self, rank: int, formats: Formats) -> _RankCosts:
        found = [
            (item.count, item.stage.cost(item.spans(rank), formats) if rank in item.group else None)
            for item in self._items
        ]
        return _RankCosts(found, self._ends.cost(self._split, rank, formats))

    def load(self, ranks: Sequence[_RankCosts], hp: HParams) -> ModelWorkload:
        blocks = []
        for index, item in enumerate(self._items):
            if item.stage in self._guessing:
                continue
            loads = {rank: ranks[rank].load(index) for rank in item.group}
            n_reduce, is_ending = item.stage.n_reduce, item.is_ending
            blocks.append(BlockWorkload(item.count, item.group, loads, n_reduce, is_ending))
        rows = {r: cost.ends.embedding for r, cost in enumerate(ranks)}
        head = {r: cost.ends.head for r, cost in enumerate(ranks)}
        return ModelWorkload(
            tuple(blocks), {rank: rows[rank] for rank in self._split.embedding.owners()},
            {rank: head[rank] for rank in self._split.output.owners()}, hp.n_embd, hp.n_vocab,
        )  # fmt: skip


class _RankCosts:
    """Costs for one rank under a split: the count and the cost of each cut of each stage."""

    def __init__(self, items: Sequence[tuple[int, Cost | None]], ends: EndCost) -> None:
        self._items = items
        self.ends = ends

    def load(self, index: int) -> RankWorkload:
        cost = self._items[index][1]
        return NO_WORK if cost is None else cost.load

    def size(self) -> RankSize:
        found = [(n, cost.size) for n, cost in self._items if cost is not None]
        return RankSize.total([(1, self.ends.cost.size), *found])
