"""The chat database: one SQLite file with all chats and their search texts.

Several threads and windows can use it simultaneously. Readers never wait, and commits survive kills
and power cuts. A damaged file is set aside, and everything readable is copied into a new one.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Final, TypeVar

from app.chat.chat_file import decoded, encoded
from app.chat.conversation import SCHEMA, Conversation, NewerChat
from app.chat.recovery import readable_chats
from app.chat.tree import MessageTree
from app.core.translation import tr

log = logging.getLogger(__name__)

T = TypeVar("T")

VERSION: Final = 1
"""Version of the table schema."""

BUSY_S: Final = 5.0
"""Maximum wait for another writer, in seconds."""

TABLES: Final = """
CREATE TABLE chats(number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, version INTEGER NOT NULL,
    title TEXT NOT NULL, updated REAL NOT NULL, head BLOB NOT NULL);
CREATE TABLE messages(number INTEGER PRIMARY KEY, chat TEXT NOT NULL, id INTEGER NOT NULL,
    data BLOB NOT NULL, UNIQUE(chat, id));
CREATE TABLE imported(file TEXT PRIMARY KEY, stamps TEXT NOT NULL);
CREATE TABLE unindexed(number INTEGER PRIMARY KEY, chat TEXT NOT NULL, message INTEGER NOT NULL,
    UNIQUE(chat, message));
CREATE TABLE texts(number INTEGER PRIMARY KEY, chat TEXT NOT NULL, message INTEGER NOT NULL,
    body TEXT NOT NULL, folded TEXT NOT NULL, UNIQUE(chat, message));
"""
"""Chats without their messages (`head`, JSON), messages (`data`, JSON), search texts (`texts`; see
`search.index_some`), and the keys of outdated search texts (`unindexed`)."""

TRIGRAMS: Final = """
CREATE VIRTUAL TABLE trigrams USING fts5(
    folded, content='texts', content_rowid='number', tokenize='trigram case_sensitive 1');
CREATE TRIGGER texts_in AFTER INSERT ON texts BEGIN
    INSERT INTO trigrams(rowid, folded) VALUES (new.number, new.folded);
END;
CREATE TRIGGER texts_out AFTER DELETE ON texts BEGIN
    INSERT INTO trigrams(trigrams, rowid, folded) VALUES ('delete', old.number, old.folded);
END;
"""

DAMAGE: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

REASONS: Final = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EACCES,
    sqlite3.SQLITE_PERM: errno.EACCES,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES,
    sqlite3.SQLITE_BUSY: errno.EBUSY,
    sqlite3.SQLITE_LOCKED: errno.EBUSY,
    sqlite3.SQLITE_NOMEM: errno.ENOMEM,
}
"""Errno by SQLite error code."""

_HALVES = re.compile("[\ud800-\udfff]")


class ChatDatabase:
    """The database file, created with the first chat. Thread-safe.

    Attributes:
        set_aside: damaged files that have been replaced.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set_aside: list[Path] = []
        self._lock = threading.RLock()
        self._open: dict[int, tuple[int, sqlite3.Connection]] = {}  # by thread, with the inode

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` on a consistent snapshot and return its result.

        Raises:
            OSError, NewerChat: the file cannot be read.
        """
        return self._run(work, "BEGIN")

    def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in one durable transaction.

        Raises:
            OSError, NewerChat: the file cannot be written.
        """
        return self._run(work, "BEGIN IMMEDIATE")

    def clean(self) -> None:
        """Truncate the write-ahead log, which still has deleted text, unless a reader needs it."""
        with suppress(sqlite3.Error, OSError, NewerChat):
            self._connection(is_write=True).execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close the file; no thread may be using it."""
        with self._lock:
            opened, self._open = list(self._open.values()), {}
        for _, connection in opened:
            with suppress(sqlite3.Error):
                connection.close()

    def _run(self, work: Callable[[sqlite3.Connection], T], begin: str) -> T:
        for is_last in (False, False, True):
            try:
                connection = self._connection(is_write=begin != "BEGIN")
                with _transaction(connection, begin):
                    return work(connection)
            except sqlite3.Error as error:
                if is_last or not self._repair(error):
                    raise _as_os_error(error) from error
        raise AssertionError

    def _connection(self, *, is_write: bool) -> sqlite3.Connection:
        inode, opened = _inode(self.path), self._open.get(threading.get_ident())
        if opened is not None:
            if inode and opened[0] == inode:
                return opened[1]
            self._forget()
        unfinished = _recovered(self.path)
        if not inode and unfinished.exists():  # a window was killed between two renames
            unfinished.replace(self.path)
        elif not inode and not is_write:
            connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            _make_tables(connection)
            with self._lock:
                self._open[threading.get_ident()] = 0, connection
            return connection
        connection = self._connect(is_write=is_write)
        try:
            _make_tables(connection)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._open[threading.get_ident()] = _inode(self.path), connection
        return connection

    def _connect(self, *, is_write: bool) -> sqlite3.Connection:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))  # private to this user
            return _configured(_connected(self.path))
        except (sqlite3.OperationalError, OSError):
            if is_write:
                raise
        for option in ("mode=ro", "immutable=1"):  # for a read-only folder
            with suppress(sqlite3.OperationalError):
                connection = _connected(f"{self.path.absolute().as_uri()}?{option}")
                try:
                    connection.execute("SELECT 1 FROM sqlite_master").fetchone()
                except sqlite3.OperationalError:
                    connection.close()
                    continue
                return connection
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def _forget(self) -> None:
        with self._lock:
            _, connection = self._open.pop(threading.get_ident(), (0, None))
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    def _repair(self, error: sqlite3.Error) -> bool:
        """Repair the cause of `error`, if possible; return whether to retry."""
        extended = getattr(error, "sqlite_errorcode", 0)
        if extended == sqlite3.SQLITE_CORRUPT_VTAB and self._rebuild_trigrams():
            return True
        if _code(error) not in DAMAGE and extended != sqlite3.SQLITE_IOERR_SHORT_READ:
            return False
        log.error("the chat database is damaged: %s", error)
        with self._lock:
            opened = self._open.get(threading.get_ident())
            self._forget()
            if opened is None or opened[0] == _inode(self.path):
                self._replace_damaged()
        return True

    def _rebuild_trigrams(self) -> bool:
        try:
            with _transaction(connection := self._connection(is_write=True), "BEGIN IMMEDIATE"):
                connection.execute("INSERT INTO trigrams(trigrams) VALUES ('rebuild')")
        except (sqlite3.Error, OSError) as error:
            log.warning("the chats' search index cannot be rebuilt: %s", error)
            return False
        return True

    def _replace_damaged(self) -> None:
        """Move the damaged file aside, and replace it with a new one that has everything readable.

        Raises:
            OSError: the disk is full or the folder is read-only; nothing has changed.
        """
        new, unfinished = _recovered(self.path), self.path.with_suffix(".recovering")
        unfinished.unlink(missing_ok=True)
        os.close(os.open(unfinished, os.O_RDWR | os.O_CREAT, 0o600))
        try:
            with closing(_connected(unfinished)) as target:
                target.execute("PRAGMA synchronous = FULL")
                _make_tables(target)
                with _transaction(target, "BEGIN"):
                    n_chats = 0
                    for chat in readable_chats(self.path):
                        put_chat(target, chat)
                        n_chats += 1
            unfinished.replace(new)
        except sqlite3.Error as error:
            unfinished.unlink(missing_ok=True)
            raise _as_os_error(error) from error
        now = time.strftime("%Y%m%d-%H%M%S")
        aside = self.path.with_name(f"{self.path.stem}-damaged-{now}-{secrets.token_hex(2)}.db")
        for suffix in ("-wal", ""):
            with suppress(FileNotFoundError):
                Path(f"{self.path}{suffix}").replace(Path(f"{aside}{suffix}"))
        Path(f"{self.path}-shm").unlink(missing_ok=True)
        new.replace(self.path)
        self.set_aside.append(aside)
        log.warning("%s was set aside; %d chats were recovered", aside.name, n_chats)


def put_chat(
    connection: sqlite3.Connection, chat: Conversation, old: MessageTree | None = None
) -> int:
    """Write a chat; return its new version.

    Args:
        old: the chat's messages in the database; None if unknown.
    """
    if old is None:
        connection.execute("DELETE FROM messages WHERE chat = ?", (chat.id,))
        old = MessageTree()
    gone = [(chat.id, message.id) for message in old if message.id not in chat.tree]
    connection.executemany("DELETE FROM messages WHERE chat = ? AND id = ?", gone)
    new = [message for message in chat.tree if old.get(message.id) != message]
    connection.executemany(
        "INSERT OR REPLACE INTO messages(chat, id, data) VALUES (?, ?, ?)",
        ((chat.id, message.id, _json(message.to_json())) for message in new),
    )
    texts = [*gone, *((chat.id, message.id) for message in new), (chat.id, 0)]
    connection.executemany("INSERT OR REPLACE INTO unindexed(chat, message) VALUES (?, ?)", texts)
    version = secrets.randbits(62)
    head = _json({"schema": SCHEMA} | chat.head() | {"chosen": chat.tree.chosen})
    connection.execute(
        "INSERT INTO chats(id, version, title, updated, head) VALUES (?1, ?2, ?3, ?4, ?5)"
        " ON CONFLICT(id) DO UPDATE SET version = ?2, title = ?3, updated = ?4, head = ?5",
        (chat.id, version, whole_text(chat.title), chat.updated, head),
    )
    return version


def get_chat(connection: sqlite3.Connection, chat_id: str) -> tuple[Conversation, int] | None:
    """Return a chat and its version, or None.

    Raises:
        ValueError, RecursionError: it is damaged.
    """
    head = connection.execute("SELECT head, version FROM chats WHERE id = ?", (chat_id,)).fetchone()
    if head is None:
        return None
    rows = connection.execute("SELECT data FROM messages WHERE chat = ? ORDER BY id", (chat_id,))
    messages = [decoded(data) for (data,) in rows]
    return Conversation.from_json(decoded(head[0]) | {"messages": messages}), head[1]


def version_of(connection: sqlite3.Connection, chat_id: str) -> int | None:
    """Return a chat's version, or None."""
    row = connection.execute("SELECT version FROM chats WHERE id = ?", (chat_id,)).fetchone()
    return None if row is None else row[0]


def remove_chat(connection: sqlite3.Connection, chat_id: str) -> None:
    """Delete a chat and its search texts."""
    for table, column in (
        ("chats", "id"), ("messages", "chat"), ("texts", "chat"), ("unindexed", "chat"),
    ):  # fmt: skip
        connection.execute(f"DELETE FROM {table} WHERE {column} = ?", (chat_id,))


def whole_text(text: str) -> str:
    """Return a text without lone surrogates, which a TEXT column cannot store."""
    return _HALVES.sub("\ufffd", text)


def _connected(path: Path | str) -> sqlite3.Connection:
    return sqlite3.connect(
        path, timeout=BUSY_S, isolation_level=None, check_same_thread=False,
        uri=isinstance(path, str),
    )  # fmt: skip


def _configured(connection: sqlite3.Connection) -> sqlite3.Connection:
    try:
        connection.execute("PRAGMA journal_mode = WAL")  # readers never wait for a writer
        connection.execute("PRAGMA synchronous = FULL")  # commits survive a power cut
        connection.execute("PRAGMA secure_delete = ON")  # overwrite deleted chats' text
    except BaseException:
        connection.close()
        raise
    return connection


def _make_tables(connection: sqlite3.Connection) -> None:
    if _has_tables(connection):
        return
    with _transaction(connection, "BEGIN IMMEDIATE"):
        if _has_tables(connection):  # another window has created them
            return
        for statement in _statements(TABLES + TRIGRAMS * has_trigrams()):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {VERSION}")


def _has_tables(connection: sqlite3.Connection) -> bool:
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    if found > VERSION:
        raise NewerChat(tr("it was written by a newer version of Tandem"))
    return bool(found)


@cache
def has_trigrams() -> bool:
    """Return whether this SQLite has FTS5's trigram tokenizer."""
    with closing(sqlite3.connect(":memory:")) as connection:
        try:
            connection.execute(
                "CREATE VIRTUAL TABLE t USING fts5(x, tokenize='trigram case_sensitive 1')"
            )
        except sqlite3.Error as error:
            log.info("chats are searched without an index: %s", error)
            return False
    return True


@contextmanager
def _transaction(connection: sqlite3.Connection, begin: str) -> Iterator[None]:
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


def _statements(script: str) -> Iterator[str]:
    # `executescript` would commit first
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _json(value: object) -> bytes:
    return b"".join(encoded(value))


def _recovered(path: Path) -> Path:
    return path.with_suffix(".recovered")


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _as_os_error(error: sqlite3.Error) -> OSError:
    number = REASONS.get(_code(error), errno.EIO)
    return OSError(number, os.strerror(number))


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0
