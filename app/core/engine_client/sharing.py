"""Sharing of the window's engine with the server, which has commands and events of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

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
)

if TYPE_CHECKING:
    from engine import Command, EngineHost, ModelLoaded

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
        self._n_submitting = 0
        self._ended_early: set[int] = set()  # before their number was known
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
        """Hand a command to the engine, and return its number.

        Raises:
            EngineError: there is no engine.
        """
        with self._lock:
            host = self._host
            if host is None:
                raise EngineError("No model is loaded.", "Open one in Tandem.")
            self._n_submitting += 1
            if not isinstance(command, CountCache):
                self.used_at = time.monotonic()
        number = host.submit(command)
        with self._lock:
            self._n_submitting -= 1
            if number not in self._ended_early:
                self._running.add(number)
            if not self._n_submitting:
                self._ended_early.clear()
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
            is_own = event.generation in self._running
            if not is_shown and not isinstance(event.event, OF_ANSWERS):
                is_use = not isinstance(event.event, CacheCounted)
                self._note_end(event.generation, is_own=is_own, is_use=is_use)
        if self.on_event is not None:
            self.on_event(event)
        is_loss = isinstance(event.event, Failed) and event.event.is_model_lost
        return is_own and not is_loss and not is_shown

    def _note_end(self, number: int, *, is_own: bool, is_use: bool) -> None:
        if is_own:
            self._running.discard(number)
            self.used_at = time.monotonic() if is_use else self.used_at
        elif self._n_submitting:
            self._ended_early.add(number)
