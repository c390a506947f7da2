"""Rows that GPUs multiply by kernels of few rows, in the pass that a thread computes.

These kernels give a row the bits that it has alone. A pass that checks guesses uses them for all of
its rows, as an answer shall be the one without guesses. Passes over as many sequences do not: for
more than `SMALL_BATCH` rows others take less time, and round otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from engine.model.forward.batch import MOST_AT_ONCE
from engine.model.forward.batch_sizes import SMALL_BATCH

if TYPE_CHECKING:
    from engine.model.forward.batch import Batch

_thread = threading.local()


@contextmanager
def computing(batch: Batch) -> Iterator[None]:
    """Enter the computation of a batch on this thread."""
    before = is_checking()
    _thread.is_checking = batch.checks_guesses
    try:
        yield
    finally:
        _thread.is_checking = before


def is_checking() -> bool:
    """Return whether this thread computes a pass in which each row has the bits it has alone."""
    return getattr(_thread, "is_checking", False)


def most_few_rows() -> int:
    """Return the largest number of rows that this thread's pass multiplies as few rows."""
    return MOST_AT_ONCE if is_checking() else SMALL_BATCH
