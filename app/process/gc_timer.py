"""Garbage collection on the GUI thread only, in small steps.

Automatic collection runs on whichever thread allocates: it would delete widgets on the engine's
thread, and a full pass over all of torch's objects would stop both threads at once. Nothing is
collected while the engine asks for that; the next step makes up for it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from PySide6.QtCore import QObject, QTimer, Slot

from engine import collect_garbage

INTERVAL_MS = 1000
THRESHOLDS = (2000, 10, 20)


class GarbageCollector(QObject):
    """Replacement of Python's automatic garbage collection, from `start` until `stop`.

    Args:
        is_idle: returns whether a full pass, which takes longer, may run now.
    """

    def __init__(self, is_idle: Callable[[], bool], parent: QObject) -> None:
        super().__init__(parent)
        self._is_idle = is_idle
        self._timer = QTimer(self, interval=INTERVAL_MS)
        self._timer.timeout.connect(self._step)

    def start(self) -> None:
        gc.disable()
        self._timer.start()

    def stop(self) -> None:
        self._timer.stop()
        gc.enable()

    @Slot()
    def settle(self) -> None:
        """Exclude all present objects from later passes: imported modules never die."""
        gc.freeze()

    @Slot()
    def _step(self) -> None:
        counts = gc.get_count()
        if counts[2] > THRESHOLDS[2] and self._is_idle():
            collect_garbage(2)
        elif counts[1] > THRESHOLDS[1]:
            collect_garbage(1)
        elif counts[0] > THRESHOLDS[0]:
            collect_garbage(0)
