"""What a search looks at in a chat, and what it finds; by reading the files, where need be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from app.chat import chat_file
from app.chat.conversation import Conversation
from app.chat.message import split_thought
from app.chat.search.words import Snippet, folded, marked, snippet
from app.chat.stored import files_of, read_stored

log = logging.getLogger(__name__)

MOST_HITS: Final = 200
"""Largest number of hits of a search; those of the latest chats stay."""

MOST_OF_A_CHAT: Final = 20
"""Largest number of hits in one chat; the first ones stay."""

TITLE: Final = 0
"""Number that stands for the title, where messages have their ids."""


class ChatText(NamedTuple):
    """A text of a chat that is searched: the title, or what a message shows without its thought."""

    message_id: int
    body: str


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


def texts_of(chat: Conversation) -> Iterator[ChatText]:
    """Yield what is searched in a chat: its title, and all versions of its messages.

    The names of files that go with a message are searched, their texts are not; of calls all that
    their cards show is.
    """
    yield ChatText(TITLE, chat.title)
    for message in chat.tree:
        said = message.content
        text = split_thought(said).answer if message.is_answer else said
        names = [file.name for file in message.attachments]
        names += [picture.title for picture in message.pictures]
        calls = [part for c in message.calls for part in (c.title, c.arguments, c.result) if part]
        yield ChatText(message.id, "\n".join([*names, text, *calls]))


def make_hit(
    chat_id: str, title: str, updated: float, text: ChatText, words: tuple[str, ...]
) -> Hit:
    """Return the hit of a text."""
    is_title = text.message_id == TITLE
    return Hit(
        chat_id,
        text.message_id,
        marked(title, words) if is_title else marked(title, ()),
        Snippet("") if is_title else snippet(text.body, words),
        updated,
    )


def hits_in(chat: Conversation, words: tuple[str, ...]) -> list[Hit]:
    """Return the hits in a chat: if it has all words, its texts with the most of them."""
    texts = sorted(texts_of(chat))
    plain = [folded(text.body) for text in texts]
    if not all(any(word in body for body in plain) for word in words):
        return []
    scores = [sum(word in body for word in words) for body in plain]
    found = (text for text, score in zip(texts, scores, strict=True) if score == max(scores))
    return [make_hit(chat.id, chat.title, chat.updated, text, words) for text in found]


def read_hits(
    folder: Path, words: tuple[str, ...], is_wanted: Callable[[], bool] = lambda: True
) -> list[Hit]:
    """Return the hits in all chats of a folder by reading them, those of the latest chats first.

    Args:
        is_wanted: asked before each chat; the search ends once it is False.
    """
    found: list[list[Hit]] = []
    for path in files_of(folder, chat_file.SUFFIX):
        if not is_wanted():
            break
        try:
            chat = read_stored(path).chat
        except (OSError, ValueError, RecursionError) as error:
            log.info("%s is not searched: %s", path.name, error)
            continue
        found.append(hits_in(chat, words)[:MOST_OF_A_CHAT])
    found = sorted(filter(None, found), key=lambda hits: (-hits[0].updated, hits[0].chat_id))
    return [hit for hits in found for hit in hits][:MOST_HITS]
