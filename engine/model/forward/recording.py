"""The recording of a token's operations, which a backend may replay for later tokens.

Code that depends on Python values that change from token to token calls `refuse_replay`.
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
        result: result, in memory that each replay overwrites; valid after the first replay.
        is_whole: whether there are no host steps between kernels, so that any thread may replay it.
    """

    result: T
    is_whole = True

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def replay(self) -> None:
        """Run the computation again on torch's current stream."""
        for step in self._steps:
            step()


class Replayable:
    """Base of recordings; `refusal` is the reason why a recording cannot be replayed, or ""."""

    refusal = ""


class _Current(threading.local):
    recording: Replayable | None = None


_current = _Current()


def current_recording() -> Replayable | None:
    """Return this thread's recording, or None."""
    return _current.recording


@contextmanager
def recording_to(recording: Replayable | None) -> Iterator[None]:
    """Set this thread's recording inside the context; None pauses recording."""
    before, _current.recording = _current.recording, recording
    try:
        yield
    finally:
        _current.recording = before


def refuse_replay(reason: str) -> None:
    """Mark this thread's recording, if any, as not replayable."""
    if (recording := _current.recording) is not None:
        recording.refusal = recording.refusal or reason
