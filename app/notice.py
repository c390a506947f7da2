"""Notices: sentences for the banner, each with at most one button."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from engine import EngineError


@dataclass(frozen=True, slots=True)
class Notice:
    """The contents of a banner.

    Attributes:
        hint: what to do about it; may be empty.
        action: text of a button that calls `on_action`; no button if empty.
    """

    text: str
    hint: str = ""
    kind: Literal["info", "warning", "error"] = "info"
    action: str = ""
    on_action: Callable[[], None] | None = None

    @classmethod
    def of(cls, error: EngineError) -> Notice:
        return cls(error.message, error.hint, "error")
