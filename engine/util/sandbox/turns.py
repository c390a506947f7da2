"""Turns of threads at work of which only so much may go on at once."""

from __future__ import annotations

import threading
from collections import deque

from engine.util.progress import IsCancelled

POLL_S = 0.05
"""Seconds between two looks of a waiting thread at what nobody tells it."""


class FairSemaphore:
    """A semaphore that threads get in order of arrival, and can stop waiting for.

    Args:
        n: number of threads that may hold it at once.
    """

    def __init__(self, n: int) -> None:
        self._n_free = n
        self._line: deque[object] = deque()
        self._changed = threading.Condition()

    def acquire(self, is_cancelled: IsCancelled) -> bool:
        """Wait for a turn; return False if `is_cancelled` returned True first."""
        me = object()
        with self._changed:
            self._line.append(me)
            try:
                while not self._n_free or self._line[0] is not me:
                    if is_cancelled():
                        return False
                    self._changed.wait(POLL_S)
                self._n_free -= 1
                return True
            finally:
                self._line.remove(me)
                self._changed.notify_all()

    def release(self) -> None:
        """Give the turn back."""
        with self._changed:
            self._n_free += 1
            self._changed.notify_all()
