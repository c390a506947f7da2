"""Termination signals: Ctrl+C, a closed terminal, `kill`.

Imports little, so that it can be the first import of the program.
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
"""Names of the signals, where the system has them."""


class Interruption:
    """Turns termination signals into KeyboardInterrupt, so that a command closes files and models.

    Attributes:
        status: exit status after an interruption.
        is_set: whether a signal was received.
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
    """Import modules inside the `with` block: signals kill the process, garbage is not collected.

    A signal raises no exception, since half-imported modules, compiled ones above all, swallow
    exceptions or turn them into others. Imports leave hardly any garbage, but collecting it takes a
    sixth of their time; imported objects are frozen, so later collections skip them too.
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
    """Exit immediately on any signal from now on; return the old handlers for `restore`."""
    return handle(_end)


def handle(handler: Handler) -> dict[int, Handler]:
    """Install `handler` for all signals; return the old handlers for `restore`.

    An ignored signal (as with `nohup`) stays ignored. Does nothing outside the main thread.
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
