"""JSON schemas: reads their text, and finds the part of one that llguidance refuses.

Places are JSON pointers (RFC 6901) with "#" before them, as in "$ref".
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from typing import Any, NoReturn, TypeGuard

from engine.errors import GrammarError

MAX_CHARACTERS = 1 << 20
"""Largest number of characters of a grammar."""

MAX_DEPTH = 100
"""Deepest nesting of a schema, and of brackets in other grammars."""

MAX_SECONDS = 3.0
"""Longest time to check a grammar."""

MAX_AT_ONCE = 2
"""Largest number of grammars that are checked at once."""

MAX_MEMORY = 1 << 30
"""Largest number of bytes of memory that checking a grammar may take."""

MAX_REQUEST = 4 * MAX_CHARACTERS
"""Largest number of bytes of a grammar as a line of JSON, which escapes some characters."""

MAX_SYMBOLS = 200_000
"""Largest number of symbols of a compiled grammar; llguidance's default is 500 000."""

MAX_STATES = 50_000
"""Largest number of states of a lexer, of 1 to 2 kB each; llguidance's default is 250 000."""

USUAL_MASK_SECONDS = 0.03
"""Processor time, in seconds, that a mask may take. Most take well below a millisecond, and 10 ms
with a large vocabulary of which nearly everything is allowed."""

MAX_MASK_SECONDS = 0.3
"""Processor time, in seconds, that the masks of one answer may take beyond that, all together.

All other answers wait meanwhile. Where a grammar can read a text in very many ways, each mask takes
longer than the one before."""

DRAFTED_MASK_SECONDS = 0.01
"""Processor time, in seconds, beyond which a mask is too slow for one pass to compute several."""

MAX_PLACING_SECONDS = 1.0
"""Longest time to search for the part of a schema that is wrong."""


Schema = dict[str, Any]

MAPPINGS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
"""Keywords whose value has a schema for each name; first those to which others refer."""

LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
"""Keywords whose value may be a list of schemas."""

SINGLE = (
    "items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains",
    "propertyNames", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
"""Keywords whose value may be a schema."""

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
"""Patterns of llguidance's messages, with the keyword that they are about; "" for group 1."""

NEARLY_NONE = 1e-9
"""What a narrowed range of numbers lacks at its end."""

MAX_EXACT = 2**20
"""Whole numbers below it differ from those that lack so little, also as floats."""

COERCED = "Use anyOf in place of oneOf."


def read_schema(text: str) -> Schema:
    """Return the JSON schema that a text holds.

    Raises:
        GrammarError: it is not JSON, too deep, or neither an object nor `true`.
    """
    try:
        schema = json.loads(text, parse_constant=_refuse_constant, parse_int=_number)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise GrammarError(f"The JSON schema is not JSON: {error.msg} at {place}.", place) from None
    except RecursionError:
        raise _too_deep() from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise GrammarError('The JSON schema must be an object, such as {"type": "object"}.', "#")
    for _, inner in subschemas(schema):
        _without_open_ends(inner)
    return schema


def _without_open_ends(schema: Schema) -> None:
    """Narrow a range of numbers that is shorter than 1 and excludes a whole number at its end.

    llguidance 1.9 allows the excluded number, as in more than 0 and at most 0.5.
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
    raise GrammarError(f"The JSON schema is not JSON: it holds {name}.", "#")


def _number(digits: str) -> int | float:
    """Return a whole number, or the nearest F64 number where llguidance has none so large."""
    if not isfinite(float(digits)):
        _refuse_constant(f"a number of {len(digits)} digits")
    number = int(digits)
    return number if -(1 << 63) <= number < 1 << 64 else float(number)


def _too_deep() -> GrammarError:
    return GrammarError(f"The JSON schema is nested more than {MAX_DEPTH} deep.", "#")


def subschemas(schema: Schema, pointer: str = "#", depth: int = 0) -> Iterator[tuple[str, Schema]]:
    """Yield the schemas inside a schema with their pointers, the innermost first, itself last.

    Raises:
        GrammarError: they are nested too deep.
    """
    if depth > MAX_DEPTH:
        raise _too_deep()
    for name, inner in _inside(schema):
        if isinstance(inner, dict):
            yield from subschemas(inner, f"{pointer}/{name}", depth + 1)
    yield pointer, schema


def _inside(schema: Schema) -> Iterator[tuple[str, object]]:
    """Yield what may be a schema directly inside one, with the end of its pointer."""
    for key in MAPPINGS:
        found = schema.get(key)
        if isinstance(found, dict):
            yield from ((f"{key}/{_escaped(name)}", inner) for name, inner in found.items())
    for key in LISTS:
        found = schema.get(key)
        if isinstance(found, list):
            yield from ((f"{key}/{n}", inner) for n, inner in enumerate(found))
    for key in SINGLE:
        yield key, schema.get(key)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def error_of(schema: Schema, message: str, problem_of: Callable[[Schema], str]) -> GrammarError:
    """Return the error of a schema that llguidance refuses, with the place of the part to blame.

    That is the innermost schema that is refused for the same reason where it stands alone.

    Args:
        message: why llguidance refuses all of it.
        problem_of: returns why llguidance refuses a schema; "" if it does not.
    """
    place, stop = "#", time.monotonic() + MAX_PLACING_SECONDS
    known: Schema = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for pointer, inner in subschemas(schema):
        if time.monotonic() > stop:
            break
        if told(problem_of({**known, **inner})) == told(message):
            place = _with_keyword(pointer, inner, message)
            break
    hint = COERCED if "coerce_one_of" in message else ""
    return GrammarError(f"The JSON schema cannot be used at {place}: {told(message)}.", place, hint)


def _with_keyword(pointer: str, schema: Mapping[str, object], message: str) -> str:
    """Return the pointer of the keyword that a message is about, as far as that can be told."""
    for pattern, keyword in KEYWORD_OF:
        if match := pattern.search(message):
            name = keyword or match[1]
            return f"{pointer}/{_escaped(name)}" if name in schema else pointer
    return pointer


def told(message: str) -> str:
    """Return what a message of llguidance says, in one line and without its end."""
    lines = [line.strip() for line in message.strip().splitlines()] or ["it is refused"]
    told = next((line[7:] for line in lines if line.startswith("error: ")), lines[0])
    if told.startswith("NoExtension"):
        return "no text has this form"
    if "retrieving it failed" in told:
        return f"{told.split(' is not present')[0]} is not in the schema, and nothing is fetched"
    return told.split(". Enable 'coerce_one_of'")[0].rstrip(".")


CODE = re.compile(r"\\(\\|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")
"""Escape in a literal: a backslash, or a character by its number."""

PLAIN = re.compile(r"[^\x00-\x1f\x7f\"\\/\[\]^-]")
"""Characters that can stand for themselves in a literal and in a class of characters."""

MISSING = re.compile(r"Rule '(.*)' not found|unknown name: \"(.*)\"")


def as_lark(text: str) -> str:
    """Return the Lark grammar that a GBNF grammar means.

    Raises:
        GrammarError: it is not GBNF.
    """
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    try:
        return gbnf_to_lark(CODE.sub(_character, text))
    except GbnfToLarkError as error:
        place = _place(error.pos.text, error.pos.pos)
        why = str(error).split(" at line ")[0]
        raise GrammarError(f"The grammar cannot be used at {place}: {why}.", place) from None
    except RecursionError:
        raise GrammarError("The grammar is nested too deep.") from None
    except Exception as error:  # noqa: BLE001 the converter has no class of its own for these
        place = place_of_rule(text, str(error))
        at = f" at {place}" if place else ""
        raise GrammarError(f"The grammar cannot be used{at}: {error}.", place) from None


def _character(match: re.Match[str]) -> str:
    """Return the character that an escape stands for, which the converter would spell wrong."""
    number = match[2] or match[3]
    if number is None or int(number, 16) > 0x10FFFF:
        return match[0]
    char = chr(int(number, 16))
    return char if PLAIN.match(char) else f"\\x{ord(char):02x}" if ord(char) < 256 else match[0]


def place_of_rule(text: str, message: str) -> str:
    """Return where a rule that does not exist is named; "" where that is not the problem."""
    missing = MISSING.search(message)
    if missing is None:
        return ""
    found = re.search(rf"(?<![\w-]){re.escape(missing[1] or missing[2])}(?![\w-])", text)
    return _place(text, found.start()) if found else ""


def _place(text: str, at: int) -> str:
    line = text.count("\n", 0, at) + 1
    return f"line {line}, column {at - text.rfind(chr(10), 0, at)}"
