"""The devices as torch sees them: finding one, its free memory, when it is full."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache

import psutil
import torch

from engine.devices import DeviceInfo, cuda_status, list_devices, require_devices
from engine.errors import NoDevice
from engine.hardware.cuda_overhead import overhead_bytes

RANK_PRIORITY = -1
"""Of streams in which ranks compute; others have 0, which is lower."""

_hanging: set[torch.device] = set()

OUT_OF_MEMORY_TEXTS = (
    "can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED",
)  # fmt: skip


def torch_device(name: str) -> torch.device:
    """The torch device for "cpu" or "cuda:N".

    Raises:
        NoDevice: it does not exist here, or torch means another GPU by that number.
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
    """Make sure that torch and NVML mean the same GPU.

    They do not where CUDA was started before the order of GPUs was settled, or with other variables
    than are set now. What has a UUID of its own kind, as a part of a GPU has, cannot be compared.

    Raises:
        NoDevice: they mean different ones.
    """
    uuid = getattr(torch.cuda.get_device_properties(name), "uuid", None)
    meant = next((d.id for d in devices if uuid and d.uuid == f"GPU-{uuid}"), name)
    if meant != name:
        raise NoDevice(
            name,
            f"CUDA was started with GPUs in another order, in which {name} is what the driver "
            f"calls {meant}; start anew with CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )


def stream_of_rank(device: torch.device) -> torch.cuda.Stream:
    """A stream for what a rank computes, that no copies are put into.

    Torch has 32 streams of each priority on a GPU, and then gives the same ones once more: so
    copies, for which streams are made all the time, have those of another priority.
    """
    make: Callable[[torch.device, int], torch.cuda.Stream] = torch.cuda.Stream
    return make(device, RANK_PRIORITY)


def torch_devices(names: Sequence[str], holders: Collection[int]) -> list[torch.device]:
    """The torch device of each rank; a rank that holds nothing is kept off its GPU.

    Whatever is done on a GPU, be it asking for its free memory, takes hundreds of MB there.

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
    """Devices of one kind compute the same bits from the same ones."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def free_bytes(devices: Iterable[str]) -> Mapping[str, int]:
    """Free memory of each of `devices`, with what this process holds in reserve.

    As it would be without CUDA's own share, which is there from the first question on and which
    plans count.
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


def leave_alone(devices: Iterable[torch.device]) -> None:
    """Have nobody here wait for GPUs that do not come to an end."""
    _hanging.update(device for device in devices if device.type == "cuda")


def release_reserves(devices: Sequence[torch.device]) -> None:
    """Give freed memory back to the system; opens no GPU but these.

    Torch frees what lies idle on all GPUs of this process at once, and waits for what these do. So
    if one of them hangs, nothing is freed: it stays in torch's reserve, for the next model.
    """
    for device in set(devices):
        if device.type != "cuda":
            trim_heap()
        elif not _hanging:
            with torch.cuda.device(device):
                torch.cuda.empty_cache()


def trim_heap() -> None:
    """Give what this process has freed back to the system, where the C library keeps it."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """The GNU C library's `malloc_trim`; others keep less."""
    if not sys.platform.startswith("linux"):
        return None
    found = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if found is None:
        return None
    found.argtypes = [ctypes.c_size_t]
    trim: Callable[[int], int] = found
    return trim


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; torch has several ways to say so."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(t in str(error) for t in OUT_OF_MEMORY_TEXTS)
