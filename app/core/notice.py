"""Notices: sentences for the banner, each with at most one button."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from app.core.engine_sentences import translated
from engine import EngineError


@dataclass(frozen=True, slots=True)
class Notice:
    """The contents of a banner.

    Attributes:
        hint: what to do about it; may be empty.
        action: text of a button that calls `on_action`; no button if empty.
        is_news: whether people wait for it, so that the desktop may tell it while the window is
            hidden.
        is_of_engine: whether it is about a load or an answer, of which the next one may succeed.
        stays: whether mere information stays until somebody closes it.
        on_close: called when somebody closes it without its action.
        chat: id of the chat whose answer or draft it is about; empty for what concerns all.
        page: name of the page in place of the chat that it is about; empty for what concerns all.
    """

    text: str
    hint: str = ""
    kind: Literal["info", "warning", "error"] = "info"
    action: str = ""
    on_action: Callable[[], None] | None = None
    is_of_engine: bool = False
    is_news: bool = False
    stays: bool = False
    on_close: Callable[[], None] | None = None
    chat: str = ""
    page: str = ""

    @classmethod
    def of(
        cls,
        error: EngineError,
        more: str = "",
        action: str = "",
        on_action: Callable[[], None] | None = None,
    ) -> Notice:
        """Return the notice of an error of the engine, with a sentence behind its hint."""
        hint = f"{translated(error.hint)} {more}".strip()
        return cls(translated(error.message), hint, "error", action, on_action, is_of_engine=True)


def of_page(notice: Notice, page: str) -> Notice:
    """Return a notice that goes when a page is left, unless it is mere information."""
    return notice if notice.kind == "info" else replace(notice, page=page)


def of_chat(notice: Notice, chat: str) -> Notice:
    """Return a notice that goes when a chat is left, unless it is mere information."""
    return notice if notice.kind == "info" or notice.chat else replace(notice, chat=chat)
