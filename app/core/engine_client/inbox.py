"""The way of events from the engine's thread to the window's.

The engine delivers on its own thread, often hundreds of times a second. That only appends to a
queue; the first event after a pause wakes a timer of the GUI thread, which then empties the queue
some twenty-five times a second. The server shares the engine, with commands and events of its own.
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
    """Queue of events that is emptied on the GUI thread.

    Args:
        take: called on the GUI thread with the events since the last call, also with none.
    """

    _woken = Signal()

    def __init__(self, take: Callable[[list[HostEvent]], None], parent: QObject) -> None:
        super().__init__(parent)
        self._take = take
        self._queue: deque[HostEvent] = deque()
        self._lock = threading.Lock()
        self._is_awake = self._is_closed = False
        self._host_number = 0  # events of hosts before it are dropped
        self._watch: Callable[[HostEvent], bool] | None = None
        self._timer = QTimer(self, interval=DRAIN_MS)
        self._timer.timeout.connect(self.drain)
        self._woken.connect(self._wake)

    def let_watch(self, watch: Callable[[HostEvent], bool] | None) -> None:
        """Have each event shown to somebody else first, on the thread on which it comes.

        Args:
            watch: returns whether the event is nobody else's business; None for nobody.
        """
        with self._lock:
            self._watch = watch

    def receiver(self) -> Callable[[HostEvent], None]:
        """Return what a host shall call with its events, on whichever thread."""
        number = self._host_number
        return lambda event: self._receive(event, number)

    def forget(self) -> None:
        """Drop what the hosts so far have sent and will send."""
        with self._lock:
            self._host_number += 1
            self._queue.clear()

    def close(self) -> None:
        """Deliver the last events, and nothing after them."""
        self.drain()
        self._timer.stop()
        self._is_closed = True

    @Slot()
    def drain(self) -> None:
        """Deliver what has come; sleep if that is nothing."""
        if self._is_closed:
            return
        with self._lock:
            events = list(self._queue)
            self._queue.clear()
        self._take(events)
        if not events:
            self._doze()

    def _receive(self, event: HostEvent, host_number: int) -> None:
        """Take an event; runs on the engine's thread."""
        with self._lock:
            if host_number != self._host_number:
                return
            if self._watch is not None and self._watch(event):
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
        """Stop the timer unless an event came in between."""
        with self._lock:
            if self._queue:
                return
            self._is_awake = False
        self._timer.stop()


OF_ANSWERS = (
    PrefillProgress, ContextShifted, TokenText, TokenTimes, ToolCallBegun, ToolCallText,
    ToolCallEnded,
)  # fmt: skip
"""Events before the end of an answer."""


class EngineSharing:
    """Commands of somebody beside the window, whose events the window does not get.

    Any thread may call it. No lock is held while a host is called: some send events from there.

    Attributes:
        on_event: called with every event of the engine, the window's included, on the engine's
            thread; it must return quickly. None for nobody.
        used_at: time when a command was last begun or ended, as of `time.monotonic`; one that a
            gauge has asked for does not count.
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
        """Number of commands that have not ended."""
        return len(self._running)

    def watch(self, on_event: Callable[[HostEvent], None]) -> ModelLoaded | None:
        """Have all events told from now on, and return the model that is loaded before them."""
        with self._lock:
            self.on_event = on_event
            return self._model

    def use(self, host: EngineHost | None) -> None:
        """Note which engine there is from now on; commands of an earlier one fail."""
        with self._lock:
            self._host, self._model = host, None
            ended = list(self._running)
            self._running.clear()
        if self.on_event is not None:
            error = EngineCrashed("The engine was replaced.", "Try again in a moment.")
            for number in ended or [0]:
                self.on_event(HostEvent(number, Failed(error, is_model_lost=True)))

    def submit(self, command: Command) -> int:
        """Hand a command to the engine, and return its id.

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
        """Ask a command to end, if it has not."""
        with self._lock:
            host = self._host if number in self._running else None
        if host is not None:
            host.cancel(number)

    def cancel_all(self) -> None:
        """Ask all commands to end."""
        for number in list(self._running):
            self.cancel(number)

    def take(self, event: HostEvent) -> bool:
        """Take an event of the engine; return whether it is of no interest to the window."""
        is_shown = isinstance(event.event, FallbacksChanged)  # of the model, whoever has asked
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
