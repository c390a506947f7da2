"""A message in a conversation: text, files, tool calls, and the figures of an answer."""

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
MAX_IMAGE_NAME: Final = 60

STORED: Final = re.compile(r"[0-9a-f]{40}\.(?:png|jpg|webp|gif|bmp)")
"""File names of stored images: a hash and a suffix, hence never a path."""


@dataclass(frozen=True, slots=True)
class ChatImage:
    """An image in a message.

    Attributes:
        name: name of the original file, without its folder.
        file: name of the file stored in the chat's image folder.
        width, height: size in pixels, after rotation.
        page: number of the document page shown, starting at 1; 0 if it is not a page.
    """

    name: str
    file: str
    width: int
    height: int
    page: int = 0

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ChatImage:
        """Return an image from a chat's JSON.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: the data is invalid.
        """
        name, file = data["name"], data["file"]
        numbers = [data["width"], data["height"], data.get("page", 0)]
        if not isinstance(name, str) or not isinstance(file, str):
            raise TypeError("names expected")
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise TypeError("numbers expected")
        if not STORED.fullmatch(file) or 0 in numbers[:2]:
            raise ValueError("not an image")
        return cls(name, file, *numbers)

    @classmethod
    def all_of(cls, stored: Iterable[Mapping[str, Any]] | None) -> tuple[ChatImage, ...]:
        """Return the valid images from a chat's JSON (raises TypeError)."""
        found = []
        for data in stored or ():
            with suppress(KeyError, TypeError, ValueError, AttributeError):
                found.append(cls.from_json(data))
        return tuple(found)

    @property
    def title(self) -> str:
        """The name as a single line, with the page number, if any."""
        name = one_line(self.name, MAX_IMAGE_NAME)
        return tr("{name}, page {n}").format(name=name, n=self.page) if self.page else name

    @property
    def size(self) -> str:
        """The size as text."""
        return f"{self.width} x {self.height}"


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file attached to a message, or a part of a file.

    Attributes:
        name: name of the file, without its folder.
        n_bytes: size of the whole file.
        n_tokens: number of tokens in the text; 0 if unknown.
        part, n_parts: index of this part, from 1, and number of parts; both 1 for a whole file.
    """

    name: str
    text: str
    n_bytes: int = 0
    n_tokens: int = 0
    part: int = 1
    n_parts: int = 1

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Attachment:
        """Return an attachment from a chat's JSON.

        Raises:
            KeyError, TypeError, AttributeError: the data is invalid.
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
    """Return a message's files, each in a `<file>` element, followed by its text."""
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
        reason: why the answer stopped.
        n_tokens: number of generated tokens.
        tokens_per_s: generation rate.
        context_tokens: context tokens in use afterwards; 0 if the answer was cut off.
        n_drafted, n_accepted: number of draft tokens verified, and how many of them were accepted.
        draft_gain: speedup over decoding without drafts; 1 if unknown.
        extra: unknown entries of a file, written back unchanged.
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
    """A message in a conversation.

    Attributes:
        role: "user" or "assistant".
        content: its text; for an answer, including the thought block.
        stats: figures of a finished answer.
        thought_s: seconds spent in the thought block.
        thought_tokens: number of tokens in the thought; None if unknown.
        problem: sentence shown below an answer that failed.
        id: its id in the chat, from 1; 0 before it is added.
        parent: id of the previous message; 0 if there is none.
        edited: whether the user has edited the answer.
        calls: tool calls at the end of an answer.
        extra: unknown entries of a file, written back unchanged.
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
        """Return an independent copy."""
        return Message(*_values_of(self))  # 4x as fast as `replace`; saving blocks the GUI

    def to_json(self) -> dict[str, Any]:
        """Return the message as JSON values."""
        data: dict[str, Any] = plain(self)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Message:
        """Return a message stored by `to_json`; in schema 1, messages have neither id nor parent.

        Raises:
            ValueError, KeyError, TypeError, AttributeError, OverflowError: the data is invalid.
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
        """The text sent to the model, including the attached files."""
        return framed(self.content, self.attachments)

    @property
    def has_files(self) -> bool:
        """Whether the message has files or images, so that it needs no text."""
        return bool(self.attachments or self.pictures)

    @property
    def is_answer(self) -> bool:
        """Whether the message is from the model."""
        return self.role == "assistant"

    @property
    def waits_for_calls(self) -> bool:
        """Whether calls in the message are running or awaiting approval."""
        return any(call.is_open for call in self.calls)

    @property
    def has_results(self) -> bool:
        """Whether the message has calls and all have finished, so that the model can continue."""
        return bool(self.calls) and not any(
            call.is_open or call.state == "writing" for call in self.calls
        )

    def with_call(self, changed: ToolUse) -> None:
        """Replace the call with the same id."""
        self.calls = tuple(changed if call.id == changed.id else call for call in self.calls)

    @property
    def is_cut_off(self) -> bool:
        """Whether the message is a closed answer that a failure or crash interrupted."""
        return self.stats is None or self.stats.reason == "failed"


_values_of: Final = attrgetter(*(field.name for field in fields(Message)))


@dataclass(frozen=True, slots=True)
class Thought:
    """An answer split into thought (None if missing; `is_open` if unfinished) and text."""

    thought: str | None
    answer: str
    is_open: bool = False


def split_thought(text: str) -> Thought:
    """Separate a leading thought block from the answer.

    If the template opens the block in the prompt, the text has only its closing tag. A partial
    opening tag is withheld, except "<", which may be a whole answer.
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
    """Return a message's text with its answer replaced and its thought kept."""
    parts = split_thought(content)
    if parts.answer:
        return content.removesuffix(parts.answer) + answer
    return (
        answer if parts.thought is None else f"{THINK_OPEN}{parts.thought}{THINK_CLOSE}\n\n{answer}"
    )


def valid_text(value: object) -> str:
    """Return `value` if it is a str, else raise TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"a text expected, not {value!r}")
    return value


def valid_number(value: object) -> int:
    """Return `value` if it is a non-negative int, else raise TypeError or ValueError."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"a number expected, not {value!r}")
    if value < 0:
        raise ValueError(f"negative: {value}")
    return value


NOT_WRITTEN: Final = ("extra", "tree", "origin")
"""Fields that are not stored under their own names, or not at all."""


@cache
def names_of(kind: type[DataclassInstance]) -> tuple[str, ...]:
    """Return the names of a dataclass's stored fields."""
    return tuple(field.name for field in fields(kind) if field.name not in NOT_WRITTEN)


def unknown(data: Mapping[str, Any], kind: type[DataclassInstance]) -> dict[str, Any]:
    """Return the entries that are not fields of the dataclass `kind`."""
    known = names_of(kind)
    return {name: value for name, value in data.items() if name not in known}


def plain(value: Any) -> Any:
    """Convert dataclasses and their `extra` to JSON values, several times faster than `asdict`."""
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
