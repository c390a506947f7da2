"""Allocates pinned host memory, which a GPU can read and write by itself."""

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

from engine.hardware.cuda_api import CudaApi
from engine.hardware.devices.visibility import stopped_gpus
from engine.hardware.fallbacks import OF_THIS_PROCESS
from engine.hardware.faults import call_all

log = logging.getLogger(__name__)

PORTABLE_AND_MAPPED = 1 | 2
"""CUDA's `cudaHostRegisterPortable` and `...Mapped`: pinned for all GPUs, and addressable."""


class HostTensor:
    """A tensor of zeros in whole pages of host memory, pinned as long as this object lives.

    PyTorch's own pinned memory is rounded up to a power of two, and the process keeps it.

    Args:
        device: device to copy to and from; only a GPU needs pinned pages.

    Attributes:
        value: the tensor.
        is_pinned: whether the pages are pinned, so that a GPU copies without the CPU's help.
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
        """Return the address for kernels on a device; any GPU has one if the tensor is pinned.

        Raises:
            EngineError: the driver knows no such address.
        """
        address = self.value.data_ptr()
        if device.type != "cuda" or torch.version.hip:
            return address
        return CudaApi.open().host_address(address, device.index or 0)


def _pin(held: Tensor, device: torch.device) -> bool:
    """Pin memory and return whether that worked; some systems allow little pinned memory."""
    with torch.cuda.device(device):  # or it would use the first GPU, perhaps for nothing else
        code = _cuda().cudaHostRegister(held.data_ptr(), held.nbytes, PORTABLE_AND_MAPPED)
    if int(code) == 0:
        return True
    log.warning("%d bytes of host memory could not be pinned; copies are slower", held.nbytes)
    with contextlib.suppress(RuntimeError):
        # takes CUDA's last error, which the next launch would report again
        torch.zeros(1, device=device)
    return False


_unpinned: Counter[str] = Counter()
"""Number of unpinned tensors that still live, by the device for which they were made."""

_counting = threading.RLock()
"""Lock of the count; the same thread may enter again, where a tensor is freed by the collector."""


def _note_unpinned(held: HostTensor, device: str) -> None:
    """Report that copies are slower, for as long as any such tensor lives."""
    _count_unpinned(device, 1)
    weakref.finalize(held, _count_unpinned, device, -1).atexit = False


def _count_unpinned(device: str, change: int) -> None:
    with _counting:
        _unpinned[device] += change
        OF_THIS_PROCESS.withdraw("memory")
        for name in sorted(+_unpinned):
            OF_THIS_PROCESS.report("memory", [name], "the system pins no more host memory")


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
"""Text that resets Linux's record of the peak when written to `CLEAR`, see proc(5)."""


class ResidentPeak:
    """The peak growth of this process's memory since this object was made.

    Linux keeps a record of the peak, which is reset here; elsewhere the peak is what `note` saw.
    """

    def __init__(self) -> None:
        self._start = self._seen = _resident_bytes()
        self._is_recorded = False
        with suppress(OSError):
            CLEAR.write_text(RESET_PEAK, encoding="ascii")
            self._is_recorded = True

    def note(self) -> None:
        """Measure now, where the system keeps no record."""
        if not self._is_recorded:
            self._seen = max(self._seen, _resident_bytes())

    @property
    def growth(self) -> int:
        """Peak growth in bytes, at least 0."""
        if self._is_recorded:
            self._seen = max(self._seen, _recorded_peak())
        return self._seen - self._start


def resident_bytes(address: int, n_bytes: int) -> int:
    """Return how many bytes of a memory range are resident; 0 where the system does not tell.

    Pages of zeros become resident only once something is written to them.
    """
    ask = _mincore()
    first = -(-address // PAGESIZE) * PAGESIZE
    n_page = (address + n_bytes - first) // PAGESIZE
    if ask is None or n_page < 1:
        return 0
    pages = np.zeros(n_page, np.uint8)
    is_told = ask(first, n_page * PAGESIZE, pages.ctypes.data) == 0
    return int((pages & 1).sum()) * PAGESIZE if is_told else 0


@cache
def _mincore() -> Callable[[int, int, int], int] | None:
    """Return Linux's mincore(2), which covers private memory too; elsewhere it may not."""
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
    """Return Linux's record of the peak, in bytes; 0 where there is none."""
    with suppress(OSError):
        for line in STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0
