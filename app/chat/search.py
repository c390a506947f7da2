"""Full-text search over all chats.

Texts are compared *folded*: ignoring case, line breaks, and accents on Latin, Greek and Cyrillic
letters. Words match anywhere, even inside other words; quoted words match as a phrase. Saving a
chat does not index it, as that would take too long while an answer grows. Instead, `index_some`
runs before a search, and when the chats have not changed for a while.
"""

from __future__ import annotations

import logging
import re
import sqlite3
import unicodedata
from dataclasses import dataclass, field
from typing import Final

from PySide6.QtCore import QObject, QTimer, Signal, Slot

from app.chat.chat_file import decoded
from app.chat.database import ChatDatabase, has_trigrams, whole_text
from app.chat.message import Message, split_thought
from app.core.background import KeyedJobs
from engine import printable

MAX_WORDS: Final = 16
MAX_WORD: Final = 200  # characters

BEFORE, AFTER = 36, 150
"""Number of characters in a snippet before and after the match."""

CHUNK: Final = 4000
"""Number of characters folded at a time to make a snippet."""

_WORD = re.compile(r'"([^"]*)"?|([^\s"]+)')
_QUOTES = str.maketrans("“”„«»", '"' * 5)
_ACCENTS = re.compile("[\u0300-\u036f]")
_BLANKS = re.compile(r"[\s\x00-\x1f\x7f]+")
_MARKUP: Final = (
    (re.compile(r"(?<!\w)(\*{1,3}|_{1,3}|~~)(?=\S)(.+?)(?<=\S)\1(?!\w)"), r"\2"),  # emphasis
    (re.compile(r"(?m)^[ \t]*(#{1,6} |> |[-*] \[[ x]\] |[-*] )"), ""),
    (re.compile(r"(?m)^[ \t]*\|?[ \t]*:?-{2,}[-:| \t]*$"), ""),  # the line below a table's header
    (re.compile(r"(?m)(?<=\s)\|(?=\s)|^\||\|$"), " "),
    (re.compile(r"`+|\${2}|\\[()\[\]]|\[\^\w+\]"), ""),
)
"""Patterns for Markdown syntax, and their replacements in a line of plain text."""

_HALVES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Snippet:
    """A one-line excerpt; `marks` has the (start, end) of each match."""

    text: str
    marks: tuple[tuple[int, int], ...] = ()


def folded(text: str) -> str:
    """Return a text normalized for comparison, as a single line."""
    return _BLANKS.sub(" ", _folded(text)).strip()


def parse_words(typed: str) -> tuple[str, ...]:
    """Return a query's folded words and phrases, all of which a chat must contain."""
    found: dict[str, None] = {}
    for match in _WORD.finditer(typed.translate(_QUOTES)):
        word = folded(match[1] if match[2] is None else match[2])[:MAX_WORD].strip()
        if word:
            found[word] = None
    return tuple(found)[:MAX_WORDS]


def snippet(text: str, words: tuple[str, ...]) -> Snippet:
    """Return an excerpt around the first match, or from the beginning if there is none."""
    start = _first_place(text, words)
    begin = max(0, start - BEFORE)
    if begin and (space := text.find(" ", begin, start)) >= 0:
        begin = space + 1
    piece = text[begin : start + AFTER]
    shown = _without_markup(piece)
    if not _marks(shown, words):  # the match was in markup
        shown = piece
    shown = printable(" ".join(shown.split()))
    if begin:
        shown = f"…{shown}"
    if start + AFTER < len(text):
        shown += "…"
    return Snippet(shown, _marks(shown, words))


def marked(text: str, words: tuple[str, ...]) -> Snippet:
    """Return a whole text, for example a title, with its matches marked."""
    shown = printable(" ".join(text.split()))
    return Snippet(shown, _marks(shown, words))


def _without_markup(text: str) -> str:
    for pattern, plain in _MARKUP:
        text = pattern.sub(plain, text)
    return text


def _folded(text: str) -> str:
    if text.isascii():
        return text.lower()
    plain = unicodedata.normalize("NFKD", _HALVES.sub("\ufffd", text)).casefold()
    return _ACCENTS.sub("", unicodedata.normalize("NFKD", plain))


def _first_place(text: str, words: tuple[str, ...]) -> int:
    for start in range(0, len(text), CHUNK):
        chunk = text[start : start + CHUNK + MAX_WORD]
        if any(word in folded(chunk) for word in words):
            line, places = _with_places(chunk)
            found = (line.find(word) for word in words)
            first = min((at for at in found if at >= 0), default=-1)
            if first >= 0:
                return start + places[first]
    return 0


def _marks(text: str, words: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    line, places = _with_places(text)
    found: list[tuple[int, int]] = []
    for word in words:
        at = line.find(word)
        while at >= 0:
            found.append((places[at], places[at + len(word) - 1] + 1))
            at = line.find(word, at + len(word))
    joined: list[tuple[int, int]] = []
    for start, end in sorted(found):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return tuple(joined)


def _with_places(text: str) -> tuple[str, list[int]]:
    # the folded text, and each character's offset in the original
    parts: list[str] = []
    places: list[int] = []
    for offset, character in enumerate(text):
        for plain in _BLANKS.sub(" ", _folded(character)):
            if plain == " " and (not parts or parts[-1] == " "):
                continue
            parts.append(plain)
            places.append(offset)
    return "".join(parts), places


MAX_HITS: Final = 200
MAX_OF_A_CHAT: Final = 20

TITLE: Final = 0
"""Message id that denotes the chat's title."""

MIN_INDEXED: Final = 3
"""Length of the shortest word that the trigram index can find."""

MAX_MESSAGES, MAX_CHARACTERS = 64, 200_000
"""Limits for one indexing transaction, as saves have to wait for it."""

HITS: Final = """
WITH scored AS (
    SELECT texts.number AS id, texts.chat AS chat, texts.message AS message, {score} AS score
    FROM texts WHERE ({some}) AND {all}
), best AS (SELECT chat, max(score) AS score FROM scored GROUP BY chat
), numbered AS (
    SELECT scored.*, row_number() OVER (PARTITION BY scored.chat ORDER BY message) AS number
    FROM scored JOIN best ON best.chat = scored.chat AND best.score = scored.score
)
SELECT chats.id, chats.title, chats.updated, texts.message, texts.body
FROM numbered JOIN chats ON chats.id = numbered.chat JOIN texts ON texts.number = numbered.id
WHERE numbered.number <= ? ORDER BY chats.updated DESC, chats.id, numbered.number LIMIT ?
"""
"""Query for the texts with the most words, in each chat that contains all words."""

HAS_WORD: Final = "instr(texts.folded, ?) > 0"
HAS_LONG_WORD: Final = "texts.number IN (SELECT rowid FROM trigrams WHERE trigrams MATCH ?)"


@dataclass(frozen=True, slots=True)
class Hit:
    """A message or chat title that matches a search.

    Attributes:
        message_id: id of the message, or `TITLE`.
        title: the chat's title, with marks if it matches.
        text: excerpt of the message; empty for a title.
        updated: when the chat last changed, in seconds since the epoch.
    """

    chat_id: str
    message_id: int
    title: Snippet
    text: Snippet
    updated: float

    @property
    def is_title(self) -> bool:
        """Whether the match is in the title rather than a message."""
        return self.message_id == TITLE


def searched_text(message: Message) -> str:
    """Return a message's searchable text: without thoughts, with file names but not contents."""
    said = message.content
    text = split_thought(said).answer if message.is_answer else said
    names = [file.name for file in message.attachments]
    names += [picture.title for picture in message.pictures]
    calls = [part for c in message.calls for part in (c.title, c.arguments, c.result) if part]
    return "\n".join([*names, text, *calls])


def index_some(connection: sqlite3.Connection) -> int:
    """Index some messages, latest first; return how many are left."""
    query, n_done = "SELECT number, chat, message FROM unindexed ORDER BY number DESC LIMIT ?", 0
    for number, chat, message in connection.execute(query, (MAX_MESSAGES,)).fetchall():
        if n_done > MAX_CHARACTERS:
            break
        body = _body(connection, chat, message)
        n_done += len(body or "")
        connection.execute("DELETE FROM texts WHERE chat = ? AND message = ?", (chat, message))
        if body is not None:
            connection.execute(
                "INSERT INTO texts(chat, message, body, folded) VALUES (?, ?, ?, ?)",
                (chat, message, body, folded(body)),
            )
        connection.execute("DELETE FROM unindexed WHERE number = ?", (number,))
    (n_left,) = connection.execute("SELECT count(*) FROM unindexed").fetchone()
    return int(n_left)


def find_hits(connection: sqlite3.Connection, words: tuple[str, ...]) -> list[Hit]:
    """Return the hits for folded words, latest chats first."""
    has_index = _has_trigrams(connection)
    conditions, values = [], []
    for word in words:
        is_long = has_index and len(word) >= MIN_INDEXED
        conditions.append(HAS_LONG_WORD if is_long else HAS_WORD)
        values.append('"' + word.replace('"', '""') + '"' if is_long else word)
    in_chat = [f"texts.chat IN (SELECT chat FROM texts WHERE {has})" for has in conditions]
    query = HITS.format(
        score=" + ".join(f"({HAS_WORD})" for _ in words),
        some=" OR ".join(conditions),
        all=" AND ".join(in_chat) if len(words) > 1 else "true",
    )
    of_chats = values if len(words) > 1 else []
    parameters = *words, *values, *of_chats, MAX_OF_A_CHAT, MAX_HITS
    return [
        Hit(
            chat,
            message,
            marked(title, words) if message == TITLE else marked(title, ()),
            Snippet("") if message == TITLE else snippet(body, words),
            updated,
        )
        for chat, title, updated, message, body in connection.execute(query, parameters)
    ]


def _has_trigrams(connection: sqlite3.Connection) -> bool:
    # the file may be from a machine whose SQLite has no trigram tokenizer
    query = "SELECT 1 FROM sqlite_master WHERE name = 'trigrams'"
    return has_trigrams() and connection.execute(query).fetchone() is not None


def _body(connection: sqlite3.Connection, chat: str, message: int) -> str | None:
    if message == TITLE:
        row = connection.execute("SELECT title FROM chats WHERE id = ?", (chat,)).fetchone()
        return None if row is None else str(row[0])
    query = "SELECT data FROM messages WHERE chat = ? AND id = ?"
    if (row := connection.execute(query, (chat, message)).fetchone()) is None:
        return None
    try:
        return whole_text(searched_text(Message.from_json(decoded(row[0]))))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


log = logging.getLogger(__name__)

SETTLE_MS: Final = 2000
"""Milliseconds without a write after which new messages are indexed."""

N_BATCHES: Final = 8
"""Maximum number of batches indexed before a search."""


@dataclass(slots=True, eq=False)
class _Search:
    typed: str
    number: int
    hits: list[Hit] = field(default_factory=list)


class ChatFinder(QObject):
    """Search over all chats in a database."""

    found = Signal(str, object)  # query, list of Hit
    indexed = Signal()  # all messages are indexed

    def __init__(self, database: ChatDatabase, parent: QObject) -> None:
        super().__init__(parent)
        self._database = database
        self._jobs = KeyedJobs("tandem-search", self)
        self._number = 0
        self._is_closed = self._is_indexed = False
        self._settle = QTimer(self, singleShot=True, interval=SETTLE_MS)
        self._settle.timeout.connect(self.start)

    @property
    def is_current(self) -> bool:
        """Whether all chats are indexed, or will be by the next search."""
        return self._is_indexed

    @Slot()
    def start(self) -> None:
        """Index all messages that have not been indexed yet."""
        n_left = 0

        def work() -> None:
            nonlocal n_left
            n_left = self._database.write(index_some)

        def then(error: Exception | None) -> None:
            if error is not None:  # for example a full disk; the next write retries
                log.info("the chats cannot be indexed: %s", error)
            elif n_left and not self._is_closed:
                self.start()
                return
            self._is_indexed = True
            self.indexed.emit()

        if self._database.path.exists():
            self._jobs.run("index", work, then)
        else:
            self._is_indexed = True

    @Slot()
    def note(self) -> None:
        """Schedule indexing, after chats have been written or deleted."""
        if not self._is_closed:
            self._settle.start()

    def find(self, typed: str) -> None:
        """Start a search; `found` reports the hits unless another search follows."""
        if self._is_closed:
            return
        self._number += 1
        search = _Search(typed, self._number)
        self._jobs.run("find", lambda: self._find(search), lambda e: self._on_found(search, e))

    def drop(self) -> None:
        """Discard the hits of all searches so far."""
        self._number += 1

    def close(self) -> None:
        """Stop the thread; the next start indexes the rest."""
        self._is_closed = True
        self.drop()
        self._settle.stop()
        self._jobs.close()

    def _find(self, search: _Search) -> None:
        words = parse_words(search.typed)
        if not words:
            return
        try:
            for _ in range(N_BATCHES if self._database.path.exists() else 0):
                if not self._database.write(index_some):
                    break
        except OSError as error:  # a full disk, or a read-only folder
            log.info("the chats cannot be indexed: %s", error)
        search.hits = self._database.read(lambda file: find_hits(file, words))

    def _on_found(self, search: _Search, error: Exception | None) -> None:
        if error is not None:
            log.error("a search failed", exc_info=error)
        if search.number == self._number:
            self.found.emit(search.typed, search.hits)
