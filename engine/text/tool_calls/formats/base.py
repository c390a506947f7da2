"""What a description of a form consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from engine.text.thinking import THINK_CLOSE, THINK_OPEN, ThinkingMarks
from engine.text.tool_calls.layout import AnswerLayout, read_layout

NAME = r"(?P<name>[\w./:-]{1,128})"
KEY = r"(?P<key>[\w./:-]{1,128})"
VALUE = r"(?P<value>.*?)"

OBJECT = {
    "type": "function",
    "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
}
LISTED = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
JSON_BEHIND_NAME = {"content": "json", "transform": NAMED}
TAGS_BEHIND_NAME = {"content": "xml-inline", "transform": NAMED}
TEXT = {"repeats": True, "join": "\n"}

_MARK_KEYS = ("open", "close", "open_pattern", "close_pattern")


@dataclass(frozen=True, eq=False)
class AnswerFormat:
    """A form in which models write their answers.

    Attributes:
        name: name of the form.
        description: the form in the layout of `response_template`.
        argument: texts around the value of an argument in tags, with NAME in place of its name and
            IS_TEXT in place of "true" for text and "false" for JSON.
        resumed: text that may stand behind a thought, before a call.
        noise: texts outside of calls that mean nothing.
        is_bare: whether a call has no mark of its own, so that it must name a known function and
            stand where the answer begins.
        around_name: patterns of what stands before and behind the name of a bare call, up to its
            arguments, however it is spaced.
        before: text before the arguments of a call, with NAME in place of its function and INDEX
            in place of a number.
        behind: text behind the arguments, without a token that ends the answer.
        between: text between two calls; None where an answer has one at most.
        around: text before the first call and behind the last.
        call_id: name of a call in a conversation, with NAME and INDEX, where the model knows calls
            by such names.
        trigger: text with which a call begins, and behind which no answer goes on otherwise.
        thought: what stands before and behind a thought where an answer goes on behind it.
    """

    name: str
    description: Mapping[str, Any]
    before: str
    behind: str = ""
    between: str | None = ""
    around: tuple[str, str] = ("", "")
    call_id: str = ""
    trigger: str = ""
    thought: tuple[str, str] = (THINK_OPEN + "\n", "\n" + THINK_CLOSE + "\n\n")
    argument: tuple[str, str] = ("", "")
    resumed: str = ""
    noise: tuple[str, ...] = ()
    is_bare: bool = False
    around_name: tuple[str, str] = ("", "")

    @cached_property
    def layout(self) -> AnswerLayout:
        """The description, read."""
        return read_layout(self.description)

    @property
    def has_json_arguments(self) -> bool:
        """Whether the format writes the arguments of a call as JSON."""
        calls = self.layout.calls
        return calls is not None and calls.kind != "tags" and not calls.dialect.has_bare_keys

    def with_thinking(self, opening: str, closing: str) -> AnswerFormat:
        """Return the form with other marks around what is thought."""
        thinking = TEXT | {"open": opening, "close": closing}
        fields = self.description["fields"] | {"reasoning_content": thinking}
        thought = (opening + "\n", "\n" + closing + "\n\n")
        return replace(self, description={**self.description, "fields": fields}, thought=thought)

    @property
    def thinking_marks(self) -> ThinkingMarks:
        """Marks of a thought, behind which anything may come."""
        closing = self.description["fields"]["reasoning_content"]["close"]
        return ThinkingMarks(self.thought[0].strip(), (closing,))

    @property
    def marks(self) -> str:
        """All texts of the form one after another, so that a token in it can be found."""
        patterns: list[str] = []
        for field in self.description["fields"].values():
            marks = (field.get(key, "") for key in _MARK_KEYS)
            patterns += [mark.replace("\\", "") for mark in marks]
            quotes = field.get("content_args", {}).get("string_delims", [])
            patterns += [text for pair in quotes for text in pair]
        return "\n".join([*patterns, *self.noise, *self.around, self.before, self.behind])


def filled(text: str, name: str, index: int = 0) -> str:
    """Return a text of a form with the name of a function and the number of a call in it."""
    return text.replace("INDEX", str(index)).replace("NAME", name)


def described(calls: Mapping[str, Any], **others: Mapping[str, Any]) -> dict[str, Any]:
    """Return a description whose thinking and content are as most models have them."""
    fields = {
        "reasoning_content": TEXT | {"open": THINK_OPEN, "close": THINK_CLOSE},
        "content": TEXT,
        **others,
        "tool_calls": {"repeats": True, **calls},
    }
    return {"version": 1, "start_anchor": "<|assistant|>", "defaults": {}, "fields": fields}
