"""Measures the memory that a loaded model uses on its devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from engine.hardware.process_memory import ResidentPeak, resident_bytes
from engine.hardware.torch_devices import release_cached_memory
from engine.planning.memory import DeviceMemory
from engine.runtime.memory.overheads import keep_overheads

if TYPE_CHECKING:
    from engine.planning.plan import Plan
    from engine.runtime.rank import Rank

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
