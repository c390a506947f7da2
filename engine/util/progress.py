"""Progress of long-running work: its events, the sinks that receive them, cancellation checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Bytes of the file read so far, over all ranks.

    Attributes:
        doing: other work that takes time, such as "Compiling kernels: 5 of 40"; "" for none.
    """

    done_bytes: int
    total_bytes: int
    doing: str = ""


@dataclass(frozen=True, slots=True)
class StateProgress:
    """Bytes of a conversation's state written or read so far."""

    done_bytes: int
    total_bytes: int


ProgressSink = Callable[[LoadProgress], None]
"""A receiver of the progress of loading."""

StateSink = Callable[[StateProgress], None]
"""A receiver of the progress of saving or loading a state."""

IsCancelled = Callable[[], bool]
"""A check whether somebody wants the work to end."""


def ignore(_: object) -> None:
    """Drop progress that nobody wants to see."""


def never() -> bool:
    """Return False: nobody cancels."""
    return False
