"""Recording of a token's operations: who is being recorded, and what forbids a replay.

A backend may record what one token computes and replay it for later tokens. Whoever computes
something that would come out differently for the next token calls `refuse_replay`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class TokenRecording(Protocol):
    """One token's operations, recorded on a rank's own thread."""

    def run(self) -> Tensor | None:
        """Do them again and return the logits, in memory of their own.

        Raises:
            LeftAlone: another rank is gone.
        """
        ...


class TokenRecorder(Protocol):
    """Recorder of one token."""

    @property
    def refusal(self) -> str:
        """Why the recording cannot be replayed; "" if it can."""
        ...

    def record(self, compute: Callable[[], Tensor | None]) -> Tensor | None:
        """Compute a token and record it."""
        ...

    def recording(self, rank: int, keeps: Sequence[Tensor]) -> TokenRecording | None:
        """Return what was recorded; None if it cannot be replayed.

        Args:
            keeps: memory that the replay needs beside what was allocated meanwhile.
        """
        ...

    def live(self, last: Callable[[], Tensor | None]) -> Tensor | None:
        """Do as the last step what is not recorded but called for each token."""
        ...


class Refusable(Protocol):
    """A recording that can be marked as useless.

    Attributes:
        refusal: why it cannot be replayed; "" if it can.
    """

    refusal: str


class _Current(threading.local):
    recording: Refusable | None = None


_current = _Current()


def current_recording() -> Refusable | None:
    """Return the recording of this thread; None if it is not being recorded."""
    return _current.recording


@contextmanager
def recording_to(recording: Refusable | None) -> Iterator[None]:
    """Make a recording that of this thread for a while; None pauses it."""
    before, _current.recording = _current.recording, recording
    try:
        yield
    finally:
        _current.recording = before


def refuse_replay(reason: str) -> None:
    """Mark what is being recorded as different for other tokens."""
    if (recording := _current.recording) is not None:
        recording.refusal = recording.refusal or reason
