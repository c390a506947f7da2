"""Whom long work tells how far it is, and whom it asks whether to stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.events import LoadProgress, StateProgress

ProgressSink = Callable[["LoadProgress"], None]
StateSink = Callable[["StateProgress"], None]
IsCancelled = Callable[[], bool]


def ignore(_: object) -> None:
    """Told of progress when nobody wants to know."""


def never() -> bool:
    """Asked when nobody will cancel."""
    return False
