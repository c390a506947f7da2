"""Finds torch's devices, and their free memory, and frees it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache

import psutil
import torch

from engine.devices import DeviceInfo, cuda_status, list_devices, require_devices
from engine.devices.stopped import stopped_gpus
from engine.errors import NoDevice
from engine.hardware.cuda_overhead import overhead_bytes

RANK_PRIORITY = -1
"""Priority of the CUDA streams in which ranks compute; other streams have 0, which is lower."""

_hanging: set[torch.device] = set()
"""GPUs whose work does not end, which nobody should wait for."""

OUT_OF_MEMORY_TEXTS = (
    "can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED",
)  # fmt: skip


def torch_device(name: str) -> torch.device:
    """Return the torch device for "cpu" or "cuda:N".

    Raises:
        NoDevice: it does not exist here, or torch gives that number to another GPU.
        DeviceStopped: it has stopped working in this process.
    """
    if name == "cpu":
        return torch.device("cpu")
    devices = list_devices()
    require_devices([name], devices)
    if not torch.cuda.is_available():
        raise NoDevice(name, cuda_status().rstrip(".") or "PyTorch sees no GPU")
    _check_number(name, devices)
    return torch.device(name)


def _check_number(name: str, devices: Sequence[DeviceInfo]) -> None:
    """Check that torch and NVML give this number to the same GPU.

    They differ where CUDA was started before the order of GPUs was set, or with other variables
    than now. A part of a GPU (MIG) has a UUID of another kind, which cannot be compared.

    Raises:
        NoDevice: they mean different GPUs.
    """
    uuid = getattr(torch.cuda.get_device_properties(name), "uuid", None)
    meant = next((d.id for d in devices if uuid and d.uuid == f"GPU-{uuid}"), name)
    if meant != name:
        raise NoDevice(
            name,
            f"CUDA was started with GPUs in another order, in which {name} is what the driver "
            f"calls {meant}; restart with CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )


def stream_of_rank(device: torch.device) -> torch.cuda.Stream:
    """Return a CUDA stream for a rank's kernels, which is never used for copies.

    Torch has 32 streams of each priority on a GPU and hands them out in turn. Copies, for which
    streams are made all the time, use another priority, so they never get the same stream.
    """
    make: Callable[[torch.device, int], torch.cuda.Stream] = torch.cuda.Stream
    return make(device, RANK_PRIORITY)


def torch_devices(names: Sequence[str], holders: Collection[int]) -> list[torch.device]:
    """Return the torch device of each rank; a rank that holds nothing is kept off its GPU.

    Any use of a GPU, even reading its free memory, takes hundreds of MB there.

    Raises:
        NoDevice: one does not exist here.
    """
    idle = [name for rank, name in enumerate(names) if rank not in holders and name != "cpu"]
    if idle:
        require_devices(idle)
    return [
        torch_device(name) if rank in holders else torch.device("cpu")
        for rank, name in enumerate(names)
    ]


def kind_of(device: torch.device) -> str:
    """Return the kind of a device; all of one kind compute the same bits from the same input."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def free_bytes(devices: Iterable[str]) -> Mapping[str, int]:
    """Return the free bytes of each device, including those that torch holds in reserve.

    CUDA's own overhead counts as free: it is there from the first use on, and plans count it.
    """
    free: dict[str, int] = {}
    for name in devices:
        if name == "cpu":
            free[name] = psutil.virtual_memory().available
        else:
            device = torch.device(name)
            idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            free[name] = torch.cuda.mem_get_info(device)[0] + idle + overhead_bytes(name)
    return free


def mark_hanging(devices: Iterable[torch.device]) -> None:
    """Note GPUs whose work does not end, so that nobody waits for them."""
    _hanging.update(device for device in devices if device.type == "cuda")


def release_cached_memory(devices: Sequence[torch.device]) -> None:
    """Give freed memory back to the system; use no GPU but these.

    Torch frees the reserve of all GPUs of this process at once and waits for their work. So if one
    hangs or has stopped working, nothing is freed: the memory stays in torch's reserve, for the
    next model.
    """
    for device in set(devices):
        if device.type != "cuda":
            trim_heap()
        elif not _hanging and not stopped_gpus():
            with torch.cuda.device(device):
                torch.cuda.empty_cache()


def trim_heap() -> None:
    """Give freed heap memory that the C library keeps back to the system."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Return the GNU C library's `malloc_trim`; other libraries hold back less."""
    if not sys.platform.startswith("linux"):
        return None
    found = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if found is None:
        return None
    found.argtypes = [ctypes.c_size_t]
    trim: Callable[[int], int] = found
    return trim


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, which torch reports in several ways."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(t in str(error) for t in OUT_OF_MEMORY_TEXTS)
