"""Pinned host memory, which GPUs can access directly, and this process's resident memory."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from math import prod
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from engine.errors import Sentence
from engine.hardware.cuda_api import CudaApi
from engine.hardware.devices.visibility import stopped_gpus
from engine.hardware.fallbacks import OF_THIS_PROCESS
from engine.hardware.faults import call_all

log = logging.getLogger(__name__)

PORTABLE_AND_MAPPED = 1 | 2
"""CUDA's `cudaHostRegisterPortable` and `...Mapped`: pinned for, and addressable by, all GPUs."""


class HostTensor:
    """A zeroed tensor in whole pages of host memory, pinned for the lifetime of this object.

    PyTorch's own pinned memory is rounded up to a power of two, and the process keeps it.

    Args:
        device: device to copy to and from; pages are pinned only for a GPU.

    Attributes:
        value: the tensor.
        is_pinned: whether a GPU can copy the memory without the CPU's help.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        n = prod(shape)
        self._pages = mmap.mmap(-1, n * dtype.itemsize)
        self.value: Tensor = torch.frombuffer(self._pages, dtype=dtype, count=n).view(*shape)
        self.is_pinned = device.type == "cuda" and _pin(self.value, device)
        if device.type == "cuda" and not self.is_pinned:
            _note_unpinned(self, f"{device.type}:{device.index or 0}")
        if self.is_pinned:
            unpin = partial(_unpin, self.value.data_ptr(), device)
            finalizer = weakref.finalize(self, call_all, unpin)
            finalizer.atexit = False  # CUDA may have shut down before

    def address_on(self, device: torch.device) -> int:
        """Return the address for kernels on a device; pinned memory has an address for every GPU.

        Raises:
            EngineError: the driver has no such address.
        """
        address = self.value.data_ptr()
        if device.type != "cuda" or torch.version.hip:
            return address
        return CudaApi.open().host_address(address, device.index or 0)


def _pin(held: Tensor, device: torch.device) -> bool:
    with torch.cuda.device(device):  # otherwise the call would open the first GPU
        code = _cuda().cudaHostRegister(held.data_ptr(), held.nbytes, PORTABLE_AND_MAPPED)
    if int(code) == 0:
        return True
    log.warning("%d bytes of host memory could not be pinned; copies are slower", held.nbytes)
    with contextlib.suppress(RuntimeError):
        # clears CUDA's last error, which the next launch would otherwise report again
        torch.zeros(1, device=device)
    return False


_unpinned: Counter[str] = Counter()
"""Number of live unpinned tensors by device."""

_counting = threading.RLock()
"""Lock for the count; reentrant, because the garbage collector may free a tensor."""


def _note_unpinned(held: HostTensor, device: str) -> None:
    # copies are slower as long as any such tensor is alive
    _count_unpinned(device, 1)
    weakref.finalize(held, _count_unpinned, device, -1).atexit = False


def _count_unpinned(device: str, change: int) -> None:
    with _counting:
        _unpinned[device] += change
        OF_THIS_PROCESS.withdraw("memory")
        for name in sorted(+_unpinned):
            why = Sentence("the system does not pin any more host memory")
            OF_THIS_PROCESS.report("memory", [name], why)


def _cuda() -> Any:
    runtime: Callable[[], Any] = torch.cuda.cudart
    return runtime()


def _unpin(address: int, device: torch.device) -> None:
    if str(device) in stopped_gpus():
        return
    with torch.cuda.device(device):
        _cuda().cudaHostUnregister(address)


STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Value that resets Linux's record of the peak when written to `CLEAR`; see proc(5)."""


class ResidentPeak:
    """The peak growth of this process's memory since this object was created.

    Linux records the peak, which is reset here; elsewhere, it is the maximum over calls to `note`.
    """

    def __init__(self) -> None:
        self._start = self._seen = _resident_bytes()
        self._is_recorded = False
        with suppress(OSError):
            CLEAR.write_text(RESET_PEAK, encoding="ascii")
            self._is_recorded = True

    def note(self) -> None:
        """Measure now, if the system keeps no record."""
        if not self._is_recorded:
            self._seen = max(self._seen, _resident_bytes())

    @property
    def growth(self) -> int:
        """Peak growth in bytes, at least 0."""
        if self._is_recorded:
            self._seen = max(self._seen, _recorded_peak())
        return self._seen - self._start


def resident_bytes(address: int, n_bytes: int) -> int:
    """Return how many bytes of a memory range are resident; 0 if the system cannot tell."""
    mincore = _mincore()
    first = -(-address // PAGESIZE) * PAGESIZE
    n_page = (address + n_bytes - first) // PAGESIZE
    if mincore is None or n_page < 1:
        return 0
    pages = np.zeros(n_page, np.uint8)
    failed = mincore(first, n_page * PAGESIZE, pages.ctypes.data)
    return 0 if failed else int((pages & 1).sum()) * PAGESIZE


@cache
def _mincore() -> Callable[[int, int, int], int] | None:
    # Linux's mincore(2) also covers private memory; elsewhere it may not
    if sys.platform != "linux":
        return None
    found = ctypes.CDLL(None).mincore
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    found.restype = ctypes.c_int
    called: Callable[[int, int, int], int] = found
    return called


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _recorded_peak() -> int:
    with suppress(OSError):
        for line in STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0
