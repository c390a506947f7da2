"""Idle work on the GUI thread, done a few milliseconds at a time between events.

All work shares one time slice per turn of the event loop, so turns stay short.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Final

from PySide6.QtCore import QObject, QTimer, Slot
from shiboken6 import isValid

import engine
from app.core.background import LatestJob
from app.core.process.environment import chosen_host
from engine import collect_garbage, sweep_temporaries

SLICE_S: Final = 0.006  # CPU time per turn of the event loop; the last step may overrun it


class SpareTime(QObject):
    """Queue for idle work; work is dropped when its owner is deleted.

    Attributes:
        until: end of the current time slice, in thread CPU time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.until = 0.0
        self._work: dict[QObject, Iterator[None]] = {}
        self._later: dict[QObject, Iterator[None]] = {}
        self._timer = QTimer(self, interval=0)
        self._timer.timeout.connect(self._turn)

    def do(self, owner: QObject, work: Iterator[None], *, is_last: bool = False) -> None:
        """Queue work to run step by step, replacing the owner's earlier work.

        Args:
            is_last: whether to run it only when no other work is left.
        """
        self.drop(owner)
        (self._later if is_last else self._work)[owner] = work
        self._timer.start()

    def drop(self, owner: QObject) -> None:
        """Drop an owner's remaining work."""
        self._work.pop(owner, None)
        self._later.pop(owner, None)

    def has_work_of(self, owner: QObject) -> bool:
        """Return whether an owner has work left."""
        return owner in self._work or owner in self._later

    def close(self) -> None:
        """Drop all work."""
        self._work.clear()
        self._later.clear()
        self._timer.stop()

    @Slot()
    def _turn(self) -> None:
        self.until = time.thread_time() + SLICE_S
        while some := self._work or self._later:
            owner, work = next(iter(some.items()))
            is_done = not isValid(owner) or not take_step(work)
            if is_done and some.get(owner) is work:
                del some[owner]
            if time.thread_time() > self.until:
                return
        self._timer.stop()


class LaterSteps(QObject):
    """Step that is repeated in idle time between `start` and `stop`."""

    def __init__(self, step: Callable[[], None], parent: QObject) -> None:
        super().__init__(parent)
        self._step = step

    def start(self) -> None:
        if not self.is_active:
            spare_time().do(self, self._steps(), is_last=True)

    def stop(self) -> None:
        spare_time().drop(self)

    @property
    def is_active(self) -> bool:
        return spare_time().has_work_of(self)

    def _steps(self) -> Iterator[None]:
        while True:
            self._step()
            yield


def take_step(work: Iterator[None]) -> bool:
    """Run one step of some work; return False if the work was already finished."""
    try:
        next(work)
    except StopIteration:
        return False
    return True


@cache
def spare_time() -> SpareTime:
    """Return this process's queue for idle work."""
    return SpareTime()


INTERVAL_MS = 1000
THRESHOLDS = (2000, 10, 20)
SWITCH_S = 0.0002
"""Seconds after which a thread yields the GIL; Python's default is 0.005."""


class Interpreter(QObject):
    """Python's garbage collection and thread switching, tuned between `start` and `stop`.

    Args:
        is_idle: returns whether a full garbage collection, which takes longer, may run now.
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
        """Exclude existing objects from later collections; imported modules are never freed."""
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


def import_host() -> None:
    chosen_host()


def import_planner() -> None:
    """Import the planner, the model reader and the Markdown parser."""
    for name in ("DeviceMonitor", "Forecaster", "MachineFile", "Calibration", "read_topology"):
        getattr(engine, name)
    for name in ("read_model_info", "Planner", "choose", "Fit", "PlanStore", "chosen_way"):
        getattr(engine, name)
    engine.supported_architectures()  # imports them all
    import_module("markdown_it")
    import_module("mdit_py_plugins.footnote")


class Sweeper(QObject):
    """Thread that deletes temporary files on request; a chat's KV cache may take gigabytes."""

    def __init__(self, folders: Sequence[Path], parent: QObject) -> None:
        super().__init__(parent)
        self._folders = tuple(folders)
        self._job = LatestJob("tandem-sweep", self)

    @Slot()
    @Slot(object)
    def sweep(self, _: object = None) -> None:
        """Start deleting files left by dead processes; return immediately."""
        self._job.run(self._sweep_all)

    def close(self) -> None:
        """Wait for the running sweep."""
        self._job.close()

    def _sweep_all(self) -> None:
        for folder in self._folders:
            sweep_temporaries(folder)
