"""The index of all chats: a file in the cache folder that can be made again from the chats.

It has the text of each message, what the list of chats shows, and the stamps of the files that both
were read from. Whatever is wrong with it, it is thrown away: the chats' own files are the truth.
Several windows may use it at once.
"""

from __future__ import annotations

import logging
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

from app.chat.conversation import Conversation
from app.chat.search.hits import (
    MOST_HITS,
    MOST_OF_A_CHAT,
    ChatText,
    Hit,
    make_hit,
    texts_of,
)
from app.chat.search.known import VERSION, IndexedChat, read_chats
from app.chat.search.words import folded
from app.chat.stored import Stamps, stamps_key

log = logging.getLogger(__name__)

BUSY_S: Final = 5.0
"""Longest wait for another window that writes, in seconds."""

SHORTEST: Final = 3
"""Smallest number of characters that the index of trigrams can find."""

TABLES: Final = """
CREATE TABLE chats(id TEXT PRIMARY KEY, stamps TEXT, title TEXT, updated REAL) WITHOUT ROWID;
CREATE TABLE texts(id INTEGER PRIMARY KEY, chat TEXT, message INTEGER, body TEXT, folded TEXT);
CREATE INDEX texts_of_chat ON texts(chat);
"""

TRIGRAMS: Final = """
CREATE VIRTUAL TABLE trigrams USING fts5(
    folded, content='texts', content_rowid='id', tokenize='trigram case_sensitive 1');
CREATE TRIGGER texts_in AFTER INSERT ON texts BEGIN
    INSERT INTO trigrams(rowid, folded) VALUES (new.id, new.folded);
END;
CREATE TRIGGER texts_out AFTER DELETE ON texts BEGIN
    INSERT INTO trigrams(trigrams, rowid, folded) VALUES ('delete', old.id, old.folded);
END;
"""

HITS: Final = """
WITH scored AS (
    SELECT texts.id AS id, texts.chat AS chat, texts.message AS message, {score} AS score
    FROM texts WHERE ({some}) AND {all}
), best AS (SELECT chat, max(score) AS score FROM scored GROUP BY chat
), numbered AS (
    SELECT scored.*, row_number() OVER (PARTITION BY scored.chat ORDER BY message) AS number
    FROM scored JOIN best ON best.chat = scored.chat AND best.score = scored.score
)
SELECT chats.id, chats.title, chats.updated, texts.message, texts.body
FROM numbered JOIN chats ON chats.id = numbered.chat JOIN texts ON texts.id = numbered.id
WHERE number <= ? ORDER BY chats.updated DESC, chats.id, number LIMIT ?
"""
"""Texts with some of the words, in chats with all of them; of each chat those with the most."""

HAS_WORD: Final = "instr(texts.folded, ?) > 0"
HAS_LONG_WORD: Final = "texts.id IN (SELECT rowid FROM trigrams WHERE trigrams MATCH ?)"

_HALVES = re.compile("[\ud800-\udfff]")


class IndexUnusableError(Exception):
    """An index that cannot be used now: it is locked, was damaged, or has no place on the disk."""


class ChatIndex:
    """The index in one file, for one thread at a time.

    Every method raises `IndexUnusableError` where the file cannot be used; it is made anew, empty,
    by the next call then, unless another window only holds it at the moment.

    Attributes:
        can_find: whether this SQLite has trigrams, without which `find` looks at all texts.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: sqlite3.Connection | None = None
        self._inode = 0
        self.can_find = True

    def chats(self) -> dict[str, IndexedChat]:
        """Return all chats in the index by their ids."""
        with self._using() as connection:
            return read_chats(connection)

    def put(self, chat: Conversation, stamps: Stamps) -> None:
        """Add a chat, or what has changed in it."""
        texts = [ChatText(text.message_id, _whole(text.body)) for text in texts_of(chat)]
        with self._using() as connection, _transaction(connection):
            known = {
                ChatText(message, body): number
                for number, message, body in connection.execute(
                    "SELECT id, message, body FROM texts WHERE chat = ?", (chat.id,)
                )
            }
            wanted = set(texts)
            gone = [(number,) for text, number in known.items() if text not in wanted]
            connection.executemany("DELETE FROM texts WHERE id = ?", gone)
            added = [
                (chat.id, text.message_id, text.body, folded(text.body))
                for text in texts
                if text not in known
            ]
            connection.executemany(
                "INSERT INTO texts(chat, message, body, folded) VALUES (?, ?, ?, ?)", added
            )
            row = (chat.id, stamps_key(stamps), _whole(chat.title), chat.updated)
            connection.execute("INSERT OR REPLACE INTO chats VALUES (?, ?, ?, ?)", row)

    def remove(self, chat_id: str) -> None:
        """Forget a chat, if it is known."""
        with self._using() as connection, _transaction(connection):
            connection.execute("DELETE FROM texts WHERE chat = ?", (chat_id,))
            connection.execute("DELETE FROM chats WHERE id = ?", (chat_id,))

    def find(self, words: tuple[str, ...]) -> list[Hit]:
        """Return the hits of folded words, those of the latest chats first."""
        with self._using() as connection:
            rows = connection.execute(*self._query(words)).fetchall()
        return [
            make_hit(chat, title, updated, ChatText(message, body), words)
            for chat, title, updated, message, body in rows
        ]

    def close(self) -> None:
        """Close the file."""
        connection, self._open = self._open, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    def _query(self, words: tuple[str, ...]) -> tuple[str, tuple[str | int, ...]]:
        """Return the query for the hits of words, and its values."""
        conditions, values = [], []
        for word in words:
            is_long = self.can_find and len(word) >= SHORTEST
            conditions.append(HAS_LONG_WORD if is_long else HAS_WORD)
            values.append('"' + word.replace('"', '""') + '"' if is_long else word)
        in_chat = [f"texts.chat IN (SELECT chat FROM texts WHERE {has})" for has in conditions]
        query = HITS.format(
            score=" + ".join(f"({HAS_WORD})" for _ in words),
            some=" OR ".join(conditions),
            all=" AND ".join(in_chat) if len(words) > 1 else "true",
        )
        of_chats = values if len(words) > 1 else []
        return query, (*words, *values, *of_chats, MOST_OF_A_CHAT, MOST_HITS)

    @contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        try:
            yield self._connection()
        except (sqlite3.Error, OSError) as error:
            log.info("the index of the chats is not used: %s", error)
            if not _is_busy(error):
                self._discard()
            raise IndexUnusableError(str(error)) from error

    def _connection(self) -> sqlite3.Connection:
        """Return the open file, which another window may have replaced meanwhile."""
        if self._open is not None and self._inode == _inode(self._path):
            return self._open
        self.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))  # for this user alone
        self._open = connection = sqlite3.connect(
            self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA journal_mode = WAL")  # who reads waits for nobody
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA secure_delete = ON")  # deleted chats leave no text behind
        self._make_tables(connection)
        self._inode = _inode(self._path)
        return connection

    def _make_tables(self, connection: sqlite3.Connection) -> None:
        """Make the tables, unless the file has them; note what this SQLite can do.

        Raises:
            sqlite3.Error: they are of another version, or damaged.
        """
        self.can_find = _has_trigrams()
        wanted = 2 * VERSION + self.can_find
        with _transaction(connection):
            (found,) = connection.execute("PRAGMA user_version").fetchone()
            if found == wanted:
                return
            if connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                raise sqlite3.DatabaseError(f"version {found} instead of {wanted}")
            for statement in _statements(TABLES + TRIGRAMS * self.can_find):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {wanted}")

    def _discard(self) -> None:
        """Delete the file, so that the next use makes it anew."""
        self.close()
        for suffix in ("", "-wal", "-shm"):
            with suppress(OSError):
                Path(f"{self._path}{suffix}").unlink(missing_ok=True)


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _statements(script: str) -> Iterator[str]:
    """Yield the statements of a script; unlike `executescript`, nothing is committed before."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _has_trigrams() -> bool:
    with closing(sqlite3.connect(":memory:")) as connection:
        try:
            connection.execute(
                "CREATE VIRTUAL TABLE t USING fts5(x, tokenize='trigram case_sensitive 1')"
            )
        except sqlite3.Error as error:
            log.info("chats are searched by reading them: %s", error)
            return False
    return True


def _is_busy(error: Exception) -> bool:
    """Return whether only another window is in the way."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def _whole(text: str) -> str:
    """Return a text without halves of characters, which the file could not hold."""
    return _HALVES.sub("\ufffd", text)
