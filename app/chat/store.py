"""The chat store: reads and writes chats, and imports those from older versions.

Several windows may share the folder, so unchanged chats are not written, and chats that another
window has changed are not overwritten. Unreadable old files are reported and left alone.
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
from app.core.translation import reason_of, tr
from engine import sweep_temporaries

if TYPE_CHECKING:
    from app.chat.images.files import ImageFolder

log = logging.getLogger(__name__)

FILE: Final = "chats.db"
DAMAGED: Final = "chats-damaged-*.db"

OLD_FOLDER: Final = "json"
"""Folder to which files from older versions are moved after import."""

READ_AT_ONCE = 1 << 20
"""Maximum bytes of old files read before the window appears; reading them takes about 10 ms."""

UNREADABLE = OSError, ValueError, RecursionError
"""Errors raised for an unreadable, missing or damaged chat."""

DeletedRows = dict[str, list[tuple[Any, ...]]]
"""A deleted chat's rows, by table."""


class ChatStoreError(Exception):
    """A chat could not be saved or deleted; the user sees the message."""


class ChatConflict(ChatStoreError):
    """A chat was changed or deleted by another window."""


@dataclass(slots=True)
class _Known:
    chat: Conversation
    version: int


@dataclass(slots=True)
class Survey:
    """The contents of the folder.

    Attributes:
        unread: ids of old chats still to be imported.
        damaged: unreadable files.
    """

    summaries: list[ChatSummary] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    damaged: list[DamagedChat] = field(default_factory=list)


class ChatStore:
    """The chats in a folder. One thread may write while another reads other chats."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.database = ChatDatabase(folder / FILE)
        self._known: dict[str, _Known] = {}
        self._n_set_aside = 0  # databases set aside before `_known` was filled

    @cached_property
    def images(self) -> ImageFolder:
        """The chats' images, in folders next to the database."""
        from app.chat.images.files import ImageFolder  # late: not needed to show the window

        return ImageFolder(self.folder)

    def survey(self) -> Survey:
        """Return the contents, after importing the newest old chats, up to `READ_AT_ONCE`."""
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
        """Return the damaged databases that this or earlier windows have replaced."""
        paths = sorted(self.folder.glob(DAMAGED)) if self.folder.is_dir() else []
        return [DamagedChat(path, tr("it contains no intact chat")) for path in paths]

    def bring_in(self, chat_ids: Iterable[str]) -> Survey:
        """Import files from older versions into the database, and move them to `OLD_FOLDER`.

        Unreadable files stay; if writing fails, the next start retries.
        """
        found, read = Survey(), list[OldChat]()
        for chat_id in chat_ids:
            path = self.folder / f"{chat_id}{SUFFIX}"
            try:
                read.append(read_old(path))
            except FileNotFoundError:
                continue  # another window has imported it
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
            if one.chat.origin:  # it has a new id
                self.images.complete(one.chat)
            with suppress(OSError):
                (self.folder / OLD_FOLDER).mkdir(exist_ok=True)
                for path in (one.path, one.path.with_suffix(JOURNAL)):
                    if path.exists():
                        path.replace(self.folder / OLD_FOLDER / path.name)
        return found

    def summaries(self) -> list[ChatSummary]:
        """Return the summaries of all chats (raises OSError or ValueError)."""
        query = "SELECT id, title, updated FROM chats ORDER BY updated DESC"
        rows = self.database.read(lambda file: file.execute(query).fetchall())
        return [ChatSummary(*row) for row in rows]

    def load(self) -> list[Conversation]:
        """Return all readable chats from the database, newest first."""
        chats = []
        for summary in self.summaries():
            with suppress(*UNREADABLE):
                chats.append(self.read(summary.id))
        return chats

    def read(self, chat_id: str) -> Conversation:
        """Return a chat as stored on disk, whether or not it has been imported.

        Raises:
            OSError, ValueError, RecursionError: it is missing or damaged.
        """
        found = self.database.read(lambda file: get_chat(file, chat_id))
        if found is None:
            return read_old(self.folder / f"{chat_id}{SUFFIX}").chat
        self._known[chat_id] = _Known(*found)
        return found[0].copy()

    def save(self, chat: Conversation) -> None:
        """Write a chat's changes since it was last read or written.

        Raises:
            ChatConflict: another window has written or deleted it since.
            ChatStoreError: the disk is full or the folder is read-only.
        """
        if not SAFE_ID.fullmatch(chat.id):
            raise ValueError(f"not a chat id: {chat.id!r}")
        known = self._known.get(chat.id)
        if known is not None and known.chat == chat:
            return

        def write(file: sqlite3.Connection) -> int:
            is_replaced = len(self.database.set_aside) > self._n_set_aside  # may have lost chats
            if known is not None and not is_replaced and version_of(file, chat.id) != known.version:
                text = tr("“{chat}” was changed in another window.")
                raise ChatConflict(text.format(chat=chat.shown_title))
            return put_chat(file, chat, None if known is None or is_replaced else known.chat.tree)

        try:
            self.images.complete(chat)
            version = self.database.write(write)
        except (OSError, NewerChat) as error:
            raise ChatStoreError(
                tr(
                    "The chat could not be saved ({why}). It is kept in memory until the window"
                    " closes."
                ).format(why=reason_of(error))
            ) from error
        if len(self.database.set_aside) > self._n_set_aside:
            self._known.clear()
            self._n_set_aside = len(self.database.set_aside)
        self._known[chat.id] = _Known(chat.copy(), version)

    def delete(self, chat_id: str) -> DeletedRows:
        """Delete a chat; return its rows for `restore` (raises ChatStoreError)."""
        if not SAFE_ID.fullmatch(chat_id):
            raise ValueError(f"not a chat id: {chat_id!r}")

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
            self.images.hide(chat_id)
        except (OSError, NewerChat) as error:
            raise ChatStoreError(
                tr("The chat could not be deleted ({why}).").format(why=reason_of(error))
            ) from error
        self.database.clean()
        self._known.pop(chat_id, None)
        return rows

    def restore(self, deleted: DeletedRows) -> None:
        """Restore a deleted chat (raises ChatStoreError)."""

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
                self.images.bring_back(chat_id)
        except (OSError, NewerChat) as error:
            text = tr("The chat could not be restored ({why}).")
            raise ChatStoreError(text.format(why=reason_of(error))) from error

    def tidy(self) -> None:
        """Delete orphaned images, and leftovers from killed windows."""
        sweep_temporaries(self.folder)
        versions = self.database.read(
            lambda file: dict(file.execute("SELECT id, version FROM chats").fetchall())
        )
        known = list(self._known.items())
        settled = [one.chat for chat_id, one in known if versions.get(chat_id) == one.version]
        self.images.tidy(settled, versions.keys() | {path.stem for path in old_files(self.folder)})


COLUMNS: Final = {
    "chats": ("id", "id, version, title, updated, head"),
    "messages": ("chat", "chat, id, data"),
}
"""By table: the column with the chat's id, and all columns to restore."""


def why_unreadable(error: Exception) -> str:
    """Return why a chat cannot be read, as words that complete a sentence."""
    if isinstance(error, OSError):
        return reason_of(error)
    return str(error) if isinstance(error, NewerChat) else tr("it contains no intact chat")


def _import(file: sqlite3.Connection, read: Iterable[OldChat]) -> list[ChatSummary]:
    # files that were imported before but could not be moved are skipped; if there is a different
    # chat with the same id, it is kept, and the imported one gets a new id
    found = []
    for one in read:
        stamps, chat = json.dumps(one.stamps), one.chat
        query = "SELECT 1 FROM imported WHERE file = ? AND stamps = ?"
        if file.execute(query, (one.path.name, stamps)).fetchone():
            continue
        file.execute("INSERT OR REPLACE INTO imported VALUES (?, ?)", (one.path.name, stamps))
        try:
            there = get_chat(file, chat.id)
        except (ValueError, RecursionError):  # the stored chat is damaged, the file is not
            there = None
        if there is not None:
            if there[0] == chat:
                continue
            chat.renew_id()
        put_chat(file, chat)
        found.append(ChatSummary.of(chat))
    return found


def _stamps(path: Path) -> Stamps:
    try:
        return stamps_of(path)
    except OSError:  # reading the chat will report this
        return None, None
