"""A conversation: its turns, title, JSON form, and the prompt made of it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from app.chat.message import Message, split_thought, valid_text
from engine import ChatMessage

SCHEMA = 1
TITLE_LENGTH = 48
LAST_SECOND = 253_000_000_000.0  # in the year 9987


@dataclass(slots=True)
class Conversation:
    """A chat; its times are seconds since the epoch.

    Attributes:
        drops_oldest: whether its oldest messages make room once its context is full.
    """

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    title: str = ""
    created: float = field(default_factory=time.time)
    updated: float = field(default_factory=time.time)
    system_prompt: str = ""
    draft: str = ""
    drops_oldest: bool = False
    messages: list[Message] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.messages

    @property
    def shown_title(self) -> str:
        return self.title or "New chat"

    def add(self, message: Message) -> Message:
        """Append a turn and return it; the first one names the chat."""
        self.messages.append(message)
        self.updated = time.time()
        if not self.title and message.role == "user":
            self.title = title_from(message.content)
        return message

    def copy(self) -> Conversation:
        """Return a copy that does not change with this chat."""
        return replace(self, messages=[message.copy() for message in self.messages])

    def renew_id(self) -> None:
        """Make this a chat of its own, beside another with the same id."""
        self.id = uuid.uuid4().hex

    def truncate(self, n_messages: int) -> None:
        """Keep the first `n_messages` turns."""
        del self.messages[n_messages:]

    def prompt(self, *, continue_last: bool = False) -> tuple[ChatMessage, ...]:
        """Return the turns for the model: system prompt first, without thoughts and empty answers.

        Messages without an answer between them become one turn, as many templates refuse two in a
        row. With `continue_last` the last answer stays as it was written, with its thought.
        """
        turns = [ChatMessage("system", self.system_prompt)] if self.system_prompt.strip() else []
        for index, message in enumerate(self.messages, 1):
            text, is_last = message.content, index == len(self.messages)
            if message.role == "assistant" and not (is_last and continue_last):
                text = split_thought(text).answer
                if not text.strip():
                    continue
            if turns and turns[-1].role == message.role:
                text = f"{turns.pop().content}\n\n{text}"
            turns.append(ChatMessage(message.role, text))
        return tuple(turns)

    def matches(self, words: str) -> bool:
        """Return whether title or text contain every word of a search, ignoring case."""
        if not (wanted := words.casefold().split()):
            return True  # no reason to read a long chat
        text = "\n".join([self.title, *(m.content for m in self.messages)]).casefold()
        return all(word in text for word in wanted)

    @property
    def context_tokens(self) -> int:
        """Number of context tokens after the last answer; 0 if unknown."""
        known = (m.stats.context_tokens for m in reversed(self.messages) if m.stats)
        return next(filter(None, known), 0)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA} | asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Conversation:
        """Return the chat stored by `to_json`.

        Raises:
            ValueError: the data is not a chat.
        """
        try:
            return cls(
                id=valid_text(data["id"]),
                title=valid_text(data["title"]),
                created=valid_time(data["created"]),
                updated=valid_time(data["updated"]),
                system_prompt=valid_text(data.get("system_prompt", "")),
                draft=valid_text(data.get("draft", "")),
                drops_oldest=data.get("drops_oldest") is True,
                messages=[Message.from_json(item) for item in data["messages"]],
            )
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"no chat: {error!r}") from error


@dataclass(frozen=True, slots=True)
class DamagedChat:
    """A file that holds no chat, or one that cannot be read.

    Attributes:
        why: reason as the end of a sentence.
    """

    path: Path
    why: str


def title_from(text: str) -> str:
    """Return a short title from a first message: its first line, cut between words."""
    line = " ".join(text.strip().partition("\n")[0].split())
    if len(line) <= TITLE_LENGTH:
        return line
    return line[:TITLE_LENGTH].rsplit(" ", 1)[0] + "…"


def valid_time(value: Any) -> float:
    """Return seconds since the epoch that can be turned into a date in every time zone.

    Raises:
        ValueError, TypeError, OverflowError: the value is no such time.
    """
    seconds = float(value)
    if not 0.0 <= seconds <= LAST_SECOND:  # false for NaN, too
        raise ValueError(f"no time: {value!r}")
    return seconds
