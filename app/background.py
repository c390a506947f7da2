"""Work that takes too long for the GUI thread: done on another, newest request first."""

from __future__ import annotations

import threading
from collections.abc import Callable

from PySide6.QtCore import QObject, Signal, Slot

from engine import EngineError

JOIN_S = 10.0

Work = Callable[[], object]


class LatestJob(QObject):
    """A worker for one job at a time; of the waiting jobs only the newest is done.

    Results arrive on the thread that this object lives on.
    """

    done = Signal(object)
    failed = Signal(object)  # EngineError

    _ended = Signal(int, object)

    def __init__(self, name: str, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._name = name
        self._lock = threading.Lock()
        self._next: tuple[int, Work] | None = None
        self._thread: threading.Thread | None = None
        self._is_running = False
        self._number = self._dropped = 0
        self._ended.connect(self._on_ended)

    @property
    def is_busy(self) -> bool:
        return self._is_running

    def run(self, work: Work) -> None:
        """Do `work` next; `done` or, for an EngineError, `failed` reports its result."""
        with self._lock:
            self._number += 1
            self._next = self._number, work
            if self._is_running:
                return
            self._is_running = True
        self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._thread.start()

    def drop(self) -> None:
        """Report no result of any job requested so far."""
        with self._lock:
            self._next = None
            self._dropped = self._number

    def close(self) -> None:
        """Drop all jobs and wait for the running one."""
        self.drop()
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._next is None:
                    self._is_running = False
                    return
                number, work = self._next
                self._next = None
            result: object
            try:
                result = work()
            except EngineError as error:
                result = error
            self._ended.emit(number, result)

    @Slot(int, object)
    def _on_ended(self, number: int, result: object) -> None:
        if number <= self._dropped:
            return
        if isinstance(result, EngineError):
            self.failed.emit(result)
        else:
            self.done.emit(result)
