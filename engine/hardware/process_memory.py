"""Measures the memory of this process, now and at its peak."""

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
