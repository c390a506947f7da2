"""The files of the chats: for each one its JSON, and beside it a journal of what changed since.

A file that cannot be read is left alone and listed; it never keeps the window from opening.
Several windows may share the folder: a chat that did not change here is not written, and one that
another window changed meanwhile is not written over.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from app.chat import chat_file, journal
from app.chat.chat_file import write_chat
from app.chat.conversation import Conversation, DamagedChat, NewerChat
from app.chat.journal import add_change, change_between, read_journal, start_journal
from app.chat.stored import Stamps, files_of, read_stored, stamps_of
from app.translation import tr
from engine import has_ended, process_mark, sweep_temporaries

log = logging.getLogger(__name__)

LONG_JOURNAL = 1 << 20
"""Size in bytes from which a journal that is longer than its chat's file is merged with that."""

SAFE_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")


class ChatStoreError(Exception):
    """A failure to save or delete a chat; its text is a sentence for a person."""


class ChatConflict(ChatStoreError):
    """A chat's file that another window has changed or deleted."""


@dataclass(slots=True)
class _Known:
    """A chat as it was last read or written.

    Attributes:
        chat: content of its file and journal together.
        stamps: stamps of file and journal; None for one that there was not.
        base: hash of the file; "" if nothing may be added to a journal, so that the next change
            replaces the file.
        owner: mark of the process that wrote the journal; "" without one.
    """

    chat: Conversation
    stamps: Stamps
    base: str = ""
    owner: str = ""


class ChatStore:
    """The chats of one folder, for one thread at a time.

    Attributes:
        damaged: files that the last `load` could not read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.damaged: list[DamagedChat] = []
        self._known: dict[str, _Known] = {}

    def load(self) -> list[Conversation]:
        """Return all chats that can be read, newest first; write nothing."""
        chats, self.damaged = [], []
        for path in files_of(self._folder, chat_file.SUFFIX):
            try:
                chats.append(self._read(path))
            except (OSError, ValueError, RecursionError) as error:
                self.damaged.append(DamagedChat(path, _why(error)))
                log.info("chat %s is skipped: %s", path.name, error)
        return sorted(chats, key=lambda chat: chat.updated, reverse=True)

    def save(self, chat: Conversation, *, may_append: bool = False) -> None:
        """Write one chat if it differs from its last read or written version.

        Args:
            may_append: whether to add the difference to the journal, where that is possible.

        Raises:
            ChatConflict: another window has written it since then, or deleted it.
            ChatStoreError: the disk is full or the folder cannot be written.
        """
        known = self._known.get(chat.id)
        if known is not None and known.chat == chat:
            return
        try:
            if known is None:
                self._write(chat)
                return
            if self._stamps(chat.id) != known.stamps:
                text = tr("“{chat}” was changed in another window.")
                raise ChatConflict(text.format(chat=chat.shown_title))
            if may_append and known.base and not _is_long(known):
                self._append(known, chat)
            else:
                self._write(chat)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ChatStoreError(
                tr(
                    "The chat could not be saved ({why}); it is kept until the window closes."
                ).format(why=reason)
            ) from error

    def delete(self, chat_id: str) -> None:
        """Delete one chat, if there is one.

        Raises:
            ChatStoreError: its files cannot be removed.
        """
        try:
            self._path(chat_id).unlink(missing_ok=True)
            self._journal(chat_id).unlink(missing_ok=True)
        except OSError as error:
            raise ChatStoreError(
                tr("The chat could not be deleted ({why}).").format(why=error.strerror or error)
            ) from error
        self._known.pop(chat_id, None)

    def tidy(self) -> None:
        """Sweep what killed windows left, and merge journals; those of other windows stay."""
        sweep_temporaries(self._folder)
        for path in files_of(self._folder, journal.SUFFIX):
            known = self._known.get(path.stem)
            try:
                if known is not None and known.owner:
                    is_settled = self._stamps(path.stem) == known.stamps
                    if is_settled and (known.owner == process_mark() or has_ended(known.owner)):
                        self._write(known.chat)
                elif known is not None or not path.with_suffix(chat_file.SUFFIX).exists():
                    started, _ = read_journal(path.read_bytes())
                    if started is not None and has_ended(started.owner):
                        path.unlink()  # older than the chat's file, or of a chat that is gone
                        if known is not None:
                            known.stamps = known.stamps[0], None
            except OSError as error:
                log.info("%s stays: %s", path.name, error)

    def _read(self, path: Path) -> Conversation:
        stored = read_stored(path)
        if path != self._path(stored.chat.id):
            raise ValueError("the id is not the file's name")
        self._known[stored.chat.id] = _Known(stored.chat, stored.stamps, owner=stored.owner)
        return stored.chat.copy()

    def _write(self, chat: Conversation) -> None:
        """Replace the file of a chat, and remove the journal, whose changes are in it."""
        base = write_chat(self._path(chat.id), chat)
        with suppress(OSError):  # it is not read any more, as it starts from another content
            self._journal(chat.id).unlink(missing_ok=True)
        self._known[chat.id] = _Known(chat.copy(), self._stamps(chat.id), base)

    def _append(self, known: _Known, chat: Conversation) -> None:
        path, change = self._journal(chat.id), change_between(known.chat, chat)
        try:
            if known.owner:
                add_change(path, change)
            else:
                start_journal(path, known.base, change)
        except OSError:
            known.base = ""  # what follows half a line would not be read
            raise
        finally:
            known.stamps = self._stamps(chat.id)
        known.chat, known.owner = chat.copy(), process_mark()

    def _stamps(self, chat_id: str) -> Stamps:
        return stamps_of(self._path(chat_id))

    def _journal(self, chat_id: str) -> Path:
        return self._path(chat_id).with_suffix(journal.SUFFIX)

    def _path(self, chat_id: str) -> Path:
        if not SAFE_ID.fullmatch(chat_id):
            raise ValueError(f"no chat id: {chat_id!r}")
        return self._folder / f"{chat_id}{chat_file.SUFFIX}"


def _why(error: Exception) -> str:
    """Return why a chat cannot be read, as the end of a sentence."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) if isinstance(error, NewerChat) else tr("it holds no whole chat")


def _is_long(known: _Known) -> bool:
    """Return whether a journal is so long that the whole chat is written again."""
    file, added = known.stamps
    n_bytes = 0 if added is None else added[2]
    return file is None or n_bytes > max(LONG_JOURNAL, file[2])
