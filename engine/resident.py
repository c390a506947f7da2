"""How much memory of this process is, and was at most, in use."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

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


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _recorded_peak() -> int:
    """The kernel's record, in bytes; 0 where it says nothing."""
    with suppress(OSError):
        for line in STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0
