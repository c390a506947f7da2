"""Memory that CUDA takes of GPUs for itself: measured by each load, for the plans of later ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.hardware.devices.catalog import list_devices
from engine.hardware.torch_devices import taken_overhead
from engine.planning.speed.machine_file import MachineFile, use_measured_overheads


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
