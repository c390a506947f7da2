"""The signals that end a program: Ctrl+C, a closed terminal, `kill`.

Imports next to nothing, so that it can be the first thing a program does.
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
"""Names of all such signals; no system has all of them."""


class Interruption:
    """The ending of a command by a signal: an exception first, so that files and models are closed.

    Attributes:
        status: exit status of the command, should it end by an interruption.
        is_set: whether a signal came.
    """

    def __init__(self) -> None:
        self.status = 128 + signal.SIGINT
        self.is_set = False

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise `KeyboardInterrupt` for each signal that comes inside the `with` block."""
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
    """Import modules inside the `with` block: signals end the process, garbage is not collected.

    A signal raises no exception, because modules that are half imported, compiled ones above all,
    swallow exceptions or turn them into others. Imports leave hardly any garbage, yet looking for
    it takes a sixth of their time; what is imported lives as long as the process, so collections
    skip it later as well.
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
    """End the process at any such signal from now on; return the handlers for `restore`."""
    return handle(_end)


def handle(handler: Handler) -> dict[int, Handler]:
    """Have all such signals handled by `handler`; return the former handlers for `restore`.

    A signal that the caller ignores, as `nohup` does, stays ignored. Threads other than the main
    one, which may not choose handlers, change nothing.
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
    """Handle signals as before."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(128 + number)
