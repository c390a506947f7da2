"""A sentence for a person, with at most one thing to do about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from engine import EngineError


@dataclass(frozen=True, slots=True)
class Notice:
    """What a banner shows.

    Attributes:
        hint: what to do about it, in words; may be empty.
        action: the text of a button that calls `on_action`; no button when empty.
    """

    text: str
    hint: str = ""
    kind: Literal["info", "warning", "error"] = "info"
    action: str = ""
    on_action: Callable[[], None] | None = None

    @classmethod
    def of(cls, error: EngineError) -> Notice:
        return cls(error.message, error.hint, "error")
