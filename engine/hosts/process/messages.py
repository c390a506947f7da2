"""The messages between the window's process and the engine's."""

from __future__ import annotations

from dataclasses import dataclass

from engine.events import Command, HostEvent
from engine.hosts.process.codec import Codec


@dataclass(frozen=True, slots=True)
class SubmitMessage:
    """A command for the engine, and the number that its events shall carry."""

    generation: int
    command: Command


@dataclass(frozen=True, slots=True)
class CancelMessage:
    """The wish that a command ends, or all that were sent before.

    Attributes:
        generation: number of the command; None for all.
    """

    generation: int | None = None


@dataclass(frozen=True, slots=True)
class CloseMessage:
    """The wish that the engine frees its model and ends its process."""


@dataclass(frozen=True, slots=True)
class EventsMessage:
    """Events of the engine, in order."""

    events: tuple[HostEvent, ...]


@dataclass(frozen=True, slots=True)
class BeatMessage:
    """A sign that the process runs, whatever its engine is busy with."""


ToEngine = SubmitMessage | CancelMessage | CloseMessage
FromEngine = EventsMessage | BeatMessage

TO_ENGINE: Codec[ToEngine] = Codec(ToEngine)
"""Codec of what the window sends."""

FROM_ENGINE: Codec[FromEngine] = Codec(FromEngine)
"""Codec of what the engine sends."""
