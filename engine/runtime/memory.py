"""What sequences remember on all ranks at once: pages of keys and values, recurrent states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engine.hardware.devices.catalog import list_devices
from engine.hardware.host_memory import ResidentPeak, resident_bytes
from engine.hardware.torch_devices import release_cached_memory, taken_overhead
from engine.model.forward.state import RecurrentState
from engine.model.sharding.split import as_one, runs
from engine.planning.memory import DeviceMemory
from engine.planning.speed.machine_file import MachineFile, use_measured_overheads

if TYPE_CHECKING:
    from engine.backends.executor import RankExecutor
    from engine.planning.plan import Plan
    from engine.runtime.interface import Guard, SlotState
    from engine.runtime.rank import Rank


class CachedRows(NamedTuple):
    """Where some rows of keys or values lie. All values may have been in JSON.

    Attributes:
        rank: number of the rank.
        layer: index of the layer in `Rank.states`.
        name: name of the tensor within the layer, such as "k".
        units: first one and the end of neighbouring heads among those of the rank.
        slots: first one and the end of neighbouring slots, for each run of them.
        row_bytes: number of bytes of a row.
    """

    rank: int
    layer: int
    name: str
    units: Sequence[int]
    slots: Sequence[Sequence[int]]
    row_bytes: int

    @property
    def n_rows(self) -> int:
        """Number of rows of each head."""
        return sum(stop - start for start, stop in self.slots)

    def room(self) -> Tensor:
        """Return memory on the host for the rows, uint8 (heads, slots, bytes)."""
        return torch.empty(
            (self.units[1] - self.units[0], self.n_rows, self.row_bytes), dtype=torch.uint8
        )

    def read(self, held: Tensor) -> Tensor:
        """Return a copy of the rows of a rank's tensor (heads, slots, width), see `room`."""
        found = self.room()
        for rows, part in self._parts(held):
            found[:, rows] = part
        return found

    def write(self, held: Tensor, found: Tensor) -> None:
        """Copy rows to a rank's tensor; see `read`."""
        for rows, part in self._parts(held):
            part.copy_(found[:, rows])

    def _parts(self, held: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield which of the rows are neighbours in a rank's tensor, and the bytes there."""
        units, at = held[self.units[0] : self.units[1]].view(torch.uint8), 0
        for start, stop in self.slots:
            yield slice(at, at + stop - start), units[:, start:stop]
            at += stop - start


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
        """Copy a page of a group of layers on all ranks, behind what was started before."""
        ranks = self.ranks
        with self._guard("to copy a page of the cache", 1):
            self.executor.run(
                lambda rank: ranks[rank].context.cache.copy_page(group, source, target)
            )

    def clear_slot(self, slot: int) -> None:
        """Make the recurrent states of a slot those of an empty sequence."""
        ranks = self.ranks
        with self._guard("to begin a sequence", 1):
            self.executor.run(lambda rank: ranks[rank].context.cache.reset(slot))

    @torch.inference_mode()
    def save_slot(self, slot: int) -> tuple[SlotState, int]:
        """Return a copy of the recurrent states of a slot on the host, and its bytes."""
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
        """Make the recurrent states of a slot those of a copy."""
        with self._guard("to go back to a state", 1):
            for (index, declared), whole in zip(self._recurrent_states(), state, strict=True):
                for rank in self.ranks:
                    held = rank.context.cache.tensors(rank.states[index], slot)
                    for name, cut in declared.cuts().items():
                        for run in runs(as_one(cut), cut, rank.number, [0]):
                            part = whole[name][run.start : run.start + run.n]
                            held[name][run.goal : run.goal + run.n] = part.to(rank.device)

    def copied_states(self, slot: int) -> Sequence[Sequence[Tensor]]:
        """Return copies of each rank's recurrent states of a slot, on its device."""
        ranks = self.ranks

        def copied(rank: int) -> list[Tensor]:
            return [x.clone() for x in ranks[rank].context.cache.recurrent_tensors([slot])]

        return self.executor.run(copied)

    def put_states(self, slot: int, copies: Sequence[Sequence[Tensor]]) -> None:
        """Make each rank's recurrent states of a slot those of `copied_states`."""
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


def plan_with_overheads(devices: Sequence[torch.device]) -> None:
    """Plan with what CUDA took of the GPUs when a model was loaded before."""
    if any(device.type == "cuda" for device in devices):
        use_measured_overheads(list_devices(), MachineFile.of_user())


def keep_overheads(devices: Sequence[torch.device]) -> None:
    """Save what CUDA has taken of each GPU for itself, with all kernels loaded, for later plans."""
    taken = {str(d): taken_overhead(d) for d in set(devices) if d.type == "cuda"}
    for info in list_devices() if taken else ():
        n_bytes = taken.get(info.id)
        if n_bytes is not None:
            MachineFile.of_user().keep_overhead(info, n_bytes)


BESIDE = ("draft", "pictures")
"""What may lie beside a model on a rank's device, as `MemoryUse` names it."""


class UsedMemory:
    """Memory that the ranks of a loaded model use, and what lies beside them.

    Args:
        devices: device of each rank of this process.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._resident: ResidentPeak | None = None
        self._cached_at_load = 0
        self._allocated_at_load: dict[str, int] = {}
        self._beside: dict[str, int] = dict.fromkeys(BESIDE, 0)

    def watch(self, ranks: Sequence[Rank]) -> None:
        """Start measuring the memory used beyond weights and cache."""
        release_cached_memory(self._devices)
        self._resident, self._cached_at_load = ResidentPeak(), _cached_bytes(ranks)
        for device in {d for d in self._devices if d.type == "cuda"}:
            torch.cuda.reset_peak_memory_stats(device)
            self._allocated_at_load[str(device)] = torch.cuda.memory_allocated(device)
        keep_overheads(self._devices)

    def note_pass(self, n_tokens: int) -> None:
        """Measure after a pass over so many tokens."""
        if n_tokens > 1 and self._resident:  # reading it costs as much as a small model's token
            self._resident.note()

    def note_beside(self, kind: str, n_bytes: int) -> None:
        """Note what something beside the model has taken, one of `BESIDE`, in bytes."""
        self._beside[kind] = n_bytes

    def compared(self, plan: Plan, ranks: Sequence[Rank]) -> list[DeviceMemory]:
        """Return the predicted and the measured bytes of each rank.

        Measured weights and KV cache are the sizes of their tensors. Measured compute is the peak
        beyond those since the load: on CUDA the allocator's, on the CPU the growth of this process
        without newly used pages of the KV cache. It is divided among the ranks of a device in
        proportion to the predictions.
        """
        result = []
        for planned, rank in zip(plan.devices, ranks, strict=True):
            compute = planned.memory.compute
            if compute:  # a GPU without a share must not be asked
                same = [d.memory.compute for d in plan.devices if d.device == planned.device]
                compute = compute * self._compute(planned.device, ranks) // sum(same)
            beside = {k: n for k, n in self._beside.items() if getattr(planned.memory, k)}
            measured = replace(rank.held, compute=compute, **beside)
            result.append(DeviceMemory(planned.device, planned.memory, measured))
        return result

    def _compute(self, device: str, ranks: Sequence[Rank]) -> int:
        """Return the measured compute bytes of all ranks on a device together."""
        if device == "cpu":
            assert self._resident is not None, "it is made at the end of a load"
            return max(0, self._resident.growth - _cached_bytes(ranks) + self._cached_at_load)
        return int(torch.cuda.max_memory_allocated(device)) - self._allocated_at_load[device]

    def free_once_closed(
        self, free: Mapping[str, int], plan: Plan, ranks: Sequence[Rank]
    ) -> dict[str, int]:
        """Return the free memory of each device as it will be once the model is freed.

        Args:
            free: free bytes now, by device.
        """
        total = dict(free)
        for device in {d for d in self._devices if d.type == "cuda" and str(d) in total}:
            total[str(device)] += torch.cuda.memory_allocated(device)  # with all rounding
        if "cpu" not in total:
            return total
        for rank in ranks:
            held = rank.held
            total["cpu"] += held.host_kv + (held.weights + held.kv) * (rank.device.type == "cpu")
        if plan.pictures_apart:
            total["cpu"] += self._beside["pictures"]
        for planned in plan.devices:
            for kind, n_bytes in self._beside.items():  # they stay, and are planned for again
                if getattr(planned.memory, kind) and planned.device == "cpu":
                    total["cpu"] += n_bytes  # those of GPUs are among what torch holds
        return total


def _cached_bytes(ranks: Sequence[Rank]) -> int:
    """Return the bytes of the caches' pages in host memory that were used so far."""
    tensors = [x for rank in ranks for layer in rank.context.cache.layers for x in layer.held()]
    return sum(resident_bytes(x.data_ptr(), x.nbytes) for x in tensors if x.device.type == "cpu")
