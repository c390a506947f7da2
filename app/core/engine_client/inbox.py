"""Delivery of events from the engine's thread to the window's.

The engine sends events on its own thread, often hundreds per second; they are appended to a queue.
The first event after a pause starts a timer on the GUI thread, which drains the queue 25 times a
second. The server shares the engine but has its own commands and events.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, QTimer, Signal, Slot

from engine import (
    CacheCounted,
    ContextShifted,
    CountCache,
    EngineCrashed,
    EngineError,
    Failed,
    FallbacksChanged,
    HostEvent,
    PrefillProgress,
    TokenText,
    TokenTimes,
    ToolCallBegun,
    ToolCallEnded,
    ToolCallText,
    model_after,
    new_command_id,
)

if TYPE_CHECKING:
    from engine import Command, EngineHost, ModelLoaded

DRAIN_MS = 40


class EventInbox(QObject):
    """Queue of events, drained on the GUI thread.

    Args:
        take: called on the GUI thread with the events since the last call, possibly none.
        watch: called on the engine's thread with each new event; returns whether to drop it.
    """

    _woken = Signal()

    def __init__(
        self,
        take: Callable[[list[HostEvent]], None],
        watch: Callable[[HostEvent], bool],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._take, self._watch = take, watch
        self._queue: deque[HostEvent] = deque()
        self._lock = threading.Lock()
        self._is_awake = self._is_closed = False
        self._host_number = 0  # events from earlier hosts are dropped
        self._timer = QTimer(self, interval=DRAIN_MS)
        self._timer.timeout.connect(self.drain)
        self._woken.connect(self._wake)

    def receiver(self) -> Callable[[HostEvent], None]:
        """Return the callback for a new host's events. Thread-safe."""
        number = self._host_number
        return lambda event: self._receive(event, number)

    def forget(self) -> None:
        """Drop all events from existing hosts, including future ones."""
        with self._lock:
            self._host_number += 1
            self._queue.clear()

    def close(self) -> None:
        """Deliver the queued events and ignore later ones."""
        self.drain()
        self._timer.stop()
        self._is_closed = True

    @Slot()
    def drain(self) -> None:
        """Deliver the queued events; stop the timer if there are none."""
        if self._is_closed:
            return
        with self._lock:
            events = list(self._queue)
            self._queue.clear()
        self._take(events)
        if not events:
            self._doze()

    def _receive(self, event: HostEvent, host_number: int) -> None:
        """Queue an event; runs on the engine's thread."""
        with self._lock:
            if host_number != self._host_number:
                return
            if self._watch(event):
                return
            self._queue.append(event)
            wake, self._is_awake = not self._is_awake, True
        if wake:
            self._woken.emit()

    @Slot()
    def _wake(self) -> None:
        if not self._is_closed:
            self._timer.start()
        self.drain()

    def _doze(self) -> None:
        """Stop the timer unless an event has just arrived."""
        with self._lock:
            if self._queue:
                return
            self._is_awake = False
        self._timer.stop()


OF_ANSWERS = (
    PrefillProgress, ContextShifted, TokenText, TokenTimes, ToolCallBegun, ToolCallText,
    ToolCallEnded,
)  # fmt: skip
"""Events that precede an answer's closing event."""


class EngineSharing:
    """The server's commands to the shared engine, whose events the window does not receive.

    Thread-safe. No lock is held while a host is called, since some hosts send events from the call.

    Attributes:
        on_event: called on the engine's thread with every event, including the window's; must
            return quickly. May be None.
        used_at: time when a command last started or finished, by `time.monotonic`; `CountCache`
            commands do not update it, since metrics poll with them.
    """

    def __init__(self) -> None:
        self.on_event: Callable[[HostEvent], None] | None = None
        self.used_at = time.monotonic()
        self._host: EngineHost | None = None
        self._model: ModelLoaded | None = None
        self._running: set[int] = set()
        self._lock = threading.Lock()

    @property
    def n_running(self) -> int:
        """Number of running commands."""
        return len(self._running)

    def watch(self, on_event: Callable[[HostEvent], None]) -> ModelLoaded | None:
        """Subscribe to all events; return the loaded model, if any."""
        with self._lock:
            self.on_event = on_event
            return self._model

    def use(self, host: EngineHost | None) -> None:
        """Switch to another engine; commands running on the old one fail."""
        with self._lock:
            self._host, self._model = host, None
            ended = list(self._running)
            self._running.clear()
        if self.on_event is not None:
            error = EngineCrashed("The engine was replaced.", "Try again in a moment.")
            for number in ended or [0]:
                self.on_event(HostEvent(number, Failed(error, is_model_lost=True)))

    def submit(self, command: Command) -> int:
        """Submit a command to the engine and return its id.

        Raises:
            EngineError: there is no engine.
        """
        with self._lock:
            host = self._host
            if host is None:
                raise EngineError("No model is loaded.", "Open one in Tandem.")
            number = new_command_id()
            self._running.add(number)
            if not isinstance(command, CountCache):
                self.used_at = time.monotonic()
        host.submit(command, number)
        return number

    def cancel(self, number: int) -> None:
        """Cancel a command if it is running."""
        with self._lock:
            host = self._host if number in self._running else None
        if host is not None:
            host.cancel(number)

    def cancel_all(self) -> None:
        for number in list(self._running):
            self.cancel(number)

    def take(self, event: HostEvent) -> bool:
        """Process an event; return whether to hide it from the window."""
        is_shown = isinstance(event.event, FallbacksChanged)  # concerns the model, not a command
        with self._lock:
            self._model = model_after(event.event, self._model)
            is_own = event.command_id in self._running
            if not is_shown and not isinstance(event.event, OF_ANSWERS):
                self._running.discard(event.command_id)
                if is_own and not isinstance(event.event, CacheCounted):
                    self.used_at = time.monotonic()
        if self.on_event is not None:
            self.on_event(event)
        is_loss = isinstance(event.event, Failed) and event.event.is_model_lost
        return is_own and not is_loss and not is_shown
