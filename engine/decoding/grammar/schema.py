"""Parses JSON schemas, and locates the part that llguidance rejects.

Places are JSON pointers (RFC 6901) prefixed with "#", as in "$ref".
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from typing import Any, NoReturn, TypeGuard

from engine.errors import GrammarError, Sentence

MAX_CHARACTERS = 1 << 20  # maximum number of characters in a grammar
MAX_DEPTH = 100  # maximum nesting of a schema, and of brackets in other grammars
MAX_SECONDS = 3.0  # maximum time for checking a grammar
MAX_AT_ONCE = 2  # maximum number of grammars that are checked in parallel
MAX_MEMORY = 1 << 30  # maximum memory for checking a grammar, in bytes

MAX_REQUEST = 4 * MAX_CHARACTERS
"""Maximum bytes of a grammar as a line of JSON, in which some characters are escaped."""

MAX_SYMBOLS = 200_000
"""Maximum number of symbols in a compiled grammar; llguidance's default is 500 000."""

MAX_STATES = 50_000
"""Maximum number of lexer states, of 1 to 2 kB each; llguidance's default is 250 000."""

USUAL_MASK_SECONDS = 0.03
"""Processor time that a mask may take. Most take well under a millisecond, and 10 ms if nearly all
of a large vocabulary is allowed."""

MAX_MASK_SECONDS = 0.3
"""Total processor time that one answer's masks may take beyond `USUAL_MASK_SECONDS`.

All other answers wait meanwhile. If a grammar is very ambiguous, each mask takes longer than the
one before.
"""

DRAFTED_MASK_SECONDS = 0.01
"""Processor time per mask beyond which a pass does not verify draft tokens."""

MAX_PLACING_SECONDS = 1.0  # maximum time to locate the invalid part of a schema


Schema = dict[str, Any]

MAPPINGS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
"""Keywords that map names to schemas; referenced ones first."""

LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
"""Keywords that may contain a list of schemas."""

SINGLE = (
    "items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains",
    "propertyNames", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
"""Keywords that may contain a schema."""

KEYWORD_OF = (
    (re.compile(r"Unimplemented keys: \[\"([^\"]+)\""), ""),
    (re.compile(r"for '([^']+)'"), ""),
    (re.compile(r"[Ii]nvalid type"), "type"),
    (re.compile(r"Unknown format"), "format"),
    (re.compile(r"Pointer '.*' does not exist|is not present in a registry"), "$ref"),
    (re.compile(r"oneOf constraints"), "oneOf"),
    (re.compile(r"anyOf is empty"), "enum"),
    (re.compile(r"regex"), "pattern"),
)
"""Patterns for llguidance's messages and the keyword each is about; "" for group 1."""

NEARLY_NONE = 1e-9  # amount by which a range of numbers is narrowed at one end
MAX_EXACT = 2**20  # whole numbers below this differ from their narrowed values, even as floats

COERCED = Sentence("Use anyOf instead of oneOf.")


def read_schema(text: str) -> Schema:
    """Parse a JSON schema.

    Raises:
        GrammarError: it is not JSON, is nested too deeply, or is neither an object nor `true`.
    """
    try:
        schema = json.loads(text, parse_constant=_refuse_constant, parse_int=_number)
    except json.JSONDecodeError as error:
        place = line_and_column(error.lineno, error.colno)
        problem = Sentence(error.msg)
        raise GrammarError(
            "The JSON schema is not JSON: {problem} at {place}.", place, problem=problem
        ) from None
    except RecursionError:
        raise _too_deep() from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        example = '{"type": "object"}'
        text = "The JSON schema must be an object, such as {example}."
        raise GrammarError(text, "#", example=example)
    for _, inner in subschemas(schema):
        _without_open_ends(inner)
    return schema


def _without_open_ends(schema: Schema) -> None:
    """Narrow a range of numbers that is shorter than 1 and excludes a whole number at one end.

    llguidance 1.9 allows the excluded number, for example 0 in "more than 0 and at most 0.5".
    """
    low, high = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    least = max(_numbers(low, schema.get("minimum")), default=-math.inf)
    most = min(_numbers(high, schema.get("maximum")), default=math.inf)
    if _is_whole(low) and 0 <= low <= most < low + 1 < MAX_EXACT:
        schema["exclusiveMinimum"] = low + NEARLY_NONE
    if _is_whole(high) and -MAX_EXACT < high - 1 < least <= high <= 0:
        schema["exclusiveMaximum"] = high - NEARLY_NONE


def _numbers(*bounds: object) -> list[float]:
    return [bound for bound in bounds if isinstance(bound, int | float)]


def _is_whole(number: object) -> TypeGuard[float]:
    return isinstance(number, int) or (isinstance(number, float) and number.is_integer())


def _refuse_constant(name: str) -> NoReturn:
    raise GrammarError("The JSON schema is not JSON: it contains {name}.", "#", name=name)


def _number(digits: str) -> int | float:
    """Return a whole number, as a float if it is too large for llguidance."""
    if not isfinite(float(digits)):
        _refuse_constant(Sentence("a number of {n} digits", n=len(digits)))
    number = int(digits)
    return number if -(1 << 63) <= number < 1 << 64 else float(number)


def _too_deep() -> GrammarError:
    return GrammarError("The JSON schema is nested more than {n} levels deep.", "#", n=MAX_DEPTH)


def subschemas(schema: Schema, pointer: str = "#", depth: int = 0) -> Iterator[tuple[str, Schema]]:
    """Yield the schemas inside a schema with their pointers, innermost first; the schema is last.

    Raises:
        GrammarError: they are nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise _too_deep()
    for name, inner in _inside(schema):
        if isinstance(inner, dict):
            yield from subschemas(inner, f"{pointer}/{name}", depth + 1)
    yield pointer, schema


def _inside(schema: Schema) -> Iterator[tuple[str, object]]:
    for key in MAPPINGS:
        value = schema.get(key)
        if isinstance(value, dict):
            yield from ((f"{key}/{_escaped(name)}", inner) for name, inner in value.items())
    for key in LISTS:
        value = schema.get(key)
        if isinstance(value, list):
            yield from ((f"{key}/{n}", inner) for n, inner in enumerate(value))
    for key in SINGLE:
        yield key, schema.get(key)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def error_of(schema: Schema, message: str, problem_of: Callable[[Schema], str]) -> GrammarError:
    """Return the error for a schema that llguidance rejects with `message`, placed at its cause.

    The cause is the innermost schema for which `problem_of` returns the same message.
    """
    place, stop = "#", time.monotonic() + MAX_PLACING_SECONDS
    known: Schema = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for pointer, inner in subschemas(schema):
        if time.monotonic() > stop:
            break
        if short_problem(problem_of({**known, **inner})) == short_problem(message):
            place = _with_keyword(pointer, inner, message)
            break
    hint = COERCED if "coerce_one_of" in message else ""
    problem = short_problem(message)
    return GrammarError(
        "The JSON schema cannot be used at {place}: {problem}.", place, hint, problem=problem
    )


def _with_keyword(pointer: str, schema: Mapping[str, object], message: str) -> str:
    for pattern, keyword in KEYWORD_OF:
        if match := pattern.search(message):
            name = keyword or match[1]
            return f"{pointer}/{_escaped(name)}" if name in schema else pointer
    return pointer


NO_TEXT = Sentence("no text can match it")


def short_problem(message: str) -> Sentence:
    """Return a message from llguidance as one line that ends a sentence."""
    lines = [line.strip() for line in message.strip().splitlines()] or ["it is rejected"]
    problem = next((line[7:] for line in lines if line.startswith("error: ")), lines[0])
    if problem.startswith("NoExtension"):
        return NO_TEXT
    if "retrieving it failed" in problem:
        name = problem.split(" is not present")[0]
        return Sentence(
            "{name} is not in the schema, and external schemas are not downloaded", name=name
        )
    return Sentence(problem.split(". Enable 'coerce_one_of'")[0].rstrip("."))


CODE = re.compile(r"\\(\\|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")
"""Escape in a literal: a backslash, or a character code."""

PLAIN = re.compile(r"[^\x00-\x1f\x7f\"\\/\[\]^-]")
"""Characters that need no escape in a literal and in a character class."""

MISSING = re.compile(r"Rule '(.*)' not found|unknown name: \"(.*)\"")


def as_lark(text: str) -> str:
    """Convert a GBNF grammar to Lark.

    Raises:
        GrammarError: it is not GBNF.
    """
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    try:
        return gbnf_to_lark(CODE.sub(_character, text))
    except GbnfToLarkError as error:
        place = _place(error.pos.text, error.pos.pos)
        raise unusable(str(error).split(" at line ")[0], place) from None
    except RecursionError:
        raise GrammarError("The grammar is nested too deeply.") from None
    except Exception as error:  # noqa: BLE001 the converter has no class for these errors
        raise unusable(str(error), place_of_rule(text, str(error))) from None


def unusable(problem: str, place: str = "", hint: str = "") -> GrammarError:
    """Return the error for a grammar other than a JSON schema; `problem` ends a sentence."""
    return GrammarError(
        "The grammar cannot be used at {place}: {problem}."
        if place
        else "The grammar cannot be used: {problem}.",
        place,
        hint,
        problem=Sentence(problem),
    )


def _character(match: re.Match[str]) -> str:
    """Return the character of an escape that the converter would spell incorrectly."""
    number = match[2] or match[3]
    if number is None or int(number, 16) > 0x10FFFF:
        return match[0]
    char = chr(int(number, 16))
    return char if PLAIN.match(char) else f"\\x{ord(char):02x}" if ord(char) < 256 else match[0]


def place_of_rule(text: str, message: str) -> str:
    """Return the place where a missing rule is named; "" if the problem is a different one."""
    missing = MISSING.search(message)
    if missing is None:
        return ""
    name = re.search(rf"(?<![\w-]){re.escape(missing[1] or missing[2])}(?![\w-])", text)
    return _place(text, name.start()) if name else ""


def _place(text: str, at: int) -> Sentence:
    line = text.count("\n", 0, at) + 1
    return line_and_column(line, at - text.rfind("\n", 0, at))


def line_and_column(line: int, column: int) -> Sentence:
    return Sentence("line {line}, column {column}", line=line, column=column)
