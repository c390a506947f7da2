"""Preparation of an answer on a thread of its own, so that other answers go on meanwhile."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, TypeAlias, TypeVar

from engine.errors import EngineError
from engine.util.progress import IsCancelled, never

EXIT_S = 4.0
"""Longest time that the program's end waits for threads, in seconds."""

T = TypeVar("T")

_threads: dict[threading.Thread, Background] = {}
"""What runs now."""


class Background:
    """A function that a thread runs for one answer or question, which waits for its result.

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

        def run() -> None:
            self.run(on_done)
            del _threads[thread]

        thread = threading.Thread(target=run, name="tandem-background", daemon=True)
        _threads[thread] = self
        try:
            thread.start()
        except RuntimeError as error:  # "can't start new thread"
            del _threads[thread]
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


@atexit.register
def end_threads() -> None:
    """End what runs: a program whose thread compiles a grammar at its end would crash."""
    end = time.monotonic() + EXIT_S
    running = dict(_threads)
    for background in running.values():
        background.cancel()
    for thread in running:
        thread.join(max(0.0, end - time.monotonic()))
