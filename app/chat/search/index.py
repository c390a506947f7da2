"""What a search looks at in each chat, and what it finds: tables in the database of the chats.

A chat is written without its texts, which would take too long while an answer grows; `index_some`
brings them up to date once there is time, and before a search.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Final

from app.chat.chat_file import decoded
from app.chat.database import has_trigrams, whole_text
from app.chat.message import Message, split_thought
from app.chat.search.words import Snippet, folded, marked, snippet

MAX_HITS: Final = 200
"""Largest number of hits of a search; those of the latest chats stay."""

MAX_OF_A_CHAT: Final = 20
"""Largest number of hits in one chat; the first ones stay."""

TITLE: Final = 0
"""Number that stands for the title, where messages have their ids."""

MIN_INDEXED: Final = 3
"""Smallest number of characters that the index of trigrams can find."""

MAX_MESSAGES, MAX_CHARACTERS = 64, 200_000
"""Number of messages that are indexed in one go, and of characters after which no other is: what
is to be saved waits for them."""

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
"""Texts with some of the words, in chats with all of them; of each chat those with the most."""

HAS_WORD: Final = "instr(texts.folded, ?) > 0"
HAS_LONG_WORD: Final = "texts.number IN (SELECT rowid FROM trigrams WHERE trigrams MATCH ?)"


@dataclass(frozen=True, slots=True)
class Hit:
    """A message, or the title of a chat, that has words of a search.

    Attributes:
        message_id: id of the message; `TITLE` for the title.
        title: the chat's title, marked where that was found.
        text: piece of the message; empty for a title.
        updated: when the chat was last changed, in seconds since the epoch.
    """

    chat_id: str
    message_id: int
    title: Snippet
    text: Snippet
    updated: float

    @property
    def is_title(self) -> bool:
        """Whether the title was found rather than a message."""
        return self.message_id == TITLE


def searched_text(message: Message) -> str:
    """Return what is searched in a message: what it shows, without its thought.

    The names of files that go with it are searched, their texts are not; of calls all that their
    cards show is.
    """
    said = message.content
    text = split_thought(said).answer if message.is_answer else said
    names = [file.name for file in message.attachments]
    names += [picture.title for picture in message.pictures]
    calls = [part for c in message.calls for part in (c.title, c.arguments, c.result) if part]
    return "\n".join([*names, text, *calls])


def index_some(connection: sqlite3.Connection) -> int:
    """Bring the texts of some messages up to date, the latest first; return how many are left."""
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
    """Return the hits of folded words, those of the latest chats first."""
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
    """Return whether words are found without looking at all texts."""
    query = "SELECT 1 FROM sqlite_master WHERE name = 'trigrams'"
    return has_trigrams() and connection.execute(query).fetchone() is not None


def _body(connection: sqlite3.Connection, chat: str, message: int) -> str | None:
    """Return the text of a message or a title; None if there is none that can be read."""
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
