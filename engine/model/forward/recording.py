"""Recording of a token's operations: the current recording, and its refusal to be replayed.

A backend may record what one token computes and replay it for later tokens. Code whose result
depends on Python values that change from token to token calls `refuse_replay`.
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
        """Replay the operations and return the logits, in memory of their own.

        Raises:
            LeftAlone: another rank is gone.
        """
        ...


class TokenRecorder(Protocol):
    """Recorder of one token."""

    @property
    def refusal(self) -> str:
        """Reason why the recording cannot be replayed; "" if it can."""
        ...

    def record(self, compute: Callable[[], Tensor | None]) -> Tensor | None:
        """Compute a token and record it."""
        ...

    def recording(self, rank: int, keeps: Sequence[Tensor]) -> TokenRecording | None:
        """Return what was recorded; None if it cannot be replayed.

        Args:
            keeps: memory that the replay needs beside what was allocated during the recording.
        """
        ...

    def run_live(self, last: Callable[[], Tensor | None]) -> Tensor | None:
        """Run the last step of a token, which every replay calls instead of replaying it."""
        ...


class Refusable(Protocol):
    """A recording that can be marked as useless.

    Attributes:
        refusal: reason why it cannot be replayed; "" if it can.
    """

    refusal: str


class _Current(threading.local):
    """Recording of each thread."""

    recording: Refusable | None = None


_current = _Current()


def current_recording() -> Refusable | None:
    """Return the recording of this thread; None if it is not being recorded."""
    return _current.recording


@contextmanager
def recording_to(recording: Refusable | None) -> Iterator[None]:
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
