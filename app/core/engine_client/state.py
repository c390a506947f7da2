"""What the engine does, and what is asked of it beside the chats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class EngineState(Enum):
    """The engine's present activity; `EngineClient.model` is the model it holds.

    LOADING includes a change of the split, in the middle of an answer or not, and a search for the
    best split.
    """

    EMPTY = "empty"
    LOADING = "loading"
    READY = "ready"
    GENERATING = "generating"
    CLOSED = "closed"


@dataclass(slots=True)
class AsideAnswer:
    """Something that is written beside the chats.

    Attributes:
        number: number of its command.
        then: called once it has ended.
        reason: reason why it has ended, as in `Finished`, or "failed".
        is_ending: whether it was cancelled, which must not be done to what follows it.
    """

    number: int
    then: Callable[[AsideAnswer], None]
    text: str = ""
    reason: str = ""
    is_ending: bool = False
