"""A chat as it lies on the disk: its file and journal together, and stamps that change with them.

Any thread may read; `ChatStore` writes.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from app.chat import journal
from app.chat.chat_file import content_hash, parse_chat
from app.chat.conversation import Conversation, NewerChat
from app.chat.journal import changed, read_journal
from app.core.engine_sentences import reason_of
from app.core.translation import tr
from engine import read_file

MOST_BYTES: Final = 256 << 20
"""Size in bytes of the largest file and the longest journal that are read."""

MOST_TRIES: Final = 3
"""Number of times that a chat is read, while another window writes it."""

SAFE_ID: Final = re.compile(r"[0-9A-Za-z_-]{1,64}")
"""Ids that can be names of files on every system."""

Stamp = tuple[int, int, int]
"""Modification time, inode and size of a file: one of them changes with its content."""

Stamps = tuple[Stamp | None, Stamp | None]
"""Stamps of a chat's file and of its journal; None for one that there is not."""


@dataclass(frozen=True, slots=True)
class StoredChat:
    """A chat as it was read.

    Attributes:
        stamps: stamps from before it was read.
        owner: mark of the process that wrote the journal; "" without one.
    """

    chat: Conversation
    stamps: Stamps
    owner: str = ""


def read_stored(path: Path) -> StoredChat:
    """Return the chat of a file, with the changes of its journal.

    Raises:
        OSError, ValueError, RecursionError: it cannot be read, or holds no whole chat.
    """
    for _ in range(MOST_TRIES - 1):
        with suppress(FileNotFoundError):  # a journal that another window has just merged
            stored = _read_once(path)
            if stamps_of(path) == stored.stamps:
                return stored
    return _read_once(path)


def files_of(folder: Path, suffix: str) -> list[Path]:
    """Return the files with a suffix, by name; none if the folder cannot be read."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == suffix)
    except OSError:
        return []


def stamps_of(path: Path) -> Stamps:
    """Return the stamps of a chat's file and its journal.

    Raises:
        OSError: one of them cannot be looked at.
    """
    return _stamp(path), _stamp(path.with_suffix(journal.SUFFIX))


def stamps_or_none(path: Path) -> Stamps:
    """Return the stamps of a chat, or none where the system refuses them: reading says why."""
    try:
        return stamps_of(path)
    except OSError:
        return None, None


def stamps_key(stamps: Stamps) -> str:
    """Return stamps as a text that can be compared."""
    return json.dumps(stamps)


def why_unreadable(error: Exception) -> str:
    """Return why a chat cannot be read, as the end of a sentence."""
    if isinstance(error, OSError):
        return reason_of(error)
    return str(error) if isinstance(error, NewerChat) else tr("it holds no whole chat")


def _read_once(path: Path) -> StoredChat:
    stamps = stamps_of(path)
    data = read_file(path, MOST_BYTES)
    stored = StoredChat(parse_chat(data), stamps)
    if stored.chat.id != path.stem or not SAFE_ID.fullmatch(path.stem):
        raise ValueError("the id is not the file's name")
    return stored if stamps[1] is None else _with_journal(stored, path, data)


def _with_journal(stored: StoredChat, path: Path, data: bytes) -> StoredChat:
    """Return a chat with the changes of its journal, if they start from its file's content."""
    chat, beside = stored.chat, path.with_suffix(journal.SUFFIX)
    started, changes = read_journal(read_file(beside, MOST_BYTES))
    if started is None or started.base != content_hash(data):
        return stored
    with suppress(ValueError):
        for change in changes:
            chat = changed(chat, change)
    return StoredChat(chat, stored.stamps, started.owner)


def _stamp(path: Path) -> Stamp | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
