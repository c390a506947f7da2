"""The store of the chats: reads and writes them, and brings in those of older versions.

Several windows may share the folder: a chat that did not change here is not written, and one that
another window changed meanwhile is not written over. Old files that cannot be read are left alone
and listed; they never keep the window from opening.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from app.chat.chat_file import JOURNAL, SUFFIX, OldChat, Stamps, old_files, read_old, stamps_of
from app.chat.conversation import SAFE_ID, ChatSummary, Conversation, DamagedChat, NewerChat
from app.chat.database import ChatDatabase, get_chat, put_chat, remove_chat, version_of
from app.core.engine_sentences import reason_of
from app.core.translation import tr
from engine import sweep_temporaries

if TYPE_CHECKING:
    from app.chat.images.files import ImageFolder

log = logging.getLogger(__name__)

FILE: Final = "chats.db"
"""Name of the database in the folder."""

DAMAGED: Final = "chats-damaged-*.db"
"""Names of databases that were set aside."""

OLD_FOLDER: Final = "json"
"""Name of the folder in which the files of older versions are kept once they were read."""

READ_AT_ONCE = 1 << 20
"""Most bytes of old files that are read before the window shows, in some 10 ms."""

UNREADABLE = OSError, ValueError, RecursionError
"""Errors that say that there is no whole chat, or that it cannot be read."""

DeletedRows = dict[str, list[tuple[Any, ...]]]
"""Rows of a deleted chat, by table."""


class ChatStoreError(Exception):
    """A failure to save or delete a chat; its text is a sentence for a person."""


class ChatConflict(ChatStoreError):
    """A chat that another window has changed or deleted."""


@dataclass(slots=True)
class _Known:
    """A chat as it was last read or written."""

    chat: Conversation
    version: int


@dataclass(slots=True)
class Survey:
    """What is in the folder.

    Attributes:
        unread: ids of chats of older versions that are still to be read.
        damaged: files that cannot be read.
    """

    summaries: list[ChatSummary] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    damaged: list[DamagedChat] = field(default_factory=list)


class ChatStore:
    """The chats of one folder: one thread writes, another may read those that are not written.

    Attributes:
        folder: folder of the database, of pictures, and of files of older versions.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.database = ChatDatabase(folder / FILE)
        self._known: dict[str, _Known] = {}
        self._n_set_aside = 0  # databases whose chats are not in `_known`

    @cached_property
    def pictures(self) -> ImageFolder:
        """Pictures of the chats, in folders beside the database."""
        from app.chat.images.files import ImageFolder  # late: the window shows without it

        return ImageFolder(self.folder)

    def survey(self) -> Survey:
        """Return what there is; bring in chats of older versions, as far as that takes no time."""
        files = [(_stamps(path), path) for path in old_files(self.folder)]
        files.sort(key=lambda one: one[0][0] or (0,), reverse=True)
        sizes = accumulate(sum(s[2] for s in stamps if s is not None) for stamps, _ in files)
        n_read = sum(size <= READ_AT_ONCE for size in sizes)
        found = Survey(unread={path.stem for _, path in files[n_read:]})
        if n_read:
            found.damaged += self.bring_in(path.stem for _, path in files[:n_read]).damaged
        try:
            found.summaries = self.summaries()
        except UNREADABLE as error:
            found.damaged.append(DamagedChat(self.database.path, why_unreadable(error)))
        found.damaged += self.set_aside()
        return found

    def set_aside(self) -> list[DamagedChat]:
        """Return the damaged databases that were replaced, also by earlier windows."""
        paths = sorted(self.folder.glob(DAMAGED)) if self.folder.is_dir() else []
        return [DamagedChat(path, tr("it holds no whole chat")) for path in paths]

    def bring_in(self, chat_ids: Iterable[str]) -> Survey:
        """Read files of older versions into the database, and put them into a folder of their own.

        Files that cannot be read stay. Those that cannot be brought in now are read next time.
        """
        found, read = Survey(), list[OldChat]()
        for chat_id in chat_ids:
            path = self.folder / f"{chat_id}{SUFFIX}"
            try:
                read.append(read_old(path))
            except FileNotFoundError:
                continue  # another window has brought it in
            except UNREADABLE as error:
                found.damaged.append(DamagedChat(path, why_unreadable(error)))
                log.info("%s is skipped: %s", path.name, error)
        try:
            if read:
                found.summaries = self.database.write(lambda file: _import(file, read))
        except (OSError, NewerChat) as error:
            found.damaged += [DamagedChat(one.path, why_unreadable(error)) for one in read]
            return found
        for one in read:
            if one.chat.origin:  # it has another id now
                self.pictures.complete(one.chat)
            with suppress(OSError):
                (self.folder / OLD_FOLDER).mkdir(exist_ok=True)
                for path in (one.path, one.path.with_suffix(JOURNAL)):
                    if path.exists():
                        path.replace(self.folder / OLD_FOLDER / path.name)
        return found

    def summaries(self) -> list[ChatSummary]:
        """Return the summaries of all chats in the database.

        Raises:
            OSError, ValueError: it cannot be read.
        """
        query = "SELECT id, title, updated FROM chats ORDER BY updated DESC"
        rows = self.database.read(lambda file: file.execute(query).fetchall())
        return [ChatSummary(*row) for row in rows]

    def load(self) -> list[Conversation]:
        """Return all chats in the database that can be read, newest first."""
        chats = []
        for summary in self.summaries():
            with suppress(*UNREADABLE):
                chats.append(self.read(summary.id))
        return chats

    def read(self, chat_id: str) -> Conversation:
        """Return a chat as it is on the disk now.

        One of an older version need not have been brought in.

        Raises:
            OSError, ValueError, RecursionError: it is gone or damaged.
        """
        found = self.database.read(lambda file: get_chat(file, chat_id))
        if found is None:
            return read_old(self.folder / f"{chat_id}{SUFFIX}").chat
        self._known[chat_id] = _Known(*found)
        return found[0].copy()

    def save(self, chat: Conversation) -> None:
        """Write what differs in one chat from its last read or written version.

        Raises:
            ChatConflict: another window has written it since then, or deleted it.
            ChatStoreError: the disk is full or the folder cannot be written.
        """
        if not SAFE_ID.fullmatch(chat.id):
            raise ValueError(f"no chat id: {chat.id!r}")
        known = self._known.get(chat.id)
        if known is not None and known.chat == chat:
            return

        def write(file: sqlite3.Connection) -> int:
            is_replaced = len(self.database.set_aside) > self._n_set_aside  # with less in it now
            if known is not None and not is_replaced and version_of(file, chat.id) != known.version:
                text = tr("“{chat}” was changed in another window.")
                raise ChatConflict(text.format(chat=chat.shown_title))
            return put_chat(file, chat, None if known is None or is_replaced else known.chat.tree)

        try:
            self.pictures.complete(chat)
            version = self.database.write(write)
        except (OSError, NewerChat) as error:
            raise ChatStoreError(
                tr(
                    "The chat could not be saved ({why}); it is kept until the window closes."
                ).format(why=reason_of(error))
            ) from error
        if len(self.database.set_aside) > self._n_set_aside:
            self._known.clear()
            self._n_set_aside = len(self.database.set_aside)
        self._known[chat.id] = _Known(chat.copy(), version)

    def delete(self, chat_id: str) -> DeletedRows:
        """Delete one chat, if there is one, and return what `restore` needs.

        Raises:
            ChatStoreError: it cannot be removed.
        """
        if not SAFE_ID.fullmatch(chat_id):
            raise ValueError(f"no chat id: {chat_id!r}")

        def remove(file: sqlite3.Connection) -> DeletedRows:
            rows = {
                table: file.execute(f"SELECT {columns} FROM {table} WHERE {key} = ?", (chat_id,))
                .fetchall() for table, (key, columns) in COLUMNS.items()
            }  # fmt: skip
            remove_chat(file, chat_id)
            return rows

        try:
            rows = self.database.write(remove) if self.database.path.exists() else {}
            for suffix in (SUFFIX, JOURNAL):
                (self.folder / OLD_FOLDER / f"{chat_id}{suffix}").unlink(missing_ok=True)
            self.pictures.hide(chat_id)
        except (OSError, NewerChat) as error:
            raise ChatStoreError(
                tr("The chat could not be deleted ({why}).").format(why=reason_of(error))
            ) from error
        self.database.clean()
        self._known.pop(chat_id, None)
        return rows

    def restore(self, deleted: DeletedRows) -> None:
        """Bring back a chat that was deleted.

        Raises:
            ChatStoreError: the disk is full or the folder cannot be written.
        """

        def write(file: sqlite3.Connection) -> None:
            for table, rows in deleted.items():
                columns = COLUMNS[table][1]
                places = ", ".join("?" * (columns.count(",") + 1))
                file.executemany(f"INSERT INTO {table}({columns}) VALUES ({places})", rows)
            file.executemany(
                "INSERT INTO unindexed(chat, message) VALUES (?, ?)",
                [(row[0], 0) for row in deleted["chats"]]
                + [row[:2] for row in deleted["messages"]],
            )

        if not deleted:
            return
        try:
            self.database.write(write)
            for chat_id, *_ in deleted["chats"]:
                self.pictures.bring_back(chat_id)
        except (OSError, NewerChat) as error:
            text = tr("The chat could not be brought back ({why}).")
            raise ChatStoreError(text.format(why=reason_of(error))) from error

    def tidy(self) -> None:
        """Sweep what killed windows left, and pictures of no chat."""
        sweep_temporaries(self.folder)
        versions = self.database.read(
            lambda file: dict(file.execute("SELECT id, version FROM chats").fetchall())
        )
        known = list(self._known.items())
        settled = [one.chat for chat_id, one in known if versions.get(chat_id) == one.version]
        self.pictures.tidy(
            settled, versions.keys() | {path.stem for path in old_files(self.folder)}
        )


COLUMNS: Final = {
    "chats": ("id", "id, version, title, updated, head"),
    "messages": ("chat", "chat, id, data"),
}
"""Of each table of the chats the column with a chat's id, and those that make up a row."""


def why_unreadable(error: Exception) -> str:
    """Return why a chat cannot be read, as the end of a sentence."""
    if isinstance(error, OSError):
        return reason_of(error)
    return str(error) if isinstance(error, NewerChat) else tr("it holds no whole chat")


def _import(file: sqlite3.Connection, read: Iterable[OldChat]) -> list[ChatSummary]:
    """Write chats of older versions; return the summaries of those that are new.

    A file that was read before, though it could not be moved, is left out. A chat that is there
    with another content gets an id of its own: both are kept.
    """
    found = []
    for one in read:
        stamps, chat = json.dumps(one.stamps), one.chat
        query = "SELECT 1 FROM imported WHERE file = ? AND stamps = ?"
        if file.execute(query, (one.path.name, stamps)).fetchone():
            continue
        file.execute("INSERT OR REPLACE INTO imported VALUES (?, ?)", (one.path.name, stamps))
        try:
            there = get_chat(file, chat.id)
        except (ValueError, RecursionError):  # the file is whole
            there = None
        if there is not None:
            if there[0] == chat:
                continue
            chat.renew_id()
        put_chat(file, chat)
        found.append(ChatSummary.of(chat))
    return found


def _stamps(path: Path) -> Stamps:
    """Return the stamps of a chat, or none where the system refuses them: reading says why."""
    try:
        return stamps_of(path)
    except OSError:
        return None, None
