"""The bridge from the monitor's thread to the GUI thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal

import engine

if TYPE_CHECKING:
    from engine import DeviceSnapshot

BUSY_S, IDLE_S = 1.0, 2.0
"""Seconds between two readings while the engine works, and while nothing happens: a reading with
all that it changes in the window costs most of what an idle window takes."""


class DevicePoller(QObject):
    """Source of regular snapshots of all devices.

    The devices are read on a thread of the engine's monitor, so that a slow driver never
    blocks the window. Slots of objects that live on the GUI thread run there.

    Args:
        interval_s: seconds between two readings while the engine works.

    Attributes:
        others: returns the states of devices elsewhere; called on the monitor's thread.
    """

    snapshots = Signal(object)  # list[DeviceSnapshot]

    def __init__(self, parent: QObject | None = None, interval_s: float = BUSY_S) -> None:
        super().__init__(parent)
        self._busy_s = interval_s
        self._is_busy = False
        self.others: Callable[[], list[DeviceSnapshot]] = list
        self._monitor: engine.DeviceMonitor | None = None

    @property
    def is_running(self) -> bool:
        return self._monitor is not None

    def start(self) -> None:
        """Start reading, unless it has started."""
        if self._monitor is None:
            self._monitor = engine.DeviceMonitor()
            self._monitor.start(self._tell, self._interval())

    def _tell(self, found: list[DeviceSnapshot]) -> None:
        """Send what was read, and what is known of devices elsewhere; runs on a thread."""
        self.snapshots.emit([*found, *self.others()])

    def set_busy(self, busy: bool) -> None:
        """Read more often while the engine works."""
        self._is_busy = busy
        if self._monitor is not None:
            self._monitor.pace(self._interval())

    def _interval(self) -> float:
        return self._busy_s if self._is_busy else self._busy_s * IDLE_S / BUSY_S

    def stop(self) -> None:
        """End the thread, wait for it, and release the driver."""
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.close()
