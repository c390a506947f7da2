"""The asyncio side of an engine: commands go out, and their events come in as they are awaited."""

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
"""Events that do not end the command that they answer."""

MAX_UNREAD = 4096
"""Number of events that may wait for a reader; an answer that nobody reads fails there."""

MAX_TOGETHER = 32
"""Largest number of tokens of texts that are put together while they wait."""


class AsyncEngine:
    """The way from one asyncio loop to an engine that others may use as well.

    All but `on_event` belongs to the loop's thread.

    Args:
        submit: hands a command to the engine and returns its number, as `EngineHost.submit`.
        cancel: asks the command with a number to end, as `EngineHost.cancel`.

    Attributes:
        model: the loaded model; None if there is none.
        on_loss: called when the engine has lost its model, with the error.
    """

    def __init__(self, submit: Callable[[Command], int], cancel: Callable[[int], None]) -> None:
        self.model: ModelLoaded | None = None
        self.on_loss: Callable[[EngineError], None] | None = None
        self._submit, self._cancel = submit, cancel
        self._submitted: dict[int, tuple[CommandEvents, int]] = {}  # by number of the command
        self._arrived: deque[HostEvent] = deque()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_woken = False

    @property
    def is_idle(self) -> bool:
        """Whether no command of it is under way."""
        return not self._submitted

    def open(self) -> None:
        """Take events from now on to the running loop; those that came before come first."""
        with self._lock:
            self._loop = asyncio.get_running_loop()
            self._is_woken = True
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        """Drop all further events, and fail what still waits for some."""
        with self._lock:
            self._loop, self._is_woken = None, False
            self._arrived.clear()
        self.fail(Refusal(503, "The server has been stopped."))

    def on_event(self, event: HostEvent) -> None:
        """Take an event of the engine, on any thread; the loop is woken once for many."""
        with self._lock:
            self._arrived.append(event)
            if self._is_woken or self._loop is None:
                return
            self._is_woken = True
            with suppress(RuntimeError):  # the loop has just been closed
                self._loop.call_soon_threadsafe(self._drain)

    def events_of(self, commands: Sequence[Command]) -> CommandEvents:
        """Return the events of commands, which are submitted when it is entered."""
        return CommandEvents(self, commands)

    async def run(
        self, command: Command, on_progress: Callable[[Event], None] | None = None
    ) -> Event:
        """Submit a command and return its closing event.

        Args:
            on_progress: called with the events before it.

        Raises:
            EngineError: the command has failed.
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
        """Fail whatever waits for events, as where the engine was given up."""
        for number in list(self._submitted):
            self._take(number, Failed(error))

    def submit_for(self, events: CommandEvents, index: int, command: Command) -> int:
        """Submit a command for a reader of its events and return its number."""
        number = self._submit(command)
        self._submitted[number] = events, index  # its events are taken later, on this thread
        return number

    def end(self, number: int) -> None:
        """Ask a command to end, if it has not; its last events still come."""
        if number in self._submitted:
            self._cancel(number)

    def drop(self, number: int) -> None:
        """End a command whose events nobody wants any more."""
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
        """Remember what an event says about the model, whoever has sent the command."""
        self.model = model_after(event, self.model)
        if isinstance(event, Failed) and event.is_model_lost and self.on_loss is not None:
            self.on_loss(event.error)

    def _take(self, number: int, event: Event) -> None:
        if (found := self._submitted.get(number)) is None:
            return
        events, index = found
        is_last = not isinstance(event, PROGRESS)
        if is_last:
            del self._submitted[number]
        if not events.put(index, event, is_last=is_last):
            self.drop(number)


class CommandEvents(AsyncIterator[tuple[int, Event]]):
    """The events of some commands, each with its command's index; it ends when all have ended.

    Leaving its `async with` block cancels what has not ended. A failure is an event like others.
    Texts that wait for the reader are put together.
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
        """End one of the commands, or all, where they are; their last events still come."""
        for number in self._numbers if index is None else [self._numbers[index]]:
            self._engine.end(number)

    def put(self, index: int, event: Event, *, is_last: bool) -> bool:
        """Add an event; return False if too many are unread, which ends the command."""
        is_too_much = not is_last and len(self._waiting) >= MAX_UNREAD
        if is_too_much:
            event = Failed(Refusal(408, "The answer was not read."))
        self._n_running -= is_last or is_too_much
        if self._waiting and (both := _together(self._waiting[-1], (index, event))):
            self._waiting[-1] = both
        else:
            self._waiting.append((index, event))
        self._came.set()
        return not is_too_much


def _together(one: tuple[int, Event], other: tuple[int, Event]) -> tuple[int, Event] | None:
    """Return two texts of an answer as one; None for other events."""
    (index, first), (other_index, second) = one, other
    if index != other_index or not isinstance(first, TokenText):
        return None
    if not isinstance(second, TokenText) or first.part != second.part:
        return None
    if len(first.ids) >= MAX_TOGETHER:
        return None
    return index, join_texts((first, second))


PATIENCE_S = 0.25
"""Longest wait for the engine, in seconds, which answers between two passes."""


class CacheGauge:
    """The use of the KV cache, asked of the engine at most once at a time.

    An engine that is busy with a long pass, or loads a model, answers late: until then the last
    numbers hold.
    """

    def __init__(self, async_engine: AsyncEngine) -> None:
        self._engine = async_engine
        self._asking: asyncio.Task[None] | None = None
        self._latest: CacheCounted | None = None

    async def read(self) -> CacheCounted | None:
        """Return the use of the cache; None without a model, or where the engine cannot tell."""
        if self._engine.model is None:
            self._latest = None
            return None
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        await asyncio.wait((self._asking,), timeout=PATIENCE_S)
        return self._latest

    async def _ask(self) -> None:
        try:
            found = await self._engine.run(CountCache())
        except EngineError:  # such as one of a model that another machine computes
            self._latest = None
            return
        self._latest = found if isinstance(found, CacheCounted) else None
