"""Suspends garbage collection while it could free device memory at a bad moment.

Freeing a graph or device memory may wait for all work on that device. Between launches of kernels
that wait for each other on several devices, such a wait would deadlock; during a capture, it would
make the capture fail.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.RLock()
"""Lock held during a collection; reentrant, because an object's finalizer may start another."""


class _Holding:
    count = 0
    was_enabled = False


@contextmanager
def hold_garbage() -> Iterator[None]:
    """Suspend garbage collection on all threads; first wait for a running `collect_garbage`."""
    with _lock:
        if _Holding.count == 0:
            _Holding.was_enabled = gc.isenabled()
            gc.disable()
        _Holding.count += 1
    try:
        yield
    finally:
        with _lock:
            _Holding.count -= 1
            if _Holding.count == 0 and _Holding.was_enabled:
                gc.enable()


def collect_garbage(generation: int = 2) -> bool:
    """Collect garbage up to a generation (see `gc.collect`); return False while suspended."""
    if not _lock.acquire(blocking=False):
        return False
    try:
        if _Holding.count:
            return False
        gc.collect(generation)
        return True
    finally:
        _lock.release()
