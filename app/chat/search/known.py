"""The chats that the index knows, as the window's start reads them: at once, and never waiting."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from app.chat.listing.summary import ChatSummary

log = logging.getLogger(__name__)

VERSION: Final = 1
"""Version of the index's tables; a file of another one is made again."""


@dataclass(frozen=True, slots=True)
class IndexedChat:
    """A chat in the index.

    Attributes:
        stamps: the stamps of its files, as `stamps_key` has them.
    """

    summary: ChatSummary
    stamps: str


def peek_chats(path: Path) -> dict[str, IndexedChat]:
    """Return the chats in an index by their ids, at once; none if that is not possible."""
    if not path.is_file():
        return {}
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", 0.0, uri=True)) as file:
            (version,) = file.execute("PRAGMA user_version").fetchone()
            return read_chats(file) if version // 2 == VERSION else {}
    except (sqlite3.Error, OSError) as error:
        log.info("the index of the chats cannot be read: %s", error)
        return {}


def read_chats(connection: sqlite3.Connection) -> dict[str, IndexedChat]:
    """Return the chats in an open index by their ids.

    Raises:
        sqlite3.Error: the file is damaged.
    """
    rows = connection.execute("SELECT id, stamps, title, updated FROM chats")
    return {
        chat_id: IndexedChat(ChatSummary(chat_id, title, updated), stamps)
        for chat_id, stamps, title, updated in rows
    }
