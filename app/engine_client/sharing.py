"""The same engine for somebody beside the window: commands from other threads, and their events."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine import (
    ContextShifted,
    EngineError,
    Failed,
    PrefillProgress,
    TokenText,
    TokenTimes,
    ToolCallBegun,
    ToolCallText,
)

if TYPE_CHECKING:
    from engine import Command, EngineHost, HostEvent

OF_ANSWERS = (
    PrefillProgress, ContextShifted, TokenText, TokenTimes, ToolCallBegun, ToolCallText,
)  # fmt: skip
"""Events before the end of an answer."""


class EngineSharing:
    """Commands of somebody beside the window, whose events the window does not get.

    Any thread may call it.

    Attributes:
        on_event: called with every event of the engine, the window's included, on the engine's
            thread; it must return quickly. None for nobody.
    """

    def __init__(self) -> None:
        self.on_event: Callable[[HostEvent], None] | None = None
        self._host: EngineHost | None = None
        self._running: set[int] = set()
        self._lock = threading.Lock()

    @property
    def n_running(self) -> int:
        """Number of commands that have not ended."""
        return len(self._running)

    def use(self, host: EngineHost | None) -> None:
        """Note which engine there is from now on; commands of an earlier one have ended."""
        with self._lock:
            self._host = host
            self._running.clear()

    def submit(self, command: Command) -> int:
        """Hand a command to the engine, and return its number.

        Raises:
            EngineError: there is no engine.
        """
        with self._lock:
            if self._host is None:
                raise EngineError("No model is loaded.", "Open one in Tandem.")
            number = self._host.submit(command)
            self._running.add(number)
        return number

    def cancel(self, number: int) -> None:
        """Ask a command to end, if it has not."""
        with self._lock:
            if self._host is not None and number in self._running:
                self._host.cancel(number)

    def cancel_all(self) -> None:
        """Ask all commands to end."""
        with self._lock:
            for number in self._running:
                assert self._host is not None, "commands run on an engine"
                self._host.cancel(number)

    def take(self, event: HostEvent) -> bool:
        """Take an event of the engine; return whether it is of no interest to the window."""
        with self._lock:
            is_own = event.generation in self._running
            if is_own and not isinstance(event.event, OF_ANSWERS):
                self._running.discard(event.generation)
        if self.on_event is not None:
            self.on_event(event)
        is_loss = isinstance(event.event, Failed) and event.event.is_model_lost
        return is_own and not is_loss
