"""Preparation of an answer on a thread of its own, so that other answers go on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import Any, TypeAlias, TypeVar

from engine.errors import EngineError
from engine.progress import IsCancelled, never

T = TypeVar("T")


class Background:
    """A function that a thread runs for one answer, which waits for it without pages.

    Args:
        act: the function; what it is given returns True once nobody wants the result.
    """

    def __init__(self, act: Callable[[IsCancelled], Any]) -> None:
        self._act = act
        self._is_cancelled = False
        self._result: Any = None
        self._error: BaseException | None = None
        self.is_done = False

    def start(self, on_done: Callable[[], object]) -> None:
        """Start the thread.

        Args:
            on_done: called on it once there is a result or an error.
        """
        thread = threading.Thread(
            target=self.run, args=(on_done,), name="tandem-background", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # "can't start new thread"
            self._error = EngineError(f"No thread can be started: {error}.", "Try again later.")
            self.is_done = True
            on_done()

    def cancel(self) -> None:
        """Ask the function to end; return at once."""
        self._is_cancelled = True

    def result(self) -> Any:
        """Return what the function has returned, or raise what it has raised."""
        if self._error is not None:
            raise self._error
        return self._result

    def run(self, on_done: Callable[[], object] = never) -> None:
        """Run the function; see `start`, which has a thread do so."""
        try:
            self._result = self._act(lambda: self._is_cancelled)
        except BaseException as error:  # noqa: BLE001 raised again by `result`
            self._error = error
        self.is_done = True
        on_done()


Preparing: TypeAlias = Generator[Background, object, T]
"""A step of an answer that waits for a thread, and returns what it has prepared."""


def in_background(act: Callable[[IsCancelled], T]) -> Preparing[T]:
    """Have the scheduler run a function on a thread; return its result once it is there."""
    work = Background(act)
    try:
        yield work
        result: T = work.result()
        return result
    finally:
        work.cancel()
