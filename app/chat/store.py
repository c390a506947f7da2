"""The files of the chats: one JSON file each, replaced as a whole.

A file that cannot be read is left alone and listed; it never keeps the window from opening.
Several windows may share the folder: a chat that did not change here is not written, and one that
another window changed meanwhile is not written over.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from app.chat.conversation import Conversation, DamagedChat
from engine import replace_json, sweep_temporaries

log = logging.getLogger(__name__)

MOST_BYTES = 256 << 20
SAFE_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")


class ChatStoreError(Exception):
    """A failure to save or delete a chat; its text is a sentence for a person."""


class ChatConflict(ChatStoreError):
    """A chat's file that another window has changed or deleted."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A chat as it was last read or written; `stamp` is None if there was no file."""

    digest: bytes
    stamp: tuple[int, int] | None


class ChatStore:
    """The chats of one folder.

    Attributes:
        damaged: files that the last `load` could not read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.damaged: list[DamagedChat] = []
        self._known: dict[str, _Known] = {}

    def load(self) -> list[Conversation]:
        """Return all chats that can be read, newest first; sweep what a killed window left."""
        sweep_temporaries(self._folder)
        chats, self.damaged = [], []
        for path in self._files():
            try:
                chats.append(self._read(path))
            except (OSError, ValueError, RecursionError) as error:
                why = error.strerror if isinstance(error, OSError) else "it holds no whole chat"
                self.damaged.append(DamagedChat(path, why or str(error)))
                log.info("chat %s is skipped: %s", path.name, error)
        return sorted(chats, key=lambda chat: chat.updated, reverse=True)

    def save(self, chat: Conversation) -> None:
        """Write one chat if it differs from its last read or written version.

        Raises:
            ChatConflict: another window has written it since then, or deleted it.
            ChatStoreError: the disk is full or the folder cannot be written.
        """
        path, digest = self._path(chat.id), _digest(chat)
        known = self._known.get(chat.id)
        if known is not None and known.digest == digest:
            return
        try:
            if known is not None and _stamp(path) != known.stamp:
                raise ChatConflict(f"“{chat.shown_title}” was changed in another window.")
            replace_json(path, chat.to_json(), ensure_ascii=False)
            self._known[chat.id] = _Known(digest, _stamp(path))
        except OSError as error:
            reason = error.strerror or str(error)
            raise ChatStoreError(
                f"The chat could not be saved ({reason}); it is kept until the window closes."
            ) from error

    def delete(self, chat_id: str) -> None:
        """Delete one chat, if there is one.

        Raises:
            ChatStoreError: the file cannot be removed.
        """
        try:
            self._path(chat_id).unlink(missing_ok=True)
        except OSError as error:
            raise ChatStoreError(
                f"The chat could not be deleted ({error.strerror or error})."
            ) from error
        self._known.pop(chat_id, None)

    def _files(self) -> list[Path]:
        try:
            return sorted(p for p in self._folder.iterdir() if p.suffix == ".json")
        except OSError:
            return []

    def _read(self, path: Path) -> Conversation:
        stamp = _stamp(path)
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            raise ValueError("no file of a chat")
        data = json.loads(path.read_text(encoding="utf-8", errors="surrogatepass"))
        if not isinstance(data, dict):
            raise ValueError("no JSON object")
        chat = Conversation.from_json(data)
        if path != self._path(chat.id):
            raise ValueError("the id is not the file's name")
        self._known[chat.id] = _Known(_digest(chat), stamp)
        return chat

    def _path(self, chat_id: str) -> Path:
        if not SAFE_ID.fullmatch(chat_id):
            raise ValueError(f"no chat id: {chat_id!r}")
        return self._folder / f"{chat_id}.json"


def _digest(chat: Conversation) -> bytes:
    return hashlib.sha256(repr(chat).encode()).digest()


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return modification time and inode, which change when a file is replaced."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_ino
