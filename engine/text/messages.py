"""The turns of a conversation, as chat templates take them, and how thinking in them is marked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Literal

IMAGE_PLACEHOLDER = "\ufffc"
"""Character that stands for a picture in the text of a message that has some."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function that the assistant asks for.

    Attributes:
        arguments: text of a JSON object.
        id: name of the call, by which its result refers to it.
    """

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        description: what it does, for the model.
        parameters: JSON schema of its arguments, as text; "" for none.
    """

    name: str
    description: str = ""
    parameters: str = ""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A picture in a file of this machine, which is read when it is needed.

    Attributes:
        path: path of the file, whose content does not change.
    """

    path: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn: role is "system", "user", "assistant" or "tool".

    Attributes:
        reasoning: what the assistant has thought before its answer, without marks; templates get
            it as `reasoning_content`.
        tool_calls: calls that the assistant asks for behind its text.
        tool_call_id: name of the call whose result a "tool" message is.
        name: name of the function whose result it is, where it is known.
        pictures: pictures, or the bytes of their files as base64, see
            `images.reading.image_base64`. Each `IMAGE_PLACEHOLDER` in the text stands for the
            next one; those that are left come first.
    """

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    pictures: tuple[ImageFile | str, ...] = ()


def text_size(value: object) -> int:
    """Return the number of characters of all texts in a command, or in a part of one.

    Each item of a list counts as one as well, since many small texts take time, too.
    """
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(text_size, value.keys())) + sum(map(text_size, value.values()))
    if isinstance(value, tuple | list):
        return len(value) + sum(map(text_size, value))
    if is_dataclass(value):
        return sum(text_size(getattr(value, one.name)) for one in fields(value))
    return 0


THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Variables of templates: the name that Qwen and GLM use, and that of DeepSeek and Granite."""

EFFORT_VARIABLE = "reasoning_effort"
"""Variable of gpt-oss and others, which is "low", "medium" or "high"."""

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
"""Marks around a thought in the text of an answer, as most models write them."""

_ASKS = re.compile(
    r"\b(?:enable_thinking\b|thinking is defined\b|(?:if|not|and|or) thinking\b(?!\s*[=(.\[]))"
)


def can_think(template: str) -> bool:
    """Return whether a template's source asks for one of `THINKING_VARIABLES`."""
    return _ASKS.search(template) is not None


def has_effort(template: str) -> bool:
    """Return whether a template's source asks for `EFFORT_VARIABLE`."""
    return EFFORT_VARIABLE in template


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The texts between which a family of models thinks.

    Attributes:
        opening: text with which thinking begins.
        closing: texts that come behind it, in this order, before what is said.
        is_always: whether the texts of `closing` also come where the model does not think, so that
            what is said always has a beginning of its own.
    """

    opening: str
    closing: tuple[str, ...]
    is_always: bool = False


HARMONY_THINKING = ThinkingMarks(
    "<|channel|>analysis<|message|>", ("<|channel|>final", "<|message|>"), is_always=True
)
"""Marks of gpt-oss, whose answers are in channels."""

THINKING_MARKS = (
    ThinkingMarks(THINK_OPEN, (THINK_CLOSE,)),
    ThinkingMarks("[THINK]", ("[/THINK]",)),
    ThinkingMarks("<|channel>thought", ("<channel|>",)),
    ThinkingMarks("<seed:think>", ("</seed:think>",)),
    ThinkingMarks("<|START_THINKING|>", ("<|END_THINKING|>", "<|START_RESPONSE|>"), is_always=True),
    ThinkingMarks("<|inner_prefix|>", ("<|inner_suffix|>",)),
    ThinkingMarks("◁think▷", ("◁/think▷",)),
    ThinkingMarks("<reasoning>", ("</reasoning>",)),
    ThinkingMarks("<thought>", ("</thought>",)),
    ThinkingMarks("Here are my reasoning steps:", ("[BEGIN FINAL RESPONSE]",)),
)
"""Marks of others: of most, Magistral, Gemma 4, Seed-OSS, Command A, Apertus, Kimi-VL, two that
instructions ask for, and Apriel.
"""

ThinkingState = Literal["open", "possible", "over"]
"""Whether an answer begins within thinking, may begin with it, or does not."""


def thinking_marks(template: str) -> ThinkingMarks | None:
    """Return the marks of thinking that a template's source knows; None for none."""
    known = (
        marks
        for marks in (HARMONY_THINKING, *THINKING_MARKS)
        if marks.closing[0] in template or marks.opening in template
    )
    return next(known, None)


def thinking_state(
    prompt: str, marks: ThinkingMarks, thinks: bool | None, *, is_chat: bool
) -> ThinkingState:
    """Return whether a prompt's end has opened thinking, or the answer may.

    Args:
        prompt: end of a prompt, up to where the model's answer begins.
        thinks: whether the model was asked to think; None as its template has it.
        is_chat: whether the prompt comes from the model's template, and is no text to complete.
    """
    end = prompt.rstrip()
    if end.endswith(marks.closing[-1]):
        return "over"
    if end.endswith(marks.opening) or (is_chat and marks.is_always):
        return "open"
    return "possible" if is_chat and thinks is not False else "over"


class ThoughtMarker:
    """Writer of the parts of one answer as one text, with the thought in front between marks.

    Args:
        is_open: whether the answer goes on inside its thought.
        has_said: whether it goes on behind its thought.
    """

    def __init__(self, *, is_open: bool = False, has_said: bool = False) -> None:
        self._is_open, self._has_said = is_open, has_said

    def written(self, text: str, *, is_thought: bool) -> str:
        """Return more text with the marks it needs; a thought behind what was said gets none."""
        if is_thought and not self._has_said:
            opening = f"{THINK_OPEN}\n" if text and not self._is_open else ""
            self._is_open = self._is_open or bool(text)
            return opening + text
        if not text:
            return ""
        closing = self.closed()
        self._has_said = True
        return closing + text

    def closed(self) -> str:
        """Return the mark that ends an open thought; "" where none is open."""
        if not self._is_open:
            return ""
        self._is_open, self._has_said = False, True
        return f"\n{THINK_CLOSE}\n\n"


def thought_apart(message: ChatMessage) -> ChatMessage:
    """Return an answer whose thought, which stands in its text between marks, is apart."""
    start = message.content.lstrip()
    if message.reasoning or not start.startswith(THINK_OPEN):
        return message
    thought, _, said = start.removeprefix(THINK_OPEN).partition(THINK_CLOSE)
    return replace(message, reasoning=thought.strip(), content=said.lstrip())
