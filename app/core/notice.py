"""Notices, the contents of banners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from app.core.system_keyring import Place
from app.core.translation import tr, translated
from engine import EngineError


@dataclass(frozen=True, slots=True)
class Notice:
    """The contents of a banner.

    Attributes:
        hint: how to fix the problem, or "".
        action: label of the button that calls `on_action`; "" for no button.
        is_news: whether to send a desktop notification while the window is hidden.
        is_of_engine: whether it is about a load or an answer; if so, the next success clears it.
        stays: whether an info notice stays until it is closed.
        on_close: called when it is closed without its action.
        chat: id of the chat that it belongs to; "" for all chats.
        page: name of the page that it belongs to; "" for all pages.
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
        """Return the notice for an engine error, with `more` appended to its hint."""
        hint = f"{translated(error.hint)} {more}".strip()
        return cls(translated(error.message), hint, "error", action, on_action, is_of_engine=True)


def of_page(notice: Notice, page: str) -> Notice:
    """Return a notice that closes with its page, unless its kind is "info"."""
    return notice if notice.kind == "info" else replace(notice, page=page)


def of_chat(notice: Notice, chat: str) -> Notice:
    """Return a notice that closes with its chat, unless its kind is "info"."""
    return notice if notice.kind == "info" or notice.chat else replace(notice, chat=chat)


def secret_notice(place: Place) -> Notice | None:
    """Return a notice for a secret that is not stored in the keyring, otherwise None."""
    if place == "keyring":
        return None
    if place == "file":
        return Notice(
            tr("There is no keyring, so the key is stored in a file that only you can read.")
        )
    return Notice(
        tr("The key cannot be saved, so it is used only until Tandem closes."), kind="warning"
    )
