"""Chats on disk: one JSON file each, replaced as a whole.

A file that cannot be read is left alone and counted; it never keeps the window from opening.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

from app.atomic import write_json
from app.chat.conversation import Conversation

log = logging.getLogger(__name__)

SAFE_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")


class ChatStoreError(Exception):
    """A chat could not be written; the text is a sentence for a person."""


class ChatStore:
    """The chats below one folder.

    Attributes:
        n_unreadable: files that the last `load` had to skip.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.n_unreadable = 0

    def load(self) -> list[Conversation]:
        """All chats that can be read, newest first."""
        chats, self.n_unreadable = [], 0
        for path in self._files():
            try:
                chats.append(self._read(path))
            except (OSError, ValueError, RecursionError) as error:
                self.n_unreadable += 1
                log.info("chat %s is skipped: %s", path.name, error)
        return sorted(chats, key=lambda chat: chat.updated, reverse=True)

    def save(self, chat: Conversation) -> None:
        """Write one chat.

        Raises:
            ChatStoreError: the disk is full or the folder cannot be written.
        """
        try:
            write_json(self._path(chat.id), chat.to_json())
        except OSError as error:
            reason = error.strerror or str(error)
            raise ChatStoreError(
                f"The chat could not be saved ({reason}); it is kept until the window closes."
            ) from error

    def delete(self, chat_id: str) -> None:
        """Remove one chat; one that is not there is fine.

        Raises:
            ChatStoreError: the file cannot be removed.
        """
        try:
            self._path(chat_id).unlink(missing_ok=True)
        except OSError as error:
            raise ChatStoreError(
                f"The chat could not be deleted ({error.strerror or error})."
            ) from error

    def _files(self) -> list[Path]:
        try:
            return sorted(p for p in self._folder.iterdir() if p.suffix == ".json")
        except OSError:
            return []

    def _read(self, path: Path) -> Conversation:
        data = json.loads(path.read_text(encoding="utf-8", errors="surrogatepass"))
        if not isinstance(data, dict):
            raise ValueError("no JSON object")
        chat = Conversation.from_json(data)
        if chat.id != path.stem:
            raise ValueError("the id is not the file's name")
        return chat

    def _path(self, chat_id: str) -> Path:
        if not SAFE_ID.fullmatch(chat_id):
            raise ValueError(f"no chat id: {chat_id!r}")
        return self._folder / f"{chat_id}.json"
