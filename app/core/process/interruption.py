"""Termination signals: Ctrl+C, a closed terminal, `kill`.

This module imports little, so that the program can import it first.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

Handler = Callable[[int, FrameType | None], object] | int | None

NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
"""Names of the signals; not every system has all of them."""


class Interruption:
    """Turns termination signals into KeyboardInterrupt, so that commands close files and models.

    Attributes:
        status: exit status after an interruption.
        is_set: whether a signal has been received.
    """

    def __init__(self) -> None:
        self.status = 128 + signal.SIGINT
        self.is_set = False

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise `KeyboardInterrupt` for each signal inside the `with` block."""
        previous = handle(self._on_signal)
        try:
            yield
        finally:
            restore(previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.status, self.is_set = 128 + number, True
        raise KeyboardInterrupt


@contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection and let signals kill the process, for imports in the `with` block.

    Signals raise no exceptions, since half-imported modules, especially compiled ones, swallow
    exceptions or turn them into others. Imports create hardly any garbage, yet collections take a
    sixth of their time. Imported objects are frozen, so later collections skip them, too.
    """
    previous, was_collecting = end_at_once(), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_collecting:
            gc.enable()
        restore(previous)


def end_at_once() -> dict[int, Handler]:
    """Make the process exit immediately on any signal; return the old handlers for `restore`."""
    return handle(_end)


def handle(handler: Handler) -> dict[int, Handler]:
    """Install `handler` for all signals; return the old handlers for `restore`.

    Ignored signals (as with `nohup`) stay ignored. Outside the main thread, this does nothing.
    """
    former: dict[int, Handler] = {}
    for number in (getattr(signal, name) for name in NAMES if hasattr(signal, name)):
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            try:
                former[number] = signal.signal(number, handler)
            except ValueError:
                return former
    return former


def restore(handlers: dict[int, Handler]) -> None:
    """Restore the handlers that `handle` replaced."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(128 + number)
