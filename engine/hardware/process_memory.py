"""How much memory of this process is, and was at most, in use."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from mmap import PAGESIZE
from pathlib import Path

import numpy as np
import psutil

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""What resets the kernel's record of a process's peak, see proc(5)."""


class ResidentPeak:
    """The largest growth of this process since it was made.

    Linux keeps a record of the peak, which begins anew here; elsewhere the peak is what `note` saw.
    """

    def __init__(self) -> None:
        self._start = self._seen = _resident_bytes()
        self._is_recorded = False
        with suppress(OSError):
            CLEAR.write_text(RESET_PEAK, encoding="ascii")
            self._is_recorded = True

    def note(self) -> None:
        """Look now, where the system keeps no record."""
        if not self._is_recorded:
            self._seen = max(self._seen, _resident_bytes())

    @property
    def growth(self) -> int:
        """Bytes; at least 0."""
        if self._is_recorded:
            self._seen = max(self._seen, _recorded_peak())
        return self._seen - self._start


def resident_bytes(address: int, n_bytes: int) -> int:
    """How much of some memory the system has given so far; 0 where it does not tell.

    Memory of zeros is there only once something was written to it.
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
    """Linux's mincore(2), which knows private memory too; elsewhere it may not."""
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
    """The kernel's record, in bytes; 0 where it says nothing."""
    with suppress(OSError):
        for line in STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0
