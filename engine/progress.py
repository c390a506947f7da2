"""Progress of long-running work: its events, the sinks that receive them, cancellation checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Bytes of the file read so far, over all ranks.

    Attributes:
        doing: what takes time beside that, such as "Compiling kernels: 5 of 40"; "" for nothing.
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
StateSink = Callable[[StateProgress], None]
IsCancelled = Callable[[], bool]


def ignore(_: object) -> None:
    """Drop progress that nobody wants to know about."""


def never() -> bool:
    """Return False: nobody cancels."""
    return False
