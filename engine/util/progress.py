"""Progress of long-running work: events, sinks, cancellation checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Bytes read from the file so far, over all ranks, and other slow work as text."""

    done_bytes: int
    total_bytes: int
    doing: str = ""


@dataclass(frozen=True, slots=True)
class StateProgress:
    """Bytes of a conversation's state written or read so far."""

    done_bytes: int
    total_bytes: int


ProgressSink = Callable[[LoadProgress], None]
StateSink = Callable[[StateProgress], None]

IsCancelled = Callable[[], bool]
"""A function that returns whether the work has been cancelled."""


def ignore(_: object) -> None:
    """Discard progress."""


def never() -> bool:
    """Return False, for work that is never cancelled."""
    return False
