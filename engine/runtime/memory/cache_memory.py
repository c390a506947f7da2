"""What sequences remember on all ranks at once: pages of keys and values, recurrent states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.model.forward.state import RecurrentState
from engine.model.sharding.recut import as_one, runs

if TYPE_CHECKING:
    from torch import Tensor

    from engine.backends.executor import RankExecutor
    from engine.runtime.interface import Guard, SlotState
    from engine.runtime.memory.cached_rows import CachedRows
    from engine.runtime.rank import Rank


class CacheMemory(ABC):
    """The part of `ModelRunner` that changes the caches of all ranks together.

    Attributes:
        executor: executor of the ranks.
        ranks: the ranks, in rank order; empty once closed.
    """

    executor: RankExecutor
    ranks: list[Rank]
    _guard: Guard

    @abstractmethod
    def finish(self) -> None:
        """Wait for all batches that were started without logits."""

    def copy_page(self, group: int, source: int, target: int) -> None:
        """Copy a page of a group of layers on all ranks; see `PagedRuntime`."""
        ranks = self.ranks
        with self._guard("to copy a page of the cache", 1):
            self.executor.run(
                lambda rank: ranks[rank].context.cache.copy_page(group, source, target)
            )

    def clear_slot(self, slot: int) -> None:
        """Make the recurrent states of a place those of an empty sequence."""
        ranks = self.ranks
        with self._guard("to begin a sequence", 1):
            self.executor.run(lambda rank: ranks[rank].context.cache.reset(slot))

    @torch.inference_mode()
    def save_slot(self, slot: int) -> tuple[SlotState, int]:
        """Return a copy of the recurrent states of a place on the host, and its bytes."""
        self.finish()
        found = []
        with self._guard("to keep a state", 1):
            for index, state in self._recurrent_states():
                whole = {name: torch.empty(shape) for name, shape in state.whole_shapes().items()}
                for name, cut in state.cuts().items():
                    for run in runs(cut, as_one(cut), 0, range(len(self.ranks))):
                        rank = self.ranks[run.source]
                        held = rank.context.cache.tensors(rank.states[index], slot)[name]
                        part = held[run.start : run.start + run.n]
                        whole[name][run.goal : run.goal + run.n] = part
                found.append(whole)
        return found, sum(x.nbytes for tensors in found for x in tensors.values())

    @torch.inference_mode()
    def load_slot(self, slot: int, state: SlotState) -> None:
        """Make the recurrent states of a place those of a copy."""
        with self._guard("to go back to a state", 1):
            for (index, declared), whole in zip(self._recurrent_states(), state, strict=True):
                for rank in self.ranks:
                    held = rank.context.cache.tensors(rank.states[index], slot)
                    for name, cut in declared.cuts().items():
                        for run in runs(as_one(cut), cut, rank.number, [0]):
                            part = whole[name][run.start : run.start + run.n]
                            held[name][run.goal : run.goal + run.n] = part.to(rank.device)

    def copied_states(self, slot: int) -> Sequence[Sequence[Tensor]]:
        """Return copies of each rank's recurrent states of a place, on its device."""
        ranks = self.ranks

        def copied(rank: int) -> list[Tensor]:
            return [x.clone() for x in ranks[rank].context.cache.recurrent_tensors([slot])]

        return self.executor.run(copied)

    def put_states(self, slot: int, copies: Sequence[Sequence[Tensor]]) -> None:
        """Make each rank's recurrent states of a place those of `copied_states`."""
        ranks = self.ranks

        def put(rank: int) -> None:
            held = ranks[rank].context.cache.recurrent_tensors([slot])
            for state, copy in zip(held, copies[rank], strict=True):
                state.copy_(copy)

        self.executor.run(put)

    def whole_state(self, state: SlotState) -> SlotState:
        """Return what `save_slot` has returned in memory of this process."""
        return state

    def read_rows(self, rows: CachedRows) -> Tensor:
        """Return a copy of keys or values of a rank on the host, see `CachedRows.read`."""
        with self._guard("to copy the cache", 1), torch.inference_mode():
            return rows.read(self._held(rows))

    def write_rows(self, rows: CachedRows, found: Tensor) -> None:
        """Copy keys or values to a rank, see `CachedRows.write`."""
        with self._guard("to copy the cache", 1), torch.inference_mode():
            rows.write(self._held(rows), found)

    def _held(self, rows: CachedRows) -> Tensor:
        """Return the tensor with some rows."""
        rank = next(rank for rank in self.ranks if rank.number == rows.rank)
        return rank.context.cache.tensors(rank.states[rows.layer])[rows.name]

    def zero_rows(self, layer: int, slots: Sequence[Sequence[int]]) -> None:
        """Zero slots of a layer with keys and values on all ranks.

        Args:
            layer: index of the layer in `Rank.states`.
            slots: first one and the end of neighbouring slots, for each run of them.
        """
        with self._guard("to copy the cache", 1), torch.inference_mode():
            for rank in self.ranks:
                for held in rank.context.cache.tensors(rank.states[layer]).values():
                    for start, stop in slots:
                        held[:, start:stop].zero_()

    def _recurrent_states(self) -> Sequence[tuple[int, RecurrentState]]:
        """Return the recurrent layers, each with its index in `Rank.states`."""
        states = enumerate(self.ranks[0].states)
        return [(index, s) for index, s in states if isinstance(s, RecurrentState)]
