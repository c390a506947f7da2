"""Descriptions of the known forms, as data.

Sources: the chat templates that the models' files carry, and for gpt-oss OpenAI's description of
the harmony format. Names of functions are found up to 128 characters, so that no text is held back
for long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from engine.answer_forms.layout import AnswerLayout, read_layout
from engine.text.thinking import THINK_CLOSE, THINK_OPEN, ThinkingMarks

NAME = r"(?P<name>[\w./:-]{1,128})"
KEY = r"(?P<key>[\w./:-]{1,128})"
VALUE = r"(?P<value>.*?)"

OBJECT = {
    "type": "function",
    "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
}
LISTED = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
TEXT = {"repeats": True, "join": "\n"}

_MARK_KEYS = ("open", "close", "open_pattern", "close_pattern")


@dataclass(frozen=True, eq=False)
class AnswerFormat:
    """A form in which models write their answers.

    Attributes:
        name: name of the form.
        description: the form in the layout of `response_template`.
        argument: texts around the value of an argument in tags, with NAME in place of its name.
        resumed: text that may stand behind a thought, before a call.
        noise: texts outside of calls that mean nothing.
        is_bare: whether a call has no mark of its own, so that it must name a known function and
            stand where the answer begins.
        before: text before the arguments of a call, with NAME in place of its function.
        behind: text behind the arguments, without a token that ends the answer.
        between: text between two calls; None where an answer has one at most.
        around: text before the first call and behind the last.
        trigger: text with which a call begins, and behind which no answer goes on otherwise.
        thought: what stands before and behind a thought where an answer goes on behind it.
    """

    name: str
    description: Mapping[str, Any]
    before: str
    behind: str = ""
    between: str | None = ""
    around: tuple[str, str] = ("", "")
    trigger: str = ""
    thought: tuple[str, str] = (THINK_OPEN + "\n", "\n" + THINK_CLOSE + "\n\n")
    argument: tuple[str, str] = ("", "")
    resumed: str = ""
    noise: tuple[str, ...] = ()
    is_bare: bool = False

    @cached_property
    def layout(self) -> AnswerLayout:
        """The description, read."""
        return read_layout(self.description)

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


def _described(calls: Mapping[str, Any], **others: Mapping[str, Any]) -> dict[str, Any]:
    """Return a description whose thinking and content are as most models have them."""
    fields = {
        "reasoning_content": TEXT | {"open": THINK_OPEN, "close": THINK_CLOSE},
        "content": TEXT,
        **others,
        "tool_calls": {"repeats": True, **calls},
    }
    return {"version": 1, "start_anchor": "<|assistant|>", "defaults": {}, "fields": fields}


HERMES = AnswerFormat(
    "hermes",
    _described(
        {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "transform": OBJECT}
    ),
    before='<tool_call>\n{"name": "NAME", "arguments": ',
    behind="}\n</tool_call>",
    between="\n",
    trigger="<tool_call>",
)
QWEN_CODER = AnswerFormat(
    "qwen_coder",
    _described(
        {
            "open_pattern": rf"(?:<tool_call>\s*)?<function={NAME}>",
            "close_pattern": r"</function>(?:\s*</tool_call>)?",
            "content": "xml-inline",
            "content_args": {"tag_pattern": rf"<parameter={KEY}>\n?{VALUE}\n?</parameter>"},
            "transform": NAMED,
        }
    ),
    before="<tool_call>\n<function=NAME>\n",
    argument=("<parameter=NAME>\n", "\n</parameter>\n"),
    behind="</function>\n</tool_call>",
    between="\n",
    trigger="<tool_call>",
)
GLM = AnswerFormat(
    "glm",
    _described(
        {
            "open_pattern": rf"<tool_call>{NAME}",
            "close": "</tool_call>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": rf"<arg_key>{KEY}</arg_key>\s*<arg_value>{VALUE}</arg_value>",
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
            "transform": NAMED,
        }
    ),
    before="<tool_call>NAME\n",
    argument=("<arg_key>NAME</arg_key>\n<arg_value>", "</arg_value>\n"),
    behind="</tool_call>",
    between="\n",
    trigger="<tool_call>",
)
LLAMA = AnswerFormat(
    "llama",
    _described(
        {
            "open_pattern": rf'(?:<\|python_tag\|>)?\{{\s*"name":\s*"{NAME}",\s*"parameters":',
            "close_pattern": r"\}\s*(?:;|\Z)",
            "content": "json",
            "transform": NAMED,
        }
    ),
    before='{"name": "NAME", "parameters": ',
    behind="}",
    between=None,
    noise=("<|python_tag|>",),
    is_bare=True,
)
MISTRAL = AnswerFormat(
    "mistral",
    _described(
        {
            "open": "[TOOL_CALLS]",
            "content": "json",
            "transform": LISTED,
            "transform_each": True,
        },
        reasoning_content=TEXT | {"open": "[THINK]", "close": "[/THINK]"},
    ),
    before='{"name": "NAME", "arguments": ',
    behind="}",
    between=", ",
    around=("[TOOL_CALLS][", "]"),
    trigger="[TOOL_CALLS]",
    thought=("[THINK]", "[/THINK]"),
)
MISTRAL_ARGS = AnswerFormat(
    "mistral_args",
    _described(
        {
            "open_pattern": rf"\[TOOL_CALLS\]\s*{NAME}(?:\[CALL_ID\][\w-]{{1,64}})?(?:\[ARGS\])?",
            "content": "json",
            "transform": NAMED,
        },
        reasoning_content=TEXT | {"open": "[THINK]", "close": "[/THINK]"},
    ),
    before="[TOOL_CALLS]NAME[ARGS]",
    trigger="[TOOL_CALLS]",
    thought=("[THINK]", "[/THINK]"),
)
HARMONY = AnswerFormat(
    "harmony",
    _described(
        {
            "open_pattern": (
                r"(?:<\|start\|>assistant)?(?:<\|channel\|>(?:commentary|analysis))?"
                rf" to=functions\.{NAME}(?:<\|channel\|>(?:commentary|analysis))?"
                r"\s*(?:<\|constrain\|>)?(?:json)?<\|message\|>"
            ),
            "close_pattern": r"<\|call\|>|<\|end\|>",
            "content": "json",
            "transform": NAMED,
        },
        reasoning_content=TEXT
        | {
            "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
            "close": "<|end|>",
        },
        content=TEXT
        | {
            "open_pattern": (
                r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)"
                r"\s*(?:<\|constrain\|>[\w-]{1,64})?<\|message\|>"
            ),
            "close_pattern": r"<\|end\|>|<\|return\|>",
        },
    ),
    before="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
    resumed="<|start|>assistant",
    between=None,
    trigger="<|channel|>commentary to=functions.",
    thought=(
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
    noise=("<|start|>assistant",),
)
DEEPSEEK = AnswerFormat(
    "deepseek",
    _described(
        {
            "open_pattern": rf"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\s*```json",
            "close_pattern": r"```\s*<｜tool▁call▁end｜>",
            "content": "json",
            "transform": NAMED,
        }
    ),
    before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
    behind="\n```<｜tool▁call▁end｜>",
    between="\n",
    around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    trigger="<｜tool▁calls▁begin｜>",
    noise=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
DEEPSEEK_V31 = AnswerFormat(
    "deepseek_v31",
    _described(
        {
            "open_pattern": rf"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>",
            "close": "<｜tool▁call▁end｜>",
            "content": "json",
            "transform": NAMED,
        }
    ),
    before="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
    behind="<｜tool▁call▁end｜>",
    around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    trigger="<｜tool▁calls▁begin｜>",
    noise=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
GEMMA = AnswerFormat(
    "gemma4",
    _described(
        {
            "open_pattern": rf"<\|tool_call>call:{NAME}",
            "close": "<tool_call|>",
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": NAMED,
        },
        reasoning_content=TEXT | {"open": "<|channel>thought", "close": "<channel|>"},
    ),
    before="<|tool_call>call:NAME",
    behind="<tool_call|>",
    trigger="<|tool_call>",
    thought=("<|channel>thought\n", "\n<channel|>"),
)

KNOWN_FORMS = (
    QWEN_CODER, GLM, HERMES, MISTRAL, MISTRAL_ARGS, HARMONY, DEEPSEEK, DEEPSEEK_V31, GEMMA, LLAMA,
)  # fmt: skip
"""All forms, in the order in which a template's own call is tried with them."""
