"""Ends a process that takes too long or too much memory for one answer."""

from __future__ import annotations

import _thread
import subprocess
import threading
import time
from enum import Enum, auto

import psutil

LOOK_S = 0.01
"""Seconds between two looks at the memory of the process."""


class Excess(Enum):
    """Limits that a process can exceed, for which it is killed."""

    TIME = auto()
    MEMORY = auto()


class AnswerWatch:
    """A thread that kills a process if the `with` block takes too long or too much memory.

    A thread rather than timeouts of reads: a process that is stopped does not read either, and
    pipes have no timeouts on Windows. Nobody waits for the thread: without memory for its first
    step it ends unseen, and `threading.Thread.start` would wait for that step for ever. Then the
    process ends by itself, later, see `engine.templates.program`.

    Args:
        seconds: time that the block may take.
        max_bytes: memory that the process may have.

    Attributes:
        excess: why the process was killed, None while it was not; final after the block.
    """

    def __init__(self, process: subprocess.Popen[bytes], seconds: float, max_bytes: int) -> None:
        self.excess: Excess | None = None
        self._process = process
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._is_done = threading.Event()
        self._looking = threading.Lock()

    def __enter__(self) -> AnswerWatch:
        _thread.start_new_thread(self._look, ())
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        with self._looking:  # the thread does nothing more
            pass

    def _look(self) -> None:
        """Look at the process until the block is done; runs on the thread."""
        deadline = time.monotonic() + self._seconds
        while not self._is_done.wait(LOOK_S):
            with self._looking:
                if self._is_done.is_set():
                    return
                if time.monotonic() > deadline:
                    self.excess = Excess.TIME
                elif _memory_of(self._process.pid) > self._max_bytes:
                    self.excess = Excess.MEMORY
                if self.excess:
                    self._process.kill()
                    return


def _memory_of(pid: int) -> int:
    """Return the bytes of memory of a process; 0 if it has ended."""
    try:
        memory = psutil.Process(pid).memory_info()
    except psutil.Error:
        return 0
    return int(getattr(memory, "private", memory.rss))  # "private" is Windows's
