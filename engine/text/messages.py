"""The messages of a conversation, and the tags around thinking."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Literal

IMAGE_PLACEHOLDER = "\ufffc"  # character that represents an image in the text of a message


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call requested by the assistant, with arguments as JSON text and an id for its
    result."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments, or
    ""."""

    name: str
    description: str = ""
    parameters: str = ""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image file on this machine, which is read when used; its content must not change."""

    path: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn: role is "system", "user", "assistant" or "tool".

    Attributes:
        reasoning: the assistant's thinking before its answer, without tags; templates get it as
            `reasoning_content`.
        tool_calls: calls that the assistant requests after its text.
        tool_call_id: id of the call that a "tool" message answers.
        name: name of that function, if known.
        pictures: image files, or their bytes as base64; see `images.reading.image_base64`. Each
            `IMAGE_PLACEHOLDER` in the text represents the next one; images without a placeholder
            come first.
    """

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    pictures: tuple[ImageFile | str, ...] = ()


def text_size(value: object) -> int:
    """Return the total number of characters in the texts of a command, or of part of a command.

    Each list item adds one, because many small texts take time as well.
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
"""Template variables for thinking: Qwen's and GLM's, and DeepSeek's and Granite's."""

EFFORT_VARIABLE = "reasoning_effort"
"""Template variable of gpt-oss and others: "low", "medium" or "high"."""

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
"""Tags around thinking in an answer, as most models write them."""

_USES_THINKING = re.compile(
    r"\b(?:enable_thinking\b|thinking is defined\b|(?:if|not|and|or) thinking\b(?!\s*[=(.\[]))"
)


def can_think(template: str) -> bool:
    """Return whether a template's source uses one of `THINKING_VARIABLES`."""
    return _USES_THINKING.search(template) is not None


def has_effort(template: str) -> bool:
    """Return whether a template's source uses `EFFORT_VARIABLE`."""
    return EFFORT_VARIABLE in template


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The tags around thinking in a family of models.

    Attributes:
        opening: text that starts thinking.
        closing: texts that follow it, in this order, before the answer.
        is_always: whether the `closing` texts are written even without thinking, so that every
            answer has an explicit beginning.
    """

    opening: str
    closing: tuple[str, ...]
    is_always: bool = False


HARMONY_THINKING = ThinkingMarks(
    "<|channel|>analysis<|message|>", ("<|channel|>final", "<|message|>"), is_always=True
)
"""Tags of gpt-oss, which answers in channels."""

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
"""Tags of other models: of most, Magistral, Gemma 4, Seed-OSS, Command A, Apertus, Kimi-VL, two
that instructions request, and Apriel."""

ThinkingState = Literal["open", "possible", "over"]
"""Whether an answer begins inside thinking, may begin with it, or does not."""


def thinking_marks(template: str) -> ThinkingMarks | None:
    """Return the thinking tags in a template's source, or None."""
    known = (
        marks
        for marks in (HARMONY_THINKING, *THINKING_MARKS)
        if marks.closing[0] in template or marks.opening in template
    )
    return next(known, None)


def thinking_state(
    prompt: str, marks: ThinkingMarks, thinks: bool | None, *, is_chat: bool
) -> ThinkingState:
    """Return whether thinking is open at the end of a prompt, or may follow.

    Args:
        prompt: end of a prompt, up to where the answer begins.
        thinks: whether thinking was requested; None for the template's default.
        is_chat: whether the prompt comes from the model's template and is not text to complete.
    """
    end = prompt.rstrip()
    if end.endswith(marks.closing[-1]):
        return "over"
    if end.endswith(marks.opening) or (is_chat and marks.is_always):
        return "open"
    return "possible" if is_chat and thinks is not False else "over"


class ThoughtMarker:
    """Formatter of one answer as a single text, with its thinking between tags.

    A continued answer may be inside its thinking (`is_open`) or after it (`has_said`).
    """

    def __init__(self, *, is_open: bool = False, has_said: bool = False) -> None:
        self._is_open, self._has_said = is_open, has_said

    def written(self, text: str, *, is_thought: bool) -> str:
        """Return further text with the necessary tags; thinking after content gets none."""
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
        """Return the tag that ends open thinking, or ""."""
        if not self._is_open:
            return ""
        self._is_open, self._has_said = False, True
        return f"\n{THINK_CLOSE}\n\n"


def thought_apart(message: ChatMessage) -> ChatMessage:
    """Return an answer with its thinking moved from tags in its content to `reasoning`."""
    start = message.content.lstrip()
    if message.reasoning or not start.startswith(THINK_OPEN):
        return message
    thought, _, content = start.removeprefix(THINK_OPEN).partition(THINK_CLOSE)
    return replace(message, reasoning=thought.strip(), content=content.lstrip())
