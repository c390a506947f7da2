"""How Python runs in the window's process, so that the GUI thread never waits long.

Threads that read headers and plan splits compete with it for the interpreter's lock: each time it
gives the lock away, as around a call of Qt or of the system, another thread may keep it for the
switch interval. While a model is opened, that happens several times within one turn.

Automatic garbage collection runs on whichever thread allocates: it would delete widgets on another
thread, and a full pass over all objects would stop the window. So this thread collects, in small
steps. Nothing is collected while the engine asks for that; the next step makes up for it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

from PySide6.QtCore import QObject, QTimer, Slot

from engine import collect_garbage

INTERVAL_MS = 1000
THRESHOLDS = (2000, 10, 20)
SWITCH_S = 0.0002
"""Seconds for which another thread may keep the interpreter's lock; Python's own are 0.005."""


class Interpreter(QObject):
    """Python's collection of garbage and switch of threads, from `start` until `stop`.

    Args:
        is_idle: returns whether a full pass, which takes longer, may run now.
    """

    def __init__(self, is_idle: Callable[[], bool], parent: QObject) -> None:
        super().__init__(parent)
        self._is_idle = is_idle
        self._usual_s = sys.getswitchinterval()
        self._timer = QTimer(self, interval=INTERVAL_MS)
        self._timer.timeout.connect(self._step)

    def start(self) -> None:
        self._usual_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        gc.disable()
        self._timer.start()

    def stop(self) -> None:
        self._timer.stop()
        gc.enable()
        sys.setswitchinterval(self._usual_s)

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
