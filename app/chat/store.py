"""The files of the chats: for each one its JSON, and beside it a journal of what changed since.

A file that cannot be read is left alone and listed; it never keeps the window from opening.
Several windows may share the folder: a chat that did not change here is not written, and one that
another window changed meanwhile is not written over.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from app.chat import chat_file, journal
from app.chat.chat_file import write_chat
from app.chat.conversation import Conversation, DamagedChat
from app.chat.journal import add_change, change_between, read_journal, start_journal
from app.chat.listing.summary import ChatSummary
from app.chat.search.known import IndexedChat
from app.chat.stored import (
    MOST_BYTES,
    SAFE_ID,
    Stamps,
    files_of,
    read_stored,
    stamps_key,
    stamps_of,
    stamps_or_none,
    why_unreadable,
)
from app.core.engine_sentences import reason_of
from app.core.translation import tr
from engine import atomic_write, has_ended, process_mark, read_file, sweep_temporaries

if TYPE_CHECKING:
    from app.chat.pictures.folder import PictureFolder

log = logging.getLogger(__name__)

LONG_JOURNAL = 1 << 20
"""Size in bytes from which a journal that is longer than its chat's file is merged with that."""

READ_AT_ONCE = 1 << 20
"""Most bytes of chats that are read before the window shows, in some 10 ms."""

UNREADABLE = OSError, ValueError, RecursionError
"""Errors that say that a file holds no whole chat, or cannot be read."""

DeletedFiles = Mapping[Path, bytes]
"""Files of a deleted chat with their content."""


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


@dataclass(slots=True)
class Survey:
    """What is in the folder.

    Attributes:
        chats: whole chats.
        summaries: summaries of chats that were not read, as they have not changed.
        unread: ids of chats that have changed and are still to be read.
    """

    chats: list[Conversation] = field(default_factory=list)
    summaries: list[ChatSummary] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)


class ChatStore:
    """The chats of one folder: one thread writes, another may read those that are not written.

    Attributes:
        folder: folder of the files.
        damaged: files that could not be read when all were, or were surveyed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damaged: list[DamagedChat] = []
        self._lock = threading.RLock()
        self._known: dict[str, _Known] = {}

    @cached_property
    def pictures(self) -> PictureFolder:
        """Pictures of the chats, in folders beside the files."""
        from app.chat.pictures.folder import PictureFolder  # late: the window shows without it

        return PictureFolder(self.folder)

    def survey(self, known: Mapping[str, IndexedChat]) -> Survey:
        """Return what there is: whole chats, summaries of known ones, and what is still to be read.

        Chats that have changed since they were known are read at once, the latest first, as far as
        that takes no time. Nothing is written.

        Args:
            known: chats as they were read some time, by their ids.
        """
        found = Survey()
        changed: list[tuple[Stamps, Path]] = []
        for path in files_of(self.folder, chat_file.SUFFIX):
            stamps, entry = stamps_or_none(path), known.get(path.stem)
            if entry is not None and entry.stamps == stamps_key(stamps):
                found.summaries.append(entry.summary)
            else:
                changed.append((stamps, path))
        changed.sort(key=lambda one: one[0][0] or (0,), reverse=True)
        sizes = accumulate(sum(s[2] for s in stamps if s is not None) for stamps, _ in changed)
        n_read = sum(size <= READ_AT_ONCE for size in sizes)
        found.chats = self.load([path for _, path in changed[:n_read]])
        found.unread = {path.stem for _, path in changed[n_read:]}
        return found

    def load(self, paths: Iterable[Path] | None = None) -> list[Conversation]:
        """Return the chats that can be read, newest first; write nothing.

        Args:
            paths: files of the chats; None for all in the folder.
        """
        chats, self.damaged = [], []
        for path in files_of(self.folder, chat_file.SUFFIX) if paths is None else paths:
            try:
                chats.append(self._read(path))
            except UNREADABLE as error:
                self.damaged.append(DamagedChat(path, why_unreadable(error)))
                log.info("chat %s is skipped: %s", path.name, error)
        return sorted(chats, key=lambda chat: chat.updated, reverse=True)

    def read(self, chat_id: str) -> Conversation:
        """Return a chat as it is on the disk now.

        Raises:
            OSError, ValueError, RecursionError: it is gone or damaged.
        """
        return self._read(self._path(chat_id))

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
            self.pictures.complete(chat)
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
            reason = reason_of(error)
            raise ChatStoreError(
                tr(
                    "The chat could not be saved ({why}); it is kept until the window closes."
                ).format(why=reason)
            ) from error

    def delete(self, chat_id: str) -> DeletedFiles:
        """Delete one chat, if there is one, and return what `restore` needs.

        Raises:
            ChatStoreError: its files cannot be removed.
        """
        paths = self._path(chat_id), self._journal(chat_id)
        try:
            contents = {path: path.read_bytes() for path in paths if path.is_file()}
            for path in paths:
                path.unlink(missing_ok=True)
            self.pictures.hide(chat_id)
        except OSError as error:
            raise ChatStoreError(
                tr("The chat could not be deleted ({why}).").format(why=reason_of(error))
            ) from error
        self._known.pop(chat_id, None)
        return contents

    def restore(self, deleted: DeletedFiles) -> None:
        """Write the files of a chat that was deleted.

        Raises:
            ChatStoreError: the disk is full or the folder cannot be written.
        """
        try:
            for path, content in deleted.items():
                with atomic_write(path) as file:
                    file.write(content)
            for chat_id in {path.stem for path in deleted}:
                self.pictures.bring_back(chat_id)
        except OSError as error:
            reason = reason_of(error)
            text = tr("The chat could not be brought back ({why}).").format(why=reason)
            raise ChatStoreError(text) from error

    def tidy(self) -> None:
        """Sweep what killed windows left, and merge journals; those of other windows stay."""
        sweep_temporaries(self.folder)
        for path in files_of(self.folder, journal.SUFFIX):
            try:
                with self._lock:
                    self._merge(path)
            except (OSError, ValueError) as error:
                log.info("%s stays: %s", path.name, error)
        with self._lock:
            settled = [
                known.chat for chat_id, known in self._known.items()
                if stamps_or_none(self._path(chat_id)) == known.stamps
            ]  # fmt: skip
        self.pictures.tidy(settled)

    def _merge(self, path: Path) -> None:
        """Merge a journal with its chat, or remove one that is older than its chat's file.

        Raises:
            OSError, ValueError: that is not possible now, or it is no journal.
        """
        chat = path.with_suffix(chat_file.SUFFIX)
        if path.stem not in self._known and chat.exists():
            try:
                self._read(chat)
            except UNREADABLE:
                return  # a damaged chat and its journal stay as they are
        known = self._known.get(path.stem)
        if known is not None and known.owner:
            is_settled = self._stamps(path.stem) == known.stamps
            if is_settled and (known.owner == process_mark() or has_ended(known.owner)):
                self._write(known.chat)
            return
        started, _ = read_journal(read_file(path, MOST_BYTES))
        if started is not None and has_ended(started.owner):
            path.unlink()  # older than the chat's file, or of a chat that is gone
            if known is not None:
                known.stamps = known.stamps[0], None

    def _read(self, path: Path) -> Conversation:
        with self._lock:  # else its journal might be merged meanwhile
            stored = read_stored(path)
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
        return self.folder / f"{chat_id}{chat_file.SUFFIX}"


def _is_long(known: _Known) -> bool:
    file, added = known.stamps
    n_bytes = 0 if added is None else added[2]
    return file is None or n_bytes > max(LONG_JOURNAL, file[2])
