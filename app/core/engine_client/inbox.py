"""The way of events from the engine's thread to the window's.

The engine delivers on its own thread, often hundreds of times a second. That only appends to a
queue; the first event after a pause wakes a timer of the GUI thread, which then empties the queue
some twenty-five times a second.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from PySide6.QtCore import QObject, QTimer, Signal, Slot

from engine import HostEvent

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
