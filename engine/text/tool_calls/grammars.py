"""Grammars for calls, in the format in which a model writes them.

They use llguidance's dialect of Lark: `<[ID]>` is a token, `%json` a JSON schema, and a rule with
`suffix` any text up to its first occurrence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.sampling_params import Grammar
from engine.text.messages import Tool
from engine.text.tool_calls.formats import NAME, AnswerFormat
from engine.text.tool_calls.json_text import types_of
from engine.text.tool_calls.turns import NO_PARAMETERS, read_object

JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""JSON spacing, as most models write it on one line."""

SPACES = r"[ \t\r\n]{0,40}"
"""Whitespace between the parts of a bare call; limited, so that no model gets stuck in it."""

INDEX = "/[0-9]{1,4}/"  # number of a call, if a format has one

_PLAIN = r"""
value: object | list | string | NUMBER | "true" | "false" | "null"
object: "{" (member ("," member)*)? "}"
member: KEY ":" value
list: "[" (value ("," value)*)? "]"
string: OPENING TEXT
KEY: /[A-Za-z_][A-Za-z0-9_.-]*/
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?/
"""


def grammar_of_calls(
    form: AnswerFormat, tools: Sequence[Tool], tokens: Mapping[str, int], choice: str
) -> Grammar:
    """Return the grammar for an answer that calls functions.

    A call without a mark is recognised by its beginning up to the arguments, so that an answer that
    begins differently (for example with other JSON) is unconstrained.

    Args:
        tokens: ids of the control tokens that are marks in the format, by their texts.
        choice: "auto" for optional calls, "required" for calls only, or "=" followed by the name of
            the only function, to be called once.

    Raises:
        PromptError: the schema of a function is not a JSON object.
    """
    writer = _Writer(form, tokens)
    if choice == "auto" and form.is_bare:
        return Grammar("lark", writer.bare(tools), lead=_lead(form))
    if choice == "auto":
        return Grammar("lark", writer.behind_trigger(tools), form.trigger)
    named = [tool for tool in tools if choice in ("required", "=" + tool.name)]
    return Grammar("lark", writer.whole(named, is_one=choice != "required"))


def _lead(form: AnswerFormat) -> str:
    """Return a pattern for the beginning of a bare call, up to its arguments; the grammar itself
    restricts the name."""
    noise = "".join(f"(?:{re.escape(text)})?" for text in form.noise)
    lead, tail = form.around_name
    return rf"{noise}{SPACES}{lead}{NAME}{tail}"


class _Writer:
    def __init__(self, form: AnswerFormat, tokens: Mapping[str, int]) -> None:
        self._form = form
        self._tokens = tokens
        spellings = sorted(tokens, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, spellings)) or "(?!)")
        self._rules: list[str] = []

    def whole(self, tools: Sequence[Tool], *, is_one: bool) -> str:
        """Return the grammar for an answer that consists of calls."""
        opening, closing = self._form.around
        calls = self._calls(tools, is_one=is_one)
        resumed = f"({self._text(self._form.resumed)})? " if self._form.resumed else ""
        start = f"{resumed}{self._text(opening)} {calls} {self._text(closing)}"
        return "\n".join([f"start: {start}", *self._rules])

    def behind_trigger(self, tools: Sequence[Tool]) -> str:
        """Return the grammar for the text after the trigger, up to the end of the call."""
        opening, closing = self._form.around
        if opening.startswith(self._form.trigger):  # a list of calls has its own mark
            rest = opening.removeprefix(self._form.trigger)
            start = f"{self._text(rest)} {self._calls(tools)} {self._text(closing)}"
        else:
            start = self._calls(tools, is_one=True, cut=self._form.trigger)
        return "\n".join([f"start: {start}", *self._rules])

    def bare(self, tools: Sequence[Tool]) -> str:
        """Return the grammar for a call without a mark, with any spacing."""
        lead, tail = self._form.around_name
        noise = " ".join(f"({self._text(text)})?" for text in self._form.noise)
        for number, tool in enumerate(tools):
            arguments = self._arguments(read_object(tool.parameters or NO_PARAMETERS, ""), number)
            name = json.dumps(tool.name, ensure_ascii=False)
            self._rules.append(f"call_{number}: {name} /{tail}{SPACES}/ {arguments}")
        calls = " | ".join(f"call_{number}" for number in range(len(tools)))
        start = f"/{SPACES}/ {noise} /{SPACES}{lead}/ ({calls}) /{SPACES}\\}}/"
        return "\n".join([f"start: {start}", *self._rules])

    def _calls(self, tools: Sequence[Tool], *, is_one: bool = False, cut: str = "") -> str:
        names = []
        for number, tool in enumerate(tools):
            pieces = self._form.before.removeprefix(cut).split("INDEX")
            before = f" {INDEX} ".join(self._text(p.replace("NAME", tool.name)) for p in pieces)
            arguments = self._arguments(read_object(tool.parameters or NO_PARAMETERS, ""), number)
            behind = self._text(self._form.behind)
            self._rules.append(f"call_{number}: {before} {arguments} {behind}")
            names.append(f"call_{number}")
        one = f"({' | '.join(names)})"
        if is_one or self._form.between is None:
            return one
        return f"{one} ({self._text(self._form.between)} {one})*"

    def _text(self, text: str) -> str:
        parts, at = list[str](), 0
        for match in self._split.finditer(text):
            parts += self._quoted(text[at : match.start()])
            parts.append(f"<[{self._tokens[match[0]]}]>")
            at = match.end()
        return " ".join([*parts, *self._quoted(text[at:])])

    def _quoted(self, text: str) -> list[str]:
        return [json.dumps(text, ensure_ascii=False)] if text else []

    def _arguments(self, schema: dict[str, Any], number: int) -> str:
        calls = self._form.layout.calls
        assert calls is not None, "all known formats have calls"
        if calls.kind == "tags":
            return " ".join(self._tags(schema, number))
        if calls.dialect.has_bare_keys:
            return self._bare_object(schema)
        return self._json(schema, f"arguments_{number}")

    def _json(self, schema: dict[str, Any], rule: str) -> str:
        options = json.dumps({"x-guidance": JSON_OPTIONS, **schema}, ensure_ascii=False)
        self._rules.append(f"{rule}: %json {options}")
        return rule

    def _tags(self, schema: dict[str, Any], number: int) -> Iterator[str]:
        properties = schema.get("properties")
        required = schema.get("required", ())
        for n, (key, value) in enumerate((properties or {}).items()):
            opening, closing = self._form.argument
            types = types_of(value)
            is_text = not types or "string" in types
            opening = opening.replace("IS_TEXT", "true" if is_text else "false")
            if is_text:
                rule = self._until(closing, f"text_{number}_{n}")
            else:
                definitions = {k: v for k, v in schema.items() if k in ("$defs", "definitions")}
                inner = value | definitions
                rule = f"{self._json(inner, f'json_{number}_{n}')} {self._text(closing)}"
            written = f"{self._text(opening.replace('NAME', key))} {rule}"
            yield written if key in required else f"({written})?"

    def _until(self, closing: str, rule: str) -> str:
        token = self._split.search(closing)
        if token is not None:  # characters before it belong to the same lexeme as the text
            end = re.escape(closing[: token.start()]).replace("/", r"\/")
            rest = self._text(closing[token.start() :])
            self._rules.append(f"{rule}: /(?s:.*){end}/ {rest}")
        else:
            quoted = json.dumps(closing, ensure_ascii=False)
            self._rules.append(f"{rule}[suffix={quoted}]: /(?s:.*)/")
        return rule

    def _bare_object(self, schema: dict[str, Any]) -> str:
        """Return the grammar for an object with unquoted keys and values of any type."""
        calls = self._form.layout.calls
        assert calls is not None, "all known formats have calls"
        ((opening, closing),) = calls.dialect.quotes
        if "member:" not in "\n".join(self._rules):
            text = self._until(closing, "text")
            self._rules.append(
                _PLAIN.replace("OPENING", self._text(opening)).replace("TEXT", text).strip()
            )
        keys = " | ".join(
            json.dumps(key + ":", ensure_ascii=False) for key in schema.get("properties") or {}
        )
        return f'"{{" (({keys}) value ("," ({keys}) value)*)? "}}"' if keys else '"{" "}"'
