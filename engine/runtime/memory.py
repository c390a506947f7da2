"""Rows of a rank's KV cache, and the memory that a loaded model uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engine.hardware.devices.catalog import list_devices
from engine.hardware.host_memory import ResidentPeak, resident_bytes
from engine.hardware.torch_devices import release_cached_memory, taken_overhead
from engine.planning.memory import DeviceMemory
from engine.planning.speed.machine_file import MachineFile, use_measured_overheads

if TYPE_CHECKING:
    from engine.planning.plan import Plan
    from engine.runtime.rank import Rank


class CachedRows(NamedTuple):
    """Location of some rows of keys or values; all fields can be read from JSON.

    Attributes:
        rank: the rank's number.
        layer: index of the layer in `Rank.states`.
        name: name of the tensor within the layer, such as "k".
        units: range of the rank's heads, as (start, stop).
        slots: ranges of slots, each as (start, stop).
        row_bytes: bytes per row.
    """

    rank: int
    layer: int
    name: str
    units: Sequence[int]
    slots: Sequence[Sequence[int]]
    row_bytes: int

    @property
    def n_rows(self) -> int:
        """Number of rows per head."""
        return sum(stop - start for start, stop in self.slots)

    def room(self) -> Tensor:
        """Return uninitialised host memory for the rows, uint8 (heads, rows, bytes)."""
        return torch.empty(
            (self.units[1] - self.units[0], self.n_rows, self.row_bytes), dtype=torch.uint8
        )

    def read(self, held: Tensor) -> Tensor:
        """Return a copy of the rows in a rank's tensor (heads, slots, width), as in `room`."""
        found = self.room()
        for rows, part in self._parts(held):
            found[:, rows] = part
        return found

    def write(self, held: Tensor, found: Tensor) -> None:
        """Copy rows to a rank's tensor; see `read`."""
        for rows, part in self._parts(held):
            part.copy_(found[:, rows])

    def _parts(self, held: Tensor) -> Iterator[tuple[slice, Tensor]]:
        units, at = held[self.units[0] : self.units[1]].view(torch.uint8), 0
        for start, stop in self.slots:
            yield slice(at, at + stop - start), units[:, start:stop]
            at += stop - start


def plan_with_overheads(devices: Sequence[torch.device]) -> None:
    """Plan with the GPU memory that CUDA itself used in earlier loads."""
    if any(device.type == "cuda" for device in devices):
        use_measured_overheads(list_devices(), MachineFile.of_user())


def keep_overheads(devices: Sequence[torch.device]) -> None:
    """Save how much memory CUDA uses on each GPU with all kernels loaded, for later plans."""
    taken = {str(d): taken_overhead(d) for d in set(devices) if d.type == "cuda"}
    for info in list_devices() if taken else ():
        n_bytes = taken.get(info.id)
        if n_bytes is not None:
            MachineFile.of_user().keep_overhead(info, n_bytes)


BESIDE = ("draft", "pictures")
"""Parts that may share a rank's device with the model, named as in `MemoryUse`."""


class UsedMemory:
    """Memory that a loaded model's ranks and the parts in `BESIDE` use.

    Args:
        devices: device of each rank in this process.
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
        """Take a measurement after a pass over `n_tokens` tokens."""
        if n_tokens > 1 and self._resident:  # reading it takes as long as a small model's token
            self._resident.note()

    def note_beside(self, kind: str, n_bytes: int) -> None:
        """Note how many bytes a part in `BESIDE` uses."""
        self._beside[kind] = n_bytes

    def compared(self, plan: Plan, ranks: Sequence[Rank]) -> list[DeviceMemory]:
        """Return each rank's predicted and measured bytes.

        Measured weights and KV cache are the sizes of their tensors. Measured compute is the peak
        beyond those since the load: on CUDA the allocator's, on the CPU the growth of this process
        excluding newly used pages of the KV cache. It is divided among a device's ranks in
        proportion to the predictions.
        """
        result = []
        for planned, rank in zip(plan.devices, ranks, strict=True):
            compute = planned.memory.compute
            if compute:  # do not query a GPU that has no share
                same = [d.memory.compute for d in plan.devices if d.device == planned.device]
                compute = compute * self._compute(planned.device, ranks) // sum(same)
            beside = {k: n for k, n in self._beside.items() if getattr(planned.memory, k)}
            measured = replace(rank.held, compute=compute, **beside)
            result.append(DeviceMemory(planned.device, planned.memory, measured))
        return result

    def _compute(self, device: str, ranks: Sequence[Rank]) -> int:
        if device == "cpu":
            assert self._resident is not None, "it is made at the end of a load"
            return max(0, self._resident.growth - _cached_bytes(ranks) + self._cached_at_load)
        return int(torch.cuda.max_memory_allocated(device)) - self._allocated_at_load[device]

    def free_once_closed(
        self, free: Mapping[str, int], plan: Plan, ranks: Sequence[Rank]
    ) -> dict[str, int]:
        """Return each device's free memory without the model, given its current free memory."""
        total = dict(free)
        for device in {d for d in self._devices if d.type == "cuda" and str(d) in total}:
            total[str(device)] += torch.cuda.memory_allocated(device)  # including rounding
        if "cpu" not in total:
            return total
        for rank in ranks:
            held = rank.held
            total["cpu"] += held.host_kv + (held.weights + held.kv) * (rank.device.type == "cpu")
        if plan.pictures_apart:
            total["cpu"] += self._beside["pictures"]
        for planned in plan.devices:
            for kind, n_bytes in self._beside.items():  # kept, but planned for twice
                if getattr(planned.memory, kind) and planned.device == "cpu":
                    total["cpu"] += n_bytes  # GPU memory is included in torch's
        return total


def _cached_bytes(ranks: Sequence[Rank]) -> int:
    tensors = [x for rank in ranks for layer in rank.context.cache.layers for x in layer.held()]
    return sum(resident_bytes(x.data_ptr(), x.nbytes) for x in tensors if x.device.type == "cpu")
