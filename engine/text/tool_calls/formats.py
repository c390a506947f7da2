"""Formats of answers as data: how models mark thinking, content and calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from engine.text.messages import THINK_CLOSE, THINK_OPEN, ThinkingMarks
from engine.text.tool_calls.json_text import JSON, Dialect
from engine.text.tool_calls.marks import AnswerMark

VALUE = "(?P<value>.*?)"
"""Group for an argument's value in a `tag_pattern`.

If a preceding group `is_text` is "true", the value is text, even if it looks like JSON.
"""

CallKind = Literal["object", "list", "arguments", "tags"]
"""Content of calls: an object with name and arguments, a list of such objects, or a name in the
mark, followed by the arguments as one object or each in tags."""


@dataclass(frozen=True, slots=True)
class AnswerRegion:
    """A part of an answer between marks; `join` is the text between two such regions."""

    part: Literal["reasoning", "content", "call"]
    opening: AnswerMark | None
    closing: AnswerMark | None
    join: str = ""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Format of the contents of call regions.

    Attributes:
        value_opening, value_closing: marks around an argument's value in tags.
        has_json_values: whether values of unknown type in tags are parsed as JSON if possible.
    """

    kind: CallKind
    dialect: Dialect = JSON
    value_opening: AnswerMark | None = None
    value_closing: AnswerMark | None = None
    has_json_values: bool = False


@dataclass(frozen=True, slots=True)
class AnswerLayout:
    """The parsed description of a format: regions with an opening mark, the text that joins two
    pieces of content, and the format of calls, if any."""

    regions: tuple[AnswerRegion, ...]
    join: str
    calls: CallFormat | None


def read_layout(description: Mapping[str, Any]) -> AnswerLayout:
    """Parse a `response_template`.

    Raises:
        ValueError: it contains something unknown.
    """
    fields = description["fields"]
    unknown = set(fields) - {"reasoning_content", "content", "tool_calls"}
    if unknown:
        raise ValueError(f"unknown fields: {sorted(unknown)}")
    parts: dict[str, Literal["reasoning", "content", "call"]] = {
        "reasoning_content": "reasoning", "content": "content", "tool_calls": "call",
    }  # fmt: skip
    regions = []
    for name, part in parts.items():
        if name in fields and (opening := _mark(fields[name], "open")):
            closing = _mark(fields[name], "close")
            regions.append(AnswerRegion(part, opening, closing, fields[name].get("join", "")))
    calls = _calls(fields["tool_calls"]) if "tool_calls" in fields else None
    return AnswerLayout(tuple(regions), fields.get("content", {}).get("join", ""), calls)


def _mark(field: Mapping[str, Any], side: str) -> AnswerMark | None:
    if side in field:
        return AnswerMark(field[side], is_text=True)
    pattern = field.get(side + "_pattern")
    return None if pattern is None else AnswerMark(pattern)


def _calls(field: Mapping[str, Any]) -> CallFormat:
    options = field.get("content_args", {})
    if field["content"] == "xml-inline":
        opening, closing = options["tag_pattern"].split(VALUE)
        is_json = options.get("value_parser", {}).get("name") == "json"
        return CallFormat("tags", JSON, AnswerMark(opening), AnswerMark(closing), is_json)
    if field["content"] != "json":
        raise ValueError(f"calls in {field['content']!r}")
    quotes = tuple((opening, closing) for opening, closing in options.get("string_delims", []))
    dialect = Dialect(options.get("unquoted_keys", False), quotes)
    if field.get("transform_each"):
        return CallFormat("list", dialect)
    is_named = field["transform"]["function"]["name"] == "{name}"
    return CallFormat("arguments" if is_named else "object", dialect)


NAME = r"(?P<name>[\w./:-]{1,128})"
KEY = r"(?P<key>[\w./:-]{1,128})"


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
    """A format in which models write their answers.

    Attributes:
        description: the format in the layout of `response_template`.
        argument: texts around an argument's value in tags, with NAME for its name and IS_TEXT for
            "true" (text) or "false" (JSON).
        resumed: text that may follow thinking, before a call.
        noise: meaningless texts that may appear outside calls.
        is_bare: whether a call has no mark, so that it must name a known function and start the
            answer.
        around_name: patterns before and after the name of a bare call, up to its arguments, with
            any spacing.
        before: text before a call's arguments, with NAME for its function and INDEX for its index.
        behind: text after the arguments, excluding a token that ends the answer.
        between: text between two calls; None if an answer has at most one.
        around: text before the first call and after the last.
        call_id: id of a call in a conversation, with NAME and INDEX, if the model expects such ids.
        trigger: text that starts a call and commits the answer to a call.
        thought: texts before and after thinking in an answer that continues after it.
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
        """The parsed description."""
        return read_layout(self.description)

    @property
    def has_json_arguments(self) -> bool:
        """Whether the arguments of a call are JSON."""
        calls = self.layout.calls
        return calls is not None and calls.kind != "tags" and not calls.dialect.has_bare_keys

    def with_thinking(self, opening: str, closing: str) -> AnswerFormat:
        """Return the format with other marks around thinking."""
        thinking = TEXT | {"open": opening, "close": closing}
        fields = self.description["fields"] | {"reasoning_content": thinking}
        thought = (opening + "\n", "\n" + closing + "\n\n")
        return replace(self, description={**self.description, "fields": fields}, thought=thought)

    @property
    def thinking_marks(self) -> ThinkingMarks:
        """Marks around thinking, after which anything may follow."""
        closing = self.description["fields"]["reasoning_content"]["close"]
        return ThinkingMarks(self.thought[0].strip(), (closing,))

    @property
    def marks(self) -> str:
        """All texts of the format, concatenated, to search for tokens."""
        patterns: list[str] = []
        for field in self.description["fields"].values():
            marks = (field.get(key, "") for key in _MARK_KEYS)
            patterns += [mark.replace("\\", "") for mark in marks]
            quotes = field.get("content_args", {}).get("string_delims", [])
            patterns += [text for pair in quotes for text in pair]
        return "\n".join([*patterns, *self.noise, *self.around, self.before, self.behind])


def filled(text: str, name: str, index: int = 0) -> str:
    """Return a format's text with the function's name and the call's index filled in."""
    return text.replace("INDEX", str(index)).replace("NAME", name)


def described(calls: Mapping[str, Any], **others: Mapping[str, Any]) -> dict[str, Any]:
    """Return a description with the usual marks for thinking and content."""
    fields = {
        "reasoning_content": TEXT | {"open": THINK_OPEN, "close": THINK_CLOSE},
        "content": TEXT,
        **others,
        "tool_calls": {"repeats": True, **calls},
    }
    return {"version": 1, "start_anchor": "<|assistant|>", "defaults": {}, "fields": fields}


HERMES = AnswerFormat(
    "hermes",
    described(
        {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "transform": OBJECT}
    ),
    before='<tool_call>\n{"name": "NAME", "arguments": ',
    behind="}\n</tool_call>",
    between="\n",
    trigger="<tool_call>",
)
MISTRAL = AnswerFormat(
    "mistral",
    described(
        {"open": "[TOOL_CALLS]", "content": "json", "transform": LISTED, "transform_each": True},
        reasoning_content=TEXT | {"open": "[THINK]", "close": "[/THINK]"},
    ),
    before='{"name": "NAME", "arguments": ',
    behind="}",
    between=", ",
    around=("[TOOL_CALLS][", "]"),
    trigger="[TOOL_CALLS]",
    thought=("[THINK]", "[/THINK]"),
)


def _listed(name: str, opening: str, closing: str) -> AnswerFormat:
    field = {"open": opening, "content": "json", "transform": LISTED, "transform_each": True}
    return AnswerFormat(
        name,
        described({**field, "close": closing} if closing else field),
        before='{"name": "NAME", "arguments": ',
        behind="}",
        between=", ",
        around=(opening + "[", "]" + closing),
        trigger=opening,
    )


NEMOTRON = _listed("nemotron", "<TOOLCALL>", "</TOOLCALL>")
APRIEL = _listed("apriel", "<tool_calls>", "</tool_calls>")
GRANITE = _listed("granite", "<|tool_call|>", "")
COHERE = AnswerFormat(
    "cohere",
    described(
        {
            "open": "<|START_ACTION|>",
            "close": "<|END_ACTION|>",
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{tool_name}", "arguments": "{parameters}"},
            },
            "transform_each": True,
        },
        reasoning_content=TEXT | {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
        content=TEXT
        | {
            "open_pattern": r"<\|START_(?:RESPONSE|TEXT)\|>",
            "close_pattern": r"<\|END_(?:RESPONSE|TEXT)\|>",
        },
    ),
    before='{"tool_call_id": "INDEX", "tool_name": "NAME", "parameters": ',
    behind="}",
    between=",\n    ",
    around=("<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"),
    trigger="<|START_ACTION|>",
    thought=("<|START_THINKING|>", "<|END_THINKING|><|START_RESPONSE|>"),
)
GIGACHAT = AnswerFormat(
    "gigachat",
    described({"open": "<|function_call|>", "content": "json", "transform": OBJECT}),
    before='<|function_call|>{"name": "NAME", "arguments": ',
    behind="}",
    between=None,
    trigger="<|function_call|>",
)


_S = r"[ \t\r\n]{0,40}"
_LLAMA_LEAD = rf'\{{{_S}(?:"type"{_S}:{_S}"function"{_S},{_S})?"name"{_S}:{_S}"'
_LLAMA_TAIL = rf'"{_S},{_S}"parameters"{_S}:'
LLAMA = AnswerFormat(
    "llama",
    described(
        JSON_BEHIND_NAME
        | {
            "open_pattern": rf"(?:<\|python_tag\|>)?{_LLAMA_LEAD}{NAME}{_LLAMA_TAIL}",
            "close_pattern": r"\}\s*(?:;|\Z)",
        }
    ),
    before='{"name": "NAME", "parameters": ',
    behind="}",
    between=None,
    noise=("<|python_tag|>",),
    is_bare=True,
    around_name=(_LLAMA_LEAD, _LLAMA_TAIL),
)
MISTRAL_ARGS = AnswerFormat(
    "mistral_args",
    described(
        JSON_BEHIND_NAME
        | {"open_pattern": rf"\[TOOL_CALLS\]\s*{NAME}(?:\[CALL_ID\][\w-]{{1,64}})?(?:\[ARGS\])?"},
        reasoning_content=TEXT | {"open": "[THINK]", "close": "[/THINK]"},
    ),
    before="[TOOL_CALLS]NAME[ARGS]",
    trigger="[TOOL_CALLS]",
    thought=("[THINK]", "[/THINK]"),
)
HARMONY = AnswerFormat(
    "harmony",
    described(
        JSON_BEHIND_NAME
        | {
            "open_pattern": (
                r"(?:<\|start\|>assistant)?(?:<\|channel\|>(?:commentary|analysis))?"
                rf" to=functions\.{NAME}(?:<\|channel\|>(?:commentary|analysis))?"
                r"\s*(?:<\|constrain\|>)?(?:json)?<\|message\|>"
            ),
            "close_pattern": r"<\|call\|>|<\|end\|>",
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
    described(
        JSON_BEHIND_NAME
        | {
            "open_pattern": rf"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\s*```json",
            "close_pattern": r"```\s*<｜tool▁call▁end｜>",
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
    described(
        JSON_BEHIND_NAME
        | {
            "open_pattern": rf"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>",
            "close": "<｜tool▁call▁end｜>",
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
    described(
        JSON_BEHIND_NAME
        | {
            "open_pattern": rf"<\|tool_call>call:{NAME}",
            "close": "<tool_call|>",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        },
        reasoning_content=TEXT | {"open": "<|channel>thought", "close": "<channel|>"},
    ),
    before="<|tool_call>call:NAME",
    behind="<tool_call|>",
    trigger="<|tool_call>",
    thought=("<|channel>thought\n", "\n<channel|>"),
)
KIMI = AnswerFormat(
    "kimi",
    described(
        JSON_BEHIND_NAME
        | {
            "open_pattern": (
                r"<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[\w./-]{1,128}):[0-9]{1,9}"
                r"\s*<\|tool_call_argument_begin\|>"
            ),
            "close": "<|tool_call_end|>",
        }
    ),
    before="<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>",
    behind="<|tool_call_end|>",
    around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    call_id="functions.NAME:INDEX",
    trigger="<|tool_calls_section_begin|>",
    noise=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)
FUNCTION_GEMMA = AnswerFormat(
    "function_gemma",
    described(
        JSON_BEHIND_NAME
        | {
            "open_pattern": rf"<start_function_call>call:{NAME}",
            "close": "<end_function_call>",
            "content_args": {"unquoted_keys": True, "string_delims": [["<escape>", "<escape>"]]},
        }
    ),
    before="<start_function_call>call:NAME",
    behind="<end_function_call>",
    trigger="<start_function_call>",
)
FUNCTIONARY = AnswerFormat(
    "functionary",
    described(JSON_BEHIND_NAME | {"open_pattern": rf"<function={NAME}>", "close": "</function>"}),
    before="<function=NAME>",
    behind="</function>",
    trigger="<function=",
)


QWEN_CODER = AnswerFormat(
    "qwen_coder",
    described(
        TAGS_BEHIND_NAME
        | {
            "open_pattern": rf"(?:<tool_call>\s*)?<function={NAME}>",
            "close_pattern": r"</function>(?:\s*</tool_call>)?",
            "content_args": {"tag_pattern": rf"<parameter={KEY}>\n?{VALUE}\n?</parameter>"},
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
    described(
        TAGS_BEHIND_NAME
        | {
            "open_pattern": rf"<tool_call>{NAME}",
            "close": "</tool_call>",
            "content_args": {
                "tag_pattern": rf"<arg_key>{KEY}</arg_key>\s*<arg_value>{VALUE}</arg_value>",
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
        }
    ),
    before="<tool_call>NAME\n",
    argument=("<arg_key>NAME</arg_key>\n<arg_value>", "</arg_value>\n"),
    behind="</tool_call>",
    between="\n",
    trigger="<tool_call>",
)
SEED = AnswerFormat(
    "seed",
    described(
        TAGS_BEHIND_NAME
        | {
            "open_pattern": rf"<seed:tool_call>\s*<function={NAME}>",
            "close_pattern": r"</function>(?:\s*</seed:tool_call>)?",
            "content_args": {"tag_pattern": rf"<parameter={KEY}>{VALUE}</parameter>"},
        },
        reasoning_content=TEXT | {"open": "<seed:think>", "close": "</seed:think>"},
    ),
    before="<seed:tool_call>\n<function=NAME>\n",
    argument=("<parameter=NAME>", "</parameter>\n"),
    behind="</function>\n</seed:tool_call>",
    between="\n",
    trigger="<seed:tool_call>",
    thought=("<seed:think>", "</seed:think>\n"),
)
MINIMAX = AnswerFormat(
    "minimax",
    described(
        TAGS_BEHIND_NAME
        | {
            "open_pattern": rf'(?:<minimax:tool_call>\s*)?<invoke name="{NAME}">',
            "close_pattern": r"</invoke>(?:\s*</minimax:tool_call>)?",
            "content_args": {"tag_pattern": rf'<parameter name="{KEY}">{VALUE}</parameter>'},
        }
    ),
    before='<invoke name="NAME">\n',
    argument=('<parameter name="NAME">', "</parameter>\n"),
    behind="</invoke>\n",
    around=("<minimax:tool_call>\n", "</minimax:tool_call>"),
    trigger="<minimax:tool_call>",
)


def _dsml(name: str, section: str) -> AnswerFormat:
    opening, closing = f"<｜DSML｜{section}>", f"</｜DSML｜{section}>"
    parameter = rf'<｜DSML｜parameter name="{KEY}" string="(?P<is_text>true|false)">'
    return AnswerFormat(
        name,
        described(
            TAGS_BEHIND_NAME
            | {
                "open_pattern": rf'(?:{opening}\s*)?<｜DSML｜invoke name="{NAME}">',
                "close_pattern": rf"</｜DSML｜invoke>(?:\s*{closing})?",
                "content_args": {
                    "tag_pattern": rf"{parameter}{VALUE}</｜DSML｜parameter>",
                    "value_parser": {"name": "json", "args": {"allow_non_json": True}},
                },
            }
        ),
        before='<｜DSML｜invoke name="NAME">\n',
        argument=('<｜DSML｜parameter name="NAME" string="IS_TEXT">', "</｜DSML｜parameter>\n"),
        behind="</｜DSML｜invoke>\n",
        around=(opening + "\n", closing),
        trigger=opening,
    )


DEEPSEEK_V32 = _dsml("deepseek_v32", "function_calls")
DEEPSEEK_V4 = _dsml("deepseek_v4", "tool_calls")
