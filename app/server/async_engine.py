"""The engine for asyncio: commands as coroutines, events as async iterators."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from app.server.refusal import Refusal
from engine import (
    CacheCounted,
    Command,
    ContextShifted,
    CountCache,
    EngineError,
    EngineReady,
    Event,
    Failed,
    FallbacksChanged,
    LoadProgress,
    PrefillProgress,
    StateProgress,
    TokenText,
    TokenTimes,
    ToolCallBegun,
    ToolCallEnded,
    ToolCallText,
    TuneProgress,
    TuneStarted,
    join_texts,
    model_after,
)

if TYPE_CHECKING:
    from engine import HostEvent, ModelLoaded

PROGRESS = (
    LoadProgress, StateProgress, PrefillProgress, ContextShifted, TokenText, TokenTimes,
    ToolCallBegun, ToolCallText, ToolCallEnded, TuneStarted, TuneProgress, FallbacksChanged,
    EngineReady,
)  # fmt: skip
"""Events that do not end their command."""

MAX_UNREAD = 4096  # maximum number of unread events per request; an answer that exceeds it fails
MAX_TOGETHER = 32  # unread texts with at least this many tokens are not extended


class AsyncEngine:
    """Adapter between an asyncio loop and an engine that others may use as well.

    Everything except `on_event` must run on the loop's thread.

    Args:
        submit: submits a command and returns its id; see `EngineHost.submit`.
        cancel: cancels a command by id; see `EngineHost.cancel`.

    Attributes:
        model: the loaded model, if any.
        on_loss: called with the error after the engine has lost its model.
    """

    def __init__(self, submit: Callable[[Command], int], cancel: Callable[[int], None]) -> None:
        self.model: ModelLoaded | None = None
        self.on_loss: Callable[[EngineError], None] | None = None
        self._submit, self._cancel = submit, cancel
        self._submitted: dict[int, tuple[CommandEvents, int]] = {}  # by id
        self._arrived: deque[HostEvent] = deque()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_woken = False

    @property
    def is_idle(self) -> bool:
        """Whether no command is running."""
        return not self._submitted

    def open(self) -> None:
        """Start delivering events, including earlier ones, to the running loop."""
        with self._lock:
            self._loop = asyncio.get_running_loop()
            self._is_woken = True
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        """Drop further events and fail the running commands."""
        with self._lock:
            self._loop, self._is_woken = None, False
            self._arrived.clear()
        self.fail(Refusal(503, "The server has been stopped."))

    def on_event(self, event: HostEvent) -> None:
        """Queue an event from the engine, waking the loop once for several events. Thread-safe."""
        with self._lock:
            self._arrived.append(event)
            if self._is_woken or self._loop is None:
                return
            self._is_woken = True
            with suppress(RuntimeError):  # the loop has just been closed
                self._loop.call_soon_threadsafe(self._drain)

    def events_of(self, commands: Sequence[Command]) -> CommandEvents:
        """Return the events of commands; entering the result submits the commands."""
        return CommandEvents(self, commands)

    async def run(
        self, command: Command, on_progress: Callable[[Event], None] | None = None
    ) -> Event:
        """Submit a command and return its closing event; pass earlier events to `on_progress`.

        Raises:
            EngineError: the command failed.
        """
        async with self.events_of([command]) as events:
            async for _, event in events:
                if isinstance(event, Failed):
                    raise event.error
                if not isinstance(event, PROGRESS):
                    return event
                if on_progress is not None:
                    on_progress(event)
        raise AssertionError("a command has a closing event")

    def fail(self, error: EngineError) -> None:
        """Fail all running commands."""
        for number in list(self._submitted):
            self._take(number, Failed(error))

    def submit_for(self, events: CommandEvents, index: int, command: Command) -> int:
        """Submit a command whose events go to `events`; return its id."""
        number = self._submit(command)
        self._submitted[number] = events, index  # events are delivered later, on this thread
        return number

    def end(self, number: int) -> None:
        """Cancel a command if it is running; its last events still arrive."""
        if number in self._submitted:
            self._cancel(number)

    def drop(self, number: int) -> None:
        """Cancel a command and ignore its further events."""
        if self._submitted.pop(number, None) is not None:
            self._cancel(number)

    def _drain(self) -> None:
        while True:
            with self._lock:
                events = list(self._arrived)
                self._arrived.clear()
                if not events:
                    self._is_woken = False
                    return
            for event in events:
                self._note(event.event)
                self._take(event.command_id, event.event)

    def _note(self, event: Event) -> None:
        self.model = model_after(event, self.model)
        if isinstance(event, Failed) and event.is_model_lost and self.on_loss is not None:
            self.on_loss(event.error)

    def _take(self, number: int, event: Event) -> None:
        if (reader := self._submitted.get(number)) is None:
            return
        events, index = reader
        is_last = not isinstance(event, PROGRESS)
        if is_last:
            del self._submitted[number]
        if not events.put(index, event, is_last=is_last):
            self.drop(number)


class CommandEvents(AsyncIterator[tuple[int, Event]]):
    """The events of some commands, each with its command's index, until all have finished.

    Leaving the `async with` block cancels the running commands. Failures are events, too. Unread
    texts are joined.
    """

    def __init__(self, async_engine: AsyncEngine, commands: Sequence[Command]) -> None:
        self._engine, self._commands = async_engine, commands
        self._numbers: list[int] = []
        self._n_running = len(commands)
        self._waiting: deque[tuple[int, Event]] = deque()
        self._came = asyncio.Event()

    async def __aenter__(self) -> Self:
        for index, command in enumerate(self._commands):
            self._numbers.append(self._engine.submit_for(self, index, command))
        return self

    async def __aexit__(self, *_: object) -> None:
        for number in self._numbers:
            self._engine.drop(number)

    async def __anext__(self) -> tuple[int, Event]:
        while not self._waiting:
            if not self._n_running:
                raise StopAsyncIteration
            self._came.clear()
            await self._came.wait()
        return self._waiting.popleft()

    def end(self, index: int | None = None) -> None:
        """Cancel one command or all; their last events still arrive."""
        for number in self._numbers if index is None else [self._numbers[index]]:
            self._engine.end(number)

    def put(self, index: int, event: Event, *, is_last: bool) -> bool:
        """Add an event; if too many are unread, fail the command and return False."""
        is_too_much = not is_last and len(self._waiting) >= MAX_UNREAD
        if is_too_much:
            event = Failed(Refusal(408, "The client did not read the answer."))
        self._n_running -= is_last or is_too_much
        if self._waiting and (both := _together(self._waiting[-1], (index, event))):
            self._waiting[-1] = both
        else:
            self._waiting.append((index, event))
        self._came.set()
        return not is_too_much


def _together(one: tuple[int, Event], other: tuple[int, Event]) -> tuple[int, Event] | None:
    """Join two texts of one answer; return None for other events."""
    (index, first), (other_index, second) = one, other
    if index != other_index or not isinstance(first, TokenText):
        return None
    if not isinstance(second, TokenText) or first.part != second.part:
        return None
    if len(first.ids) >= MAX_TOGETHER:
        return None
    return index, join_texts((first, second))


PATIENCE_S = 0.25  # timeout in seconds for the engine, which replies between two steps


class CacheGauge:
    """KV cache usage, with at most one pending request to the engine.

    While the engine is busy with a long step or a load, the previous values are reported.
    """

    def __init__(self, async_engine: AsyncEngine) -> None:
        self._engine = async_engine
        self._asking: asyncio.Task[None] | None = None
        self._latest: CacheCounted | None = None

    async def read(self) -> CacheCounted | None:
        """Return the cache usage; None if it is unknown or no model is loaded."""
        if self._engine.model is None:
            self._latest = None
            return None
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        await asyncio.wait((self._asking,), timeout=PATIENCE_S)
        return self._latest

    async def _ask(self) -> None:
        try:
            counted = await self._engine.run(CountCache())
        except EngineError:  # e.g. a remote model
            self._latest = None
            return
        self._latest = counted if isinstance(counted, CacheCounted) else None
