"""Recording of a token's operations: the current recording, and its refusal to be replayed.

A backend may record what one token computes and replay it for later tokens. Code whose result
depends on Python values that change from token to token calls `refuse_replay`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Captured(Generic[T]):
    """A captured computation, which can be replayed any number of times.

    Attributes:
        result: result of the computation, in memory that each replay writes anew; valid after the
            first replay.
        is_whole: whether the host has no steps between kernels, so that any thread may replay it.
    """

    result: T
    is_whole = True

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def replay(self) -> None:
        """Compute it again, on torch's current stream."""
        for step in self._steps:
            step()


class Replayable:
    """What a recording of one token consists of, as code that is recorded sees it.

    Attributes:
        refusal: reason why it cannot be replayed; "" if it can.
    """

    refusal = ""


class _Current(threading.local):
    """Recording of each thread."""

    recording: Replayable | None = None


_current = _Current()


def current_recording() -> Replayable | None:
    """Return the recording of this thread; None if it is not being recorded."""
    return _current.recording


@contextmanager
def recording_to(recording: Replayable | None) -> Iterator[None]:
    """Make `recording` this thread's recording inside the context; None pauses recording."""
    before, _current.recording = _current.recording, recording
    try:
        yield
    finally:
        _current.recording = before


def refuse_replay(reason: str) -> None:
    """Mark this thread's recording, if there is one, as useless for other tokens."""
    if (recording := _current.recording) is not None:
        recording.refusal = recording.refusal or reason
