"""Reads descriptions of forms, in the layout of transformers' `response_template`.

The layout is version 1 in transformers' documentation of chat response parsing. This reads its
fields `reasoning_content`, `content` and `tool_calls` with the contents "text", "json" and
"xml-inline"; marks are texts or patterns as `AnswerMark` knows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engine.text.tool_calls.json_text import JSON, Dialect
from engine.text.tool_calls.marks import AnswerMark

VALUE = "(?P<value>.*?)"
"""Group of a `tag_pattern` that stands for the value of an argument.

A group `is_text` before it says by "true" that the value is text, whatever it looks like.
"""

CallKind = Literal["object", "list", "arguments", "tags"]
"""Content of calls: an object with name and arguments, a list of such, or a name in the mark and
behind it the arguments as an object or each in tags."""


@dataclass(frozen=True, slots=True)
class AnswerRegion:
    """A part of an answer between marks.

    Attributes:
        opening, closing: marks around it; None where it has none.
        join: text between this region and the next of its part.
    """

    part: Literal["reasoning", "content", "call"]
    opening: AnswerMark | None
    closing: AnswerMark | None
    join: str = ""


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form of what stands in a region of calls.

    Attributes:
        value_opening, value_closing: marks around the value of an argument in tags.
        has_json_values: whether values in tags without a known type are JSON where they can be.
    """

    kind: CallKind
    dialect: Dialect = JSON
    value_opening: AnswerMark | None = None
    value_closing: AnswerMark | None = None
    has_json_values: bool = False


@dataclass(frozen=True, slots=True)
class AnswerLayout:
    """The description of a form.

    Attributes:
        regions: regions with an opening mark.
        join: what stands between two texts of the content.
        calls: form of the calls; None for a form without any.
    """

    regions: tuple[AnswerRegion, ...]
    join: str
    calls: CallForm | None


def read_layout(description: Mapping[str, Any]) -> AnswerLayout:
    """Return what a `response_template` describes.

    Raises:
        ValueError: it has something that this reader does not know.
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


def _calls(field: Mapping[str, Any]) -> CallForm:
    options = field.get("content_args", {})
    if field["content"] == "xml-inline":
        opening, closing = options["tag_pattern"].split(VALUE)
        is_json = options.get("value_parser", {}).get("name") == "json"
        return CallForm("tags", JSON, AnswerMark(opening), AnswerMark(closing), is_json)
    if field["content"] != "json":
        raise ValueError(f"calls in {field['content']!r}")
    quotes = tuple((opening, closing) for opening, closing in options.get("string_delims", []))
    dialect = Dialect(options.get("unquoted_keys", False), quotes)
    if field.get("transform_each"):
        return CallForm("list", dialect)
    is_named = field["transform"]["function"]["name"] == "{name}"
    return CallForm("arguments" if is_named else "object", dialect)
