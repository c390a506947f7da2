"""What sequences remember on all ranks at once: pages of keys and values, recurrent states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.forward.state import RecurrentState
from engine.sharding.recut import as_one, runs

if TYPE_CHECKING:
    from engine.parallel.executor import RankExecutor
    from engine.runtime.interface import SlotState
    from engine.runtime.rank import Rank


class CacheMemory:
    """The caches of all ranks of a model, changed together.

    Args:
        executor: executor of the ranks.
        ranks: the ranks, in order.
    """

    def __init__(self, executor: RankExecutor, ranks: Sequence[Rank]) -> None:
        self._executor = executor
        self._ranks = ranks

    def copy_page(self, group: int, source: int, target: int) -> None:
        """Copy a page of a group of layers."""
        ranks = self._ranks
        self._executor.run(lambda rank: ranks[rank].context.cache.copy_page(group, source, target))

    def clear_slot(self, slot: int) -> None:
        """Make the recurrent states of a place those of an empty sequence."""
        ranks = self._ranks
        self._executor.run(lambda rank: ranks[rank].context.cache.reset(slot))

    def move_slot(self, source: int, target: int) -> None:
        """Copy the recurrent states of a place to another one."""
        ranks = self._ranks
        self._executor.run(lambda rank: ranks[rank].context.cache.copy_slot(source, target))

    @torch.inference_mode()
    def save_slot(self, slot: int) -> tuple[SlotState, int]:
        """Return a copy of the recurrent states of a place on the host, and its bytes."""
        found = []
        for index, state in self._recurrent_states():
            whole = {name: torch.empty(shape) for name, shape in state.whole_shapes().items()}
            for name, cut in state.cuts().items():
                for run in runs(cut, as_one(cut), 0, range(len(self._ranks))):
                    rank = self._ranks[run.source]
                    held = rank.context.cache.tensors(rank.states[index], slot)[name]
                    whole[name][run.goal : run.goal + run.n] = held[run.start : run.start + run.n]
            found.append(whole)
        return found, sum(x.nbytes for tensors in found for x in tensors.values())

    @torch.inference_mode()
    def load_slot(self, slot: int, saved: SlotState) -> None:
        """Make the recurrent states of a place those of a copy."""
        for (index, _), whole in zip(self._recurrent_states(), saved, strict=True):
            for rank in self._ranks:
                state = rank.states[index]
                held = rank.context.cache.tensors(state, slot)
                for name, cut in state.cuts().items():
                    for run in runs(as_one(cut), cut, rank.number, [0]):
                        part = whole[name][run.start : run.start + run.n]
                        held[name][run.goal : run.goal + run.n] = part.to(rank.device)

    def _recurrent_states(self) -> Sequence[tuple[int, RecurrentState]]:
        """Return the recurrent layers, each with its index in `Rank.states`."""
        states = enumerate(self._ranks[0].states)
        return [(index, s) for index, s in states if isinstance(s, RecurrentState)]
