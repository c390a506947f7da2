"""Work off the GUI thread: on other threads, or in a resource-limited child process."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PySide6.QtCore import QObject, Signal, Slot

import engine  # its process classes are imported on first use
from engine import EngineError

log = logging.getLogger(__name__)

JOIN_S = 10.0

Work = Callable[[], object]


class LatestJob(QObject):
    """Worker thread that runs one job at a time; a new job replaces the waiting one.

    Signals are emitted on this object's thread.
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
        """Run `work` next; emit `done` with its result or `failed` with its EngineError."""
        with self._lock:
            self._number += 1
            self._next = self._number, work
            if self._is_running:
                return
            self._is_running = True
        self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._thread.start()

    def drop(self) -> None:
        """Discard the results of all jobs submitted so far."""
        with self._lock:
            self._next = None
            self._dropped = self._number

    def close(self, limit_s: float = JOIN_S) -> None:
        """Drop all jobs and wait up to `limit_s` for the running one."""
        self.drop()
        if self._thread is not None:
            self._thread.join(limit_s)

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
            except (
                BaseException
            ):  # a bug, which the excepthook reports; the next job gets a new thread
                with self._lock:
                    self._is_running = False
                raise
            self._ended.emit(number, result)

    @Slot(int, object)
    def _on_ended(self, number: int, result: object) -> None:
        if number <= self._dropped:
            return
        if isinstance(result, EngineError):
            self.failed.emit(result)
        else:
            self.done.emit(result)


@dataclass(slots=True, eq=False)
class _Job:
    key: str
    work: Callable[[], None]
    then: Callable[[Exception | None], None]
    error: Exception | None = None


class KeyedJobs(QObject):
    """Thread that runs jobs in order; a new job replaces a waiting job with the same key."""

    _ended = Signal()

    def __init__(self, name: str, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._name = name
        self._changed = threading.Condition()
        self._waiting: dict[str, _Job] = {}
        self._done: list[_Job] = []
        self._newest: dict[str, _Job] = {}
        self._thread: threading.Thread | None = None
        self._is_working = self._is_closed = False
        self._ended.connect(self._report)

    @property
    def is_busy(self) -> bool:
        """Whether a job is waiting, running or not yet reported."""
        return bool(self._newest)

    def run(
        self, key: str, work: Callable[[], None], then: Callable[[Exception | None], None]
    ) -> None:
        """Run `work` on the worker thread, then call `then` with its error, if any, on this thread.

        `then` is skipped if a newer job has the same key.
        """
        job = _Job(key, work, then)
        self._newest[key] = job
        with self._changed:
            self._waiting[key] = job
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()

    def finish(self, limit_s: float) -> bool:
        """Wait up to `limit_s` for all jobs and their reports; return whether they finished."""
        until = time.monotonic() + limit_s
        while self._waiting or self._is_working or self._done:
            with self._changed:
                is_done = self._changed.wait_for(self._is_idle, until - time.monotonic())
            self._report()
            if not is_done:
                return False
        return True

    def close(self, limit_s: float = JOIN_S) -> None:
        """Run the waiting jobs for up to `limit_s`, then stop the thread."""
        self.finish(limit_s)
        thread, self._thread = self._thread, None
        if thread is not None:
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()
            thread.join(JOIN_S)
            self._is_closed = False

    def _is_idle(self) -> bool:
        return not self._waiting and not self._is_working

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._is_closed)
                if not self._waiting:
                    return
                job = self._waiting.pop(next(iter(self._waiting)))
                self._is_working = True
            try:
                job.work()
            except Exception as error:  # noqa: BLE001 passed to `then`
                job.error = error
            with self._changed:
                self._is_working = False
                self._done.append(job)
                self._changed.notify_all()
            self._ended.emit()

    @Slot()
    def _report(self) -> None:
        with self._changed:
            done, self._done = self._done, []
        for job in done:
            if self._newest.get(job.key) is job:
                del self._newest[job.key]
                job.then(job.error)


class KeptChild:
    """Child process, started by the first request and restarted after it ends.

    `ask` and `close` are not thread-safe.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._child: engine.LimitedChild | None = None
        self._is_over = False

    def ask(self, request: Mapping[str, object], max_bytes: int, seconds: float) -> dict[str, Any]:
        """Return the child's reply to a request.

        Args:
            max_bytes: memory limit for the child, applied when it starts.
            seconds: timeout for the reply.

        Raises:
            ChildEnded: the child died or timed out.
            OSError: the child cannot be started.
        """
        try:
            if self._child is None and not self._is_over:
                self._child = engine.LimitedChild(self._command, max_bytes)
            if self._child is None or self._is_over:
                raise engine.ChildEnded(None, None)
            self._child.wait_until_ready()
            return self._child.ask((json.dumps(request) + "\n").encode(), seconds)
        except (engine.ChildEnded, OSError):
            self.close()
            raise

    def kill(self) -> None:
        """Kill the child and refuse further requests. Thread-safe."""
        self._is_over = True
        if (child := self._child) is not None:
            child.kill()

    def close(self) -> None:
        """Stop the child and close its pipes."""
        child, self._child = self._child, None
        if child is not None:
            child.close()
