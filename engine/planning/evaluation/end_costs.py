"""Costs of the model's ends: the embedding, the output head, and tensors that all ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from engine.formats.gguf.tensors import split_name
from engine.model.layers.linear import Embedding
from engine.model.sharding.placement import Replicate, Shard
from engine.model.sharding.shares import Ranges
from engine.planning.evaluation.block_costs import (
    NO_COST,
    NO_WORK,
    Cost,
    Formats,
    cost_of,
    join_workloads,
    sum_costs,
)
from engine.planning.evaluation.workload import (
    EMBEDDING,
    MEMBERS,
    OUTPUT,
    SEEN,
    RankWorkload,
    Span,
    owner_of,
)
from engine.planning.footprint import WorkingSizes
from engine.planning.rank_size import RankSize

if TYPE_CHECKING:
    from engine.model.architectures.base import CausalLM
    from engine.model.layers.module import Slot
    from engine.model.sharding.split import ModelSplit

MAX_KNOWN = 1 << 12
"""Most costs that are kept; each position of a drag cuts the vocabulary elsewhere."""


SHORTENED = "shortened output"
"""Owner of a head with the rows of those tokens that an MTP block guesses from."""


class EndCost(NamedTuple):
    """Cost of a rank outside its blocks.

    Attributes:
        cost: its bytes and sizes.
        embedding, head: work of a token there.
    """

    cost: Cost = NO_COST
    embedding: RankWorkload = NO_WORK
    head: RankWorkload = NO_WORK


class Ends:
    """The tensors of a model that belong to no block.

    Args:
        model: the model as declared under a probe split.
        slots: slots of these tensors.
    """

    def __init__(self, model: CausalLM, slots: Sequence[Slot]) -> None:
        self._n_guessed = model.hp.n_guessed
        self._slots = [(slot, _owner(slot, self._n_guessed)) for slot in slots]
        self._heads = {id(model.output_norm)}
        self._heads.add(id(model.token_embd if model.hp.tied else model.output))
        self._known: dict[tuple[str, Span, Formats], EndCost] = {}

    def cost(self, split: ModelSplit, rank: int, formats: Formats) -> EndCost:
        """Return the cost of `rank` under a split."""
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
        """Return the cost of the tensors that follow one part, with this interval of it."""
        key = owner, span, formats
        if key not in self._known:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            mine = (slot for slot, of_slot in self._slots if of_slot == owner)
            self._known[key] = _all([self._slot_cost(slot, span, formats) for slot in mine])
        return self._known[key]

    def _slot_cost(self, slot: Slot, span: Span, formats: Formats) -> EndCost:
        """Return the cost of one tensor for a rank with these rows of it, or for a member."""
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
        if split_name(slot.tensor.name) is not None:  # of an MTP block, which only guesses
            return EndCost(cost)
        if isinstance(slot.owner, Embedding) or _is_table(slot):
            row = RankWorkload(part * slot.tensor.row_bytes)
            return EndCost(cost, row, load if is_head else NO_WORK)
        return EndCost(cost, NO_WORK, load) if is_head else EndCost(cost, load, NO_WORK)


def _owner(slot: Slot, n_guessed: int) -> str | None:
    """Return the part of a split that a tensor follows, or that its cut is made of."""
    placement = slot.placement
    is_cut = isinstance(placement, Shard) and placement.segments[0].total == n_guessed
    return SHORTENED if is_cut else owner_of(placement.owners())


def _is_table(slot: Slot) -> bool:
    return not slot.is_matrix and len(slot.tensor.shape) > 1


def _all(costs: Sequence[EndCost]) -> EndCost:
    return EndCost(
        sum_costs(end.cost for end in costs),
        join_workloads(end.embedding for end in costs),
        join_workloads(end.head for end in costs),
    )
