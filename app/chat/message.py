"""A turn of a conversation: its text and files, the figures of an answer, and its thought."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from app.chat.tool_use import ToolUse
from app.core.translation import tr
from engine import THINK_CLOSE, THINK_OPEN, Finished, one_line

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


MAX_PROMPT_NAME: Final = 120
"""Largest number of characters of a file's name in a prompt."""


STORED: Final = re.compile(r"[0-9a-f]{40}\.(?:png|jpg|webp|gif|bmp)")
"""Names of pictures in the folder of a chat: a hash and a suffix, and so no path."""

MAX_IMAGE_NAME: Final = 60
"""Largest number of characters of a name in a sentence."""


@dataclass(frozen=True, slots=True)
class ChatImage:
    """A picture that goes with a message.

    Attributes:
        name: name of the file that it came from, without its folder.
        file: name of its own file in the chat's folder of pictures.
        width, height: size in pixels, as it is to be seen.
        page: page of the document that it shows, from 1; 0 for a picture.
    """

    name: str
    file: str
    width: int
    height: int
    page: int = 0

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ChatImage:
        """Return the picture that a chat's file names.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: the data is none.
        """
        name, file = data["name"], data["file"]
        numbers = [data["width"], data["height"], data.get("page", 0)]
        if not isinstance(name, str) or not isinstance(file, str):
            raise TypeError("names expected")
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise TypeError("numbers expected")
        if not STORED.fullmatch(file) or 0 in numbers[:2]:
            raise ValueError("no picture")
        return cls(name, file, *numbers)

    @classmethod
    def all_of(cls, stored: Iterable[Mapping[str, Any]] | None) -> tuple[ChatImage, ...]:
        """Return the pictures that a chat's file names.

        What is none is left out: a chat is more than its pictures.

        Raises:
            TypeError: there is no list of pictures.
        """
        found = []
        for data in stored or ():
            with suppress(KeyError, TypeError, ValueError, AttributeError):
                found.append(cls.from_json(data))
        return tuple(found)

    @property
    def title(self) -> str:
        """The name in one line, and the page."""
        name = one_line(self.name, MAX_IMAGE_NAME)
        return tr("{name}, page {n}").format(name=name, n=self.page) if self.page else name

    @property
    def size(self) -> str:
        """The size in words."""
        return f"{self.width} x {self.height}"


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file, or a part of one, that goes with a message.

    Attributes:
        name: name of the file, without its folder.
        text: its text.
        n_bytes: size of the whole file.
        n_tokens: number of tokens of the text; 0 if unknown.
        part, n_parts: number of the part, from 1, and of all parts; both 1 for a whole file.
    """

    name: str
    text: str
    n_bytes: int = 0
    n_tokens: int = 0
    part: int = 1
    n_parts: int = 1

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Attachment:
        """Return the attachment that a chat's file holds.

        Raises:
            KeyError, TypeError, AttributeError: the data is none.
        """
        name, text = data["name"], data["text"]
        numbers = [data.get("n_bytes", 0), data.get("n_tokens", 0)]
        numbers += [data.get("part", 1), data.get("n_parts", 1)]
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError("a file's name and text expected")
        if not all(isinstance(number, int) for number in numbers):
            raise TypeError("numbers expected")
        return cls(name, text, *numbers)


def framed(text: str, attachments: Sequence[Attachment]) -> str:
    """Return the text of a message with its files in front of it, each between marks."""
    parts = []
    for file in attachments:
        name = one_line(file.name, MAX_PROMPT_NAME).replace('"', "'")
        part = f' part="{file.part} of {file.n_parts}"' if file.n_parts > 1 else ""
        parts.append(f'<file name="{name}"{part}>\n{file.text.strip(chr(10))}\n</file>')
    return "\n\n".join([*parts, text] if text else parts)


@dataclass(frozen=True, slots=True)
class AnswerStats:
    """Figures shown below an answer.

    Attributes:
        reason: reason why the answer ended.
        n_tokens: number of generated tokens.
        tokens_per_s: generation rate.
        first_token_s: time until the first token, in seconds.
        context_tokens: number of context tokens that the conversation filled afterwards; 0 where
            that is unknown, since the answer was cut off.
        n_drafted: number of draft tokens that were checked.
        n_accepted: number of draft tokens that were accepted.
        draft_gain: generation rate as a multiple of that without drafts; 1 where unknown.
        extra: what else a file said of the figures; it is written again as it was.
    """

    reason: str
    n_tokens: int
    tokens_per_s: float
    first_token_s: float
    context_tokens: int
    n_drafted: int = 0
    n_accepted: int = 0
    draft_gain: float = 1.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, finished: Finished) -> AnswerStats:
        usage, timings = finished.usage, finished.timings
        return cls(
            reason=finished.reason,
            n_tokens=usage.completion_tokens,
            tokens_per_s=timings.decode_per_s,
            first_token_s=timings.first_token_s,
            context_tokens=usage.total_tokens,
            n_drafted=usage.n_drafted,
            n_accepted=usage.n_accepted,
            draft_gain=round(timings.draft_gain, 2),
        )


@dataclass(slots=True)
class Message:
    """A turn of a conversation.

    Attributes:
        role: "user" or "assistant".
        content: text of the turn; of an answer with its thought block.
        stats: figures of an answer; None for a person's turn and while an answer is being written.
        thought_s: seconds that the model spent inside its thought block.
        thought_tokens: number of tokens of the thought; None where that is unknown.
        problem: sentence shown below an answer that ended in an error.
        id: number in its chat, from 1; 0 before it is in one.
        parent: id of the message that it follows; 0 for none.
        attachments: files that go with a person's turn.
        edited: whether a person has changed the text of an answer.
        calls: calls of tools that an answer asks for behind its text.
        pictures: pictures that go with a person's turn.
        extra: what else a file said of the turn; it is written again as it was.
    """

    role: str
    content: str
    stats: AnswerStats | None = None
    thought_s: float | None = None
    problem: str = ""
    id: int = 0
    parent: int = 0
    attachments: tuple[Attachment, ...] = ()
    edited: bool = False
    thought_tokens: int | None = None
    calls: tuple[ToolUse, ...] = ()
    pictures: tuple[ChatImage, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> Message:
        """Return a copy that does not change with this turn.

        A chat of thousands is copied in the window's thread whenever it is saved; this takes a
        quarter of the time of `replace`.
        """
        return Message(*_values_of(self))

    def to_json(self) -> dict[str, Any]:
        """Return the turn as values of JSON."""
        data: dict[str, Any] = plain(self)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Message:
        """Return the turn stored by `to_json`; one of schema 1 has neither id nor parent.

        Raises:
            ValueError, KeyError, TypeError, AttributeError, OverflowError: the data is no turn.
        """
        stats, seconds = data.get("stats"), data.get("thought_s")
        tokens = data.get("thought_tokens")
        return cls(
            role=valid_text(data["role"]),
            content=valid_text(data["content"]),
            stats=_stats(stats) if stats else None,
            thought_s=float(seconds) if seconds is not None else None,
            problem=valid_text(data.get("problem", "")),
            id=valid_number(data.get("id", 0)),
            parent=valid_number(data.get("parent", 0)),
            attachments=tuple(map(Attachment.from_json, data.get("attachments") or ())),
            edited=data.get("edited") is True,
            thought_tokens=valid_number(tokens) if tokens is not None else None,
            calls=tuple(map(ToolUse.from_json, data.get("calls") or ())),
            pictures=ChatImage.all_of(data.get("pictures")),
            extra=unknown(data, cls),
        )

    @property
    def prompt_text(self) -> str:
        """The text for the model: that of the attached files as well."""
        return framed(self.content, self.attachments)

    @property
    def has_files(self) -> bool:
        """Whether files or pictures go with the turn, which then needs no words."""
        return bool(self.attachments or self.pictures)

    @property
    def is_answer(self) -> bool:
        """Whether the model has written the turn."""
        return self.role == "assistant"

    @property
    def waits_for_calls(self) -> bool:
        """Whether calls of the message wait for a person, or run."""
        return any(call.is_open for call in self.calls)

    @property
    def has_results(self) -> bool:
        """Whether the message has calls and all have ended, so that the model can go on."""
        return bool(self.calls) and not any(
            call.is_open or call.state == "writing" for call in self.calls
        )

    def with_call(self, changed: ToolUse) -> None:
        """Put a call in the place of the one with the same id."""
        self.calls = tuple(changed if call.id == changed.id else call for call in self.calls)

    @property
    def is_cut_off(self) -> bool:
        """Whether a closed answer was ended by a failure, or with the program."""
        return self.stats is None or self.stats.reason == "failed"


_values_of: Final = attrgetter(*(field.name for field in fields(Message)))


@dataclass(frozen=True, slots=True)
class Thought:
    """An answer split into its thought (None for none, `is_open` if not finished) and its text."""

    thought: str | None
    answer: str
    is_open: bool = False


def split_thought(text: str) -> Thought:
    """Separate a leading thought block from the answer.

    Some templates open the block in the prompt, so that the text has only its end. The start of a
    tag is held back until it is complete, except for "<", which may be a whole answer.
    """
    start = text.lstrip()
    if start != "<" and len(start) < len(THINK_OPEN) and THINK_OPEN.startswith(start):
        return Thought(None, "")  # too early to tell
    begins = start.startswith(THINK_OPEN)
    body = start.removeprefix(THINK_OPEN) if begins else text
    thought, end, answer = body.partition(THINK_CLOSE)
    if end:
        return Thought(thought.strip(), answer.lstrip())
    return Thought(thought.lstrip(), "", is_open=True) if begins else Thought(None, text)


def with_answer(content: str, answer: str) -> str:
    """Return the text of a turn with another answer behind the same thought."""
    parts = split_thought(content)
    if parts.answer:
        return content.removesuffix(parts.answer) + answer
    return (
        answer if parts.thought is None else f"{THINK_OPEN}{parts.thought}{THINK_CLOSE}\n\n{answer}"
    )


def valid_text(value: object) -> str:
    """Return a value that is a text.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, str):
        raise TypeError(f"a text expected, not {value!r}")
    return value


def valid_number(value: object) -> int:
    """Return a value that is a whole number, not negative.

    Raises:
        TypeError, ValueError: it is none.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"a number expected, not {value!r}")
    if value < 0:
        raise ValueError(f"negative: {value}")
    return value


NOT_WRITTEN: Final = ("extra", "tree", "origin")
"""Fields that files do not have, or not by their names."""


@cache
def names_of(kind: type[DataclassInstance]) -> tuple[str, ...]:
    """Return the names of a type's fields that are written to files."""
    return tuple(field.name for field in fields(kind) if field.name not in NOT_WRITTEN)


def unknown(data: Mapping[str, Any], kind: type[DataclassInstance]) -> dict[str, Any]:
    """Return the values whose names are not those of a type's fields."""
    known = names_of(kind)
    return {name: value for name, value in data.items() if name not in known}


def plain(value: Any) -> Any:
    """Return a value, perhaps of data classes, as one of JSON.

    It is several times faster than `asdict`, and keeps what is `extra`.
    """
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if not is_dataclass(value) or isinstance(value, type):
        return value
    extra: Mapping[str, Any] = getattr(value, "extra", {})
    return {**extra, **{name: plain(getattr(value, name)) for name in names_of(type(value))}}


def _stats(data: Mapping[str, Any]) -> AnswerStats:
    return AnswerStats(
        reason=valid_text(data["reason"]),
        n_tokens=int(data["n_tokens"]),
        tokens_per_s=float(data["tokens_per_s"]),
        first_token_s=float(data["first_token_s"]),
        context_tokens=int(data["context_tokens"]),
        n_drafted=int(data.get("n_drafted", 0)),
        n_accepted=int(data.get("n_accepted", 0)),
        draft_gain=float(data.get("draft_gain", 1.0)),
        extra=unknown(data, AnswerStats),
    )
