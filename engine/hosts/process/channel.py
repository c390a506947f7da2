"""A connection between two processes that carries messages."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Generic, TypeVar

from engine.errors import EngineCrashed
from engine.events import Command, Failed, HostEvent
from engine.generation.results import PrefillProgress, TokenText, join_texts
from engine.hosts.process.codec import MAX_BYTES, Codec, MessageError
from engine.runtime.timeline import TokenTimes
from engine.util.progress import LoadProgress, StateProgress

Out = TypeVar("Out")
In = TypeVar("In")


class Channel(Generic[Out, In]):
    """One end of a connection; several threads may send, but only one may receive."""

    def __init__(self, connection: Connection, outgoing: Codec[Out], incoming: Codec[In]) -> None:
        self._connection, self._outgoing, self._incoming = connection, outgoing, incoming
        self._lock = threading.Lock()

    def send(self, message: Out) -> None:
        """Send a message, blocking while the other end is busy.

        Raises:
            MessageError: the message cannot be serialized.
            OSError: the other end is gone.
        """
        data = self._outgoing.pack(message)
        with self._lock:
            self._connection.send_bytes(data)

    def receive(self, timeout_s: float | None = None) -> In | None:
        """Return the next message; None after the timeout.

        Raises:
            MessageError: the received bytes are not a message.
            EOFError, OSError: the other end is gone, or sent more than the maximum message size.
        """
        if not self._connection.poll(timeout_s):
            return None
        return self._incoming.unpack(self._connection.recv_bytes(MAX_BYTES))

    def close(self) -> None:
        """Close this end."""
        self._connection.close()


def connected_pair() -> tuple[Connection, Connection]:
    """Return the two ends of an anonymous connection."""
    return Pipe()


def inherited_connection(handle: int) -> Connection:
    """Return the end of a connection that this process has inherited."""
    if sys.platform == "win32":
        from multiprocessing.connection import PipeConnection

        return PipeConnection(handle)
    return Connection(handle)


@dataclass(frozen=True, slots=True)
class SubmitMessage:
    """A command for the engine, and its id."""

    command_id: int
    command: Command


@dataclass(frozen=True, slots=True)
class CancelMessage:
    """Request to cancel the command with this id, or all earlier commands if None."""

    command_id: int | None = None


@dataclass(frozen=True, slots=True)
class CloseMessage:
    """Request to free the model and end the process."""


@dataclass(frozen=True, slots=True)
class EventsMessage:
    """Events from the engine, in order."""

    events: tuple[HostEvent, ...]


@dataclass(frozen=True, slots=True)
class BeatMessage:
    """Heartbeat from the process, regardless of what its engine is doing."""


ToEngine = SubmitMessage | CancelMessage | CloseMessage
FromEngine = EventsMessage | BeatMessage

TO_ENGINE: Codec[ToEngine] = Codec(ToEngine)

FROM_ENGINE: Codec[FromEngine] = Codec(FromEngine)


log = logging.getLogger(__name__)

FRAME_S = 1 / 25
"""Seconds between two batches of events that can wait; the window empties its queue as often.
Each batch takes CPU time in both processes, which matters for small models."""

BEAT_S = 0.5
"""Seconds between two heartbeats."""

PATIENT = (TokenText, TokenTimes, PrefillProgress, LoadProgress, StateProgress)
"""Events that can wait for the next batch; others are sent immediately, after any waiting ones."""


class EventSender:
    """Threads that send the engine's events and heartbeats, so that the engine never waits."""

    def __init__(self, channel: Channel[FromEngine, ToEngine]) -> None:
        self._channel = channel
        self._waiting: list[HostEvent] = []
        self._changed = threading.Condition()
        self._is_urgent = self._is_closed = False
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._run, "tandem-events"), (self._beat, "tandem-heartbeat"))
        ]
        for thread in self._threads:
            thread.start()

    def put(self, event: HostEvent) -> None:
        """Queue an event to send."""
        with self._changed:
            self._waiting.append(event)
            is_urgent = not isinstance(event.event, PATIENT)
            self._is_urgent = self._is_urgent or is_urgent
            if is_urgent or len(self._waiting) == 1:  # otherwise, its thread is waiting
                self._changed.notify_all()

    def close(self) -> None:
        """Send the queued events, and stop the threads."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        sent = 0.0
        while events := self._take(sent):
            sent = time.monotonic()
            try:
                self._send(merged(events))
            except OSError:  # the window's process is gone; the command reader notices, too
                return

    def _take(self, sent: float) -> tuple[HostEvent, ...]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            rest = sent + FRAME_S - time.monotonic()
            self._changed.wait_for(lambda: self._is_urgent or self._is_closed, max(0.0, rest))
            events = tuple(self._waiting)
            self._waiting.clear()
            self._is_urgent = False
        return events

    def _send(self, events: tuple[HostEvent, ...]) -> None:
        try:
            self._channel.send(EventsMessage(events))
        except MessageError as error:
            if len(events) > 1:
                for event in events:
                    self._send((event,))
            else:
                log.exception("%s cannot be sent", type(events[0].event).__name__)
                failed = Failed(EngineCrashed(error.message, error.hint))
                self._channel.send(EventsMessage((HostEvent(events[0].command_id, failed),)))

    def _beat(self) -> None:
        while not self._is_closed:
            try:
                self._channel.send(BeatMessage())
            except OSError:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, BEAT_S)


def merged(events: Iterable[HostEvent]) -> tuple[HostEvent, ...]:
    """Return events with each answer's texts joined, up to its next part or other event.

    Sending each text separately would take as long as a small model takes for a token. Concurrent
    answers alternate; an event that cannot wait keeps its place among all events.
    """
    found: list[HostEvent] = []
    tokens: dict[int, list[TokenText]] = {}  # by index of the first one in `found`
    growing: dict[int, int] = {}  # that index, by command id, if more may follow
    for event in events:
        if isinstance(event.event, TokenText):
            place = growing.get(event.command_id)
            if place is not None and tokens[place][0].part == event.event.part:
                tokens[place].append(event.event)
                continue
            growing[event.command_id] = len(found)
            tokens[len(found)] = [event.event]
        elif isinstance(event.event, PATIENT):
            growing.pop(event.command_id, None)
        else:
            growing.clear()
        found.append(event)
    for place, texts in tokens.items():
        found[place] = HostEvent(found[place].command_id, join_texts(texts))
    return tuple(found)
