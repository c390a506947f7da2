"""A conversation: its messages, title and JSON form, and the prompt built from it."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from app.chat.message import (
    ChatImage,
    Message,
    Thought,
    plain,
    split_thought,
    unknown,
    valid_number,
    valid_text,
)
from app.chat.tool_use import with_stopped
from app.chat.tree import ROOT, MessageTree
from app.core.translation import tr
from engine import IMAGE_PLACEHOLDER, ChatMessage, ImageFile

SCHEMA = 2
"""Version of a chat's JSON; messages are a list in 1 and a tree in 2."""

OF_FILES = ("schema", "messages", "chosen")
"""Keys in a chat's JSON that are not attributes of the chat."""

SAFE_ID: Final = re.compile(r"[0-9A-Za-z_-]{1,64}")
"""Pattern for ids, which name image folders and must be valid file names on every system."""

TITLE_LENGTH = 48
LAST_SECOND = 253_000_000_000.0  # in the year 9987


ImageFiles = Callable[[ChatImage], ImageFile | None]
"""Function that returns an image's file; None if the prompt omits the image."""

EFFORTS: Final = ("low", "medium", "high")
"""Values of `reasoning_effort` in chat templates."""


@dataclass(slots=True)
class Conversation:
    """A chat; all times are in seconds since the epoch.

    Attributes:
        draft_files: paths of the files in the draft.
        draft_pictures: images in the draft.
        drops_oldest: whether the oldest messages are dropped when the context is full.
        sampling: the chat's own values by `SamplingParams` field; None to use the global ones.
        thinks: whether models think before answering; None for the template's default.
        effort: how much they think, one of `EFFORTS`; "" for the template's default.
        uses_tools: whether models may call tools.
        servers_off: names of servers whose tools are disabled in this chat.
        has_own_title: whether the title is the user's or the model's, not taken from a message.
        tree: all versions of all messages.
        origin: id of the chat it was copied from, which may still have the images; not stored.
        extra: unknown entries of its file, written back unchanged.
    """

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    title: str = ""
    created: float = field(default_factory=time.time)
    updated: float = field(default_factory=time.time)
    system_prompt: str = ""
    draft: str = ""
    draft_files: tuple[str, ...] = ()
    draft_pictures: tuple[ChatImage, ...] = ()
    drops_oldest: bool = False
    sampling: dict[str, Any] | None = None
    thinks: bool | None = None
    effort: str = ""
    uses_tools: bool = True
    servers_off: tuple[str, ...] = ()
    has_own_title: bool = False
    tree: MessageTree = field(default_factory=MessageTree)
    origin: str = field(default="", compare=False)
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, messages: Iterable[Message], **others: Any) -> Conversation:
        """Return a chat with a single branch of messages."""
        return cls(tree=MessageTree(in_a_row(messages)), **others)

    @property
    def messages(self) -> Sequence[Message]:
        """The messages on screen: the chosen versions of questions and answers."""
        return self.tree.path

    @property
    def is_empty(self) -> bool:
        return not len(self.tree)

    @property
    def shown_title(self) -> str:
        return self.title or tr("New chat")

    def add(self, message: Message, parent: int | None = None) -> Message:
        """Add a message after `parent` (default: the last on screen); the first names the chat."""
        if parent is None:
            parent = self.messages[-1].id if self.messages else ROOT
        self.tree.add(message, parent)
        self.updated = time.time()
        if not self.title and message.role == "user":
            files = [file.name for file in message.attachments]
            files += [picture.title for picture in message.pictures]
            self.title = title_from(message.content or ", ".join(files))
        return message

    def copy(self) -> Conversation:
        """Return an independent copy."""
        return replace(self, tree=self.tree.copy(Message.copy))

    def fork(self, last: int) -> Conversation:
        """Return a new chat with the messages up to and including `last`."""
        messages = [message.copy() for message in (*self.tree.above(last), self.tree[last])]
        for message in messages:  # running calls belong only to this chat
            message.calls = with_stopped(message.calls, "running")
        now = time.time()
        tree = MessageTree(in_a_row(messages))
        made = replace(
            self, created=now, updated=now, draft="", draft_files=(), draft_pictures=(), tree=tree
        )
        made.renew_id()
        return made

    def renew_id(self) -> None:
        """Give this copy its own id."""
        self.origin, self.id = self.id, uuid.uuid4().hex

    @property
    def has_draft(self) -> bool:
        """Whether the draft has a text, file or image."""
        return bool(self.draft.strip() or self.draft_files or self.draft_pictures)

    def all_images(self) -> Iterator[ChatImage]:
        """Yield the images in the draft and in all versions of all messages."""
        yield from self.draft_pictures
        for message in self.tree:
            yield from message.pictures

    def prompt(
        self, *, continue_last: bool = False, without_last: bool = False,
        pictures: ImageFiles = lambda _: None,
    ) -> tuple[ChatMessage, ...]:  # fmt: skip
        """Return the turns for the model, with the system prompt but no thoughts or empty answers.

        Consecutive messages with the same role are merged, as many templates refuse two in a row.
        With `continue_last`, the last answer stays verbatim, with its thought but without calls.
        Answers with calls after the last question keep their thoughts, because templates for models
        that think between calls need them.

        Args:
            without_last: whether to omit the last message.
            pictures: returns an image's file, or None to replace the image with its name.
        """
        turns = [ChatMessage("system", self.system_prompt)] if self.system_prompt.strip() else []
        messages = self.messages[:-1] if without_last else self.messages
        questions = [number for number, message in enumerate(messages) if not message.is_answer]
        for number, message in enumerate(messages):
            is_kept = continue_last and number == len(messages) - 1
            parts = Thought(None, message.prompt_text)
            if message.is_answer and not is_kept:
                parts = split_thought(message.prompt_text)
            text, calls = parts.answer, () if is_kept else message.calls
            if message.is_answer and not (is_kept or calls or text.strip()):
                continue
            text, seen = _with_places(text, message.pictures, pictures)
            if turns and turns[-1].role == message.role and not turns[-1].tool_calls:
                before = turns.pop()
                text, seen = f"{before.content}\n\n{text}", (*before.pictures, *seen)
            if calls:
                from app.chat.tool_use import call_turns  # late: most chats have no calls

                thought = parts.thought if number > max(questions, default=0) else None
                turns += call_turns(text, thought or "", calls)
            else:
                turns.append(ChatMessage(message.role, text, pictures=seen))
        return tuple(turns)

    @property
    def context_tokens(self) -> int:
        """Number of tokens in the context after the last answer; 0 if unknown."""
        known = (m.stats.context_tokens for m in reversed(self.messages) if m.stats)
        return next(filter(None, known), 0)

    def head(self) -> dict[str, Any]:
        """Return everything but the messages as JSON values, with unknown entries."""
        data: dict[str, Any] = plain(self)
        return data

    def to_json(self) -> dict[str, Any]:
        """Return the chat as JSON values, with all versions of its messages."""
        messages = [message.to_json() for message in self.tree]
        return {"schema": SCHEMA} | self.head() | {"messages": messages, "chosen": self.tree.chosen}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Conversation:
        """Return a chat stored by `to_json` or by an older version of Tandem.

        Raises:
            NewerChat: it was written by a newer version.
            ValueError: the data is not a chat.
        """
        try:
            schema = valid_number(data.get("schema", 1))
            if schema > SCHEMA:
                raise NewerChat(tr("it was written by a newer version of Tandem"))
            messages = [Message.from_json(item) for item in data["messages"]]
            if schema < 2:  # messages are a list
                messages = in_a_row(messages)
            return cls.of_parts(data, MessageTree(messages, data.get("chosen", ())))
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a chat: {error!r}") from error

    @classmethod
    def of_parts(cls, head: Mapping[str, Any], tree: MessageTree) -> Conversation:
        """Return the chat with this `head` and these messages.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: the head is invalid.
        """
        extra = unknown(head, cls)
        return cls(
            id=valid_text(head["id"]),
            title=valid_text(head["title"]),
            created=valid_time(head["created"]),
            updated=valid_time(head["updated"]),
            system_prompt=valid_text(head.get("system_prompt", "")),
            draft=valid_text(head.get("draft", "")),
            draft_files=_texts(head.get("draft_files")),
            draft_pictures=ChatImage.all_of(head.get("draft_pictures")),
            drops_oldest=head.get("drops_oldest") is True,
            sampling=dict(values) if isinstance(values := head.get("sampling"), dict) else None,
            effort=effort if (effort := head.get("effort")) in EFFORTS else "",
            thinks=thinks if isinstance(thinks := head.get("thinks"), bool) else None,
            uses_tools=head.get("uses_tools") is not False,
            servers_off=_texts(head.get("servers_off")),
            has_own_title=head.get("has_own_title") is True,
            tree=tree,
            extra={name: value for name, value in extra.items() if name not in OF_FILES},
        )


def _with_places(
    text: str, pictures: Sequence[ChatImage], file_of: ImageFiles
) -> tuple[str, tuple[ImageFile | str, ...]]:
    if not pictures:
        return text, ()
    files = [file_of(picture) for picture in pictures]
    places = [
        f"[{picture.title}]\n" if file is None else IMAGE_PLACEHOLDER
        for picture, file in zip(pictures, files, strict=True)
    ]
    text = "".join([*places, text.replace(IMAGE_PLACEHOLDER, "")]).rstrip("\n")
    return text, tuple(file for file in files if file is not None)


def _texts(value: object) -> tuple[str, ...]:
    found = value if isinstance(value, list | tuple) else ()
    return tuple(text for text in found if isinstance(text, str))


class NewerChat(ValueError):
    """A chat was written by a newer version of Tandem; the message completes a sentence."""


@dataclass(frozen=True, slots=True)
class DamagedChat:
    """An unreadable or damaged chat file; `why` completes a sentence."""

    path: Path
    why: str


@dataclass(frozen=True, slots=True)
class ChatSummary:
    """A chat's entry in the list; `updated` is in seconds since the epoch."""

    id: str
    title: str
    updated: float

    @classmethod
    def of(cls, chat: Conversation) -> ChatSummary:
        return cls(chat.id, chat.title, chat.updated)


def in_a_row(messages: Iterable[Message]) -> list[Message]:
    """Link messages into a single branch by ids and parents, and return them."""
    found = list(messages)
    for number, message in enumerate(found, 1):
        message.id, message.parent = number, number - 1
    return found


def title_from(text: str) -> str:
    """Return a title from a message's first line, cut between words."""
    line = " ".join(text.strip().partition("\n")[0].split())
    if len(line) <= TITLE_LENGTH:
        return line
    return line[:TITLE_LENGTH].rsplit(" ", 1)[0] + "…"


def valid_time(value: Any) -> float:
    """Return `value` as seconds since the epoch, if that is a valid date in every time zone.

    Raises:
        ValueError, TypeError, OverflowError: it is not.
    """
    seconds = float(value)
    if not 0.0 <= seconds <= LAST_SECOND:  # true for NaN, too
        raise ValueError(f"not a time: {value!r}")
    return seconds
