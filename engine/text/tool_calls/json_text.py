"""Reads incomplete JSON, and models' variants of it, as valid JSON.

At any time, the emitted text is the beginning of valid JSON. If the input breaks off or is not
JSON, readers raise `MalformedCall` and leave the emitted text unclosed, so that it cannot be
mistaken for complete JSON.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.text.tool_calls.marks import IncomingText, MalformedCall, Reading

Emit = Callable[[str], None]  # receiver of a piece of JSON

MAX_DEPTH = 64
_LITERALS = {"True": "true", "False": "false", "None": "null"}  # models write Python's, too
_LITERALS |= {word: word for word in _LITERALS.values()}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_NUMBER_LETTERS = "+-.eE0123456789"
_STRING_END = re.compile(r'["\\]')
_HEX = "0123456789abcdefABCDEF"
_SHORT_ESCAPES = '"\\/bfnrt'


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a model's values differ from JSON.

    Attributes:
        has_bare_keys: whether object keys may be unquoted.
        quotes: pairs of texts around strings without escapes, in addition to JSON's own quotes.
    """

    has_bare_keys: bool = False
    quotes: tuple[tuple[str, str], ...] = ()


JSON = Dialect()


def escaped(text: str) -> str:
    """Return text escaped for the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class JsonReader:
    """Reader of the values in one source."""

    def __init__(self, source: IncomingText, dialect: Dialect = JSON) -> None:
        self._source, self._dialect = source, dialect

    def value(self, emit: Emit, depth: int = 0) -> Reading[None]:
        """Read a value of any kind, and emit it as JSON."""
        source = self._source
        char = yield from source.skip_space()
        if depth > MAX_DEPTH:
            raise MalformedCall
        if char == "{":
            yield from self.object(emit, depth)
        elif char == "[":
            yield from self._list(emit, depth)
        elif (closing := (yield from self._quote())) is not None:
            yield from self._string(emit, closing)
        else:
            yield from self._plain(emit)

    def object(self, emit: Emit, depth: int = 0) -> Reading[None]:
        """Read an object, and emit it as JSON."""
        source = self._source
        yield from source.expect("{")
        emit("{")
        comma = ""
        while (yield from source.skip_space()) != "}":
            key = yield from self.key()
            yield from self.colon()
            emit(f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
            yield from self.value(emit, depth + 1)
            yield from source.skip_space()
            comma = ", "
            if not (yield from source.starts(",")):
                break
        yield from source.skip_space()
        yield from source.expect("}")
        emit("}")

    def key(self) -> Reading[str]:
        """Read a key of an object."""
        yield from self._source.skip_space()
        closing = yield from self._quote()
        if closing is not None:
            return (yield from self._collected(closing))
        if not self._dialect.has_bare_keys:
            raise MalformedCall
        key = ""
        while (char := (yield from self._source.peek())) and (char.isalnum() or char in "_-.$"):
            key += char
            self._source.at += 1
        if not key:
            raise MalformedCall
        return key

    def colon(self) -> Reading[None]:
        """Skip the colon after a key."""
        yield from self._source.skip_space()
        yield from self._source.expect(":")

    def string(self) -> Reading[str]:
        """Read a string."""
        yield from self._source.skip_space()
        closing = yield from self._quote()
        if closing is None:
            raise MalformedCall
        return (yield from self._collected(closing))

    def _list(self, emit: Emit, depth: int) -> Reading[None]:
        source = self._source
        yield from source.expect("[")
        emit("[")
        comma = ""

        def item(text: str) -> None:
            nonlocal comma
            emit(comma + text)
            comma = ""

        while (yield from source.skip_space()) != "]":
            yield from self.value(item, depth + 1)
            yield from source.skip_space()
            comma = ", "
            if not (yield from source.starts(",")):
                break
        yield from source.skip_space()
        yield from source.expect("]")
        emit("]")

    def _quote(self) -> Reading[str | None]:
        for opening, closing in (*self._dialect.quotes, ('"', '"')):
            if (yield from self._source.starts(opening)):
                return closing
        return None

    def _collected(self, closing: str) -> Reading[str]:
        pieces: list[str] = []
        yield from self._string(pieces.append, closing)
        text = str(json.loads("".join(pieces)))
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _string(self, emit: Emit, closing: str) -> Reading[None]:
        source = self._source
        emit('"')
        while not (yield from source.starts(closing)):
            char = yield from source.peek()
            if not char:
                raise MalformedCall
            if char == "\\" and closing == '"':
                emit((yield from self._escape()))
                continue
            source.at += 1
            if closing == '"':
                char += self._plain_run()
            emit(escaped(char))
        emit('"')

    def _plain_run(self) -> str:
        source = self._source
        end = _STRING_END.search(source.text, source.at)
        run = source.text[source.at : end.start() if end else len(source.text)]
        source.at += len(run)
        return run

    def _escape(self) -> Reading[str]:
        """Read a complete escape; in an invalid one, the backslash is literal."""
        source = self._source
        source.at += 1
        char = yield from source.peek()
        if not char:
            raise MalformedCall
        source.at += 1
        if char != "u":
            return "\\" + char if char in _SHORT_ESCAPES else "\\\\" + escaped(char)
        digits = ""
        while len(digits) < 4 and (char := (yield from source.peek())) and char in _HEX:
            digits += char
            source.at += 1
        return "\\u" + digits if len(digits) == 4 else "\\\\u" + digits

    def _plain(self, emit: Emit) -> Reading[None]:
        source = self._source
        start = source.at
        with source.kept():
            word = ""
            while (char := (yield from source.peek())) and (
                char in _NUMBER_LETTERS or char.isalpha()
            ):
                word += char
                source.at += 1
            if not (word in _LITERALS or _NUMBER.fullmatch(word)):
                source.at = start
                raise MalformedCall
        emit(_LITERALS.get(word, word))


def types_of(schema: object) -> tuple[str, ...]:
    """Return the JSON types that a schema allows, in its order; () if unspecified."""
    if not isinstance(schema, Mapping):
        return ()
    declared = schema.get("type")
    types = [declared] if isinstance(declared, str) else []
    if isinstance(declared, list):
        types += [name for name in declared if isinstance(name, str)]
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else []:
            types += types_of(choice)
    if schema.get("nullable") is True and "null" not in types:
        types.append("null")
    return tuple(types)


def parameters_of(schema: str) -> dict[str, tuple[str, ...]]:
    """Return the types of a function's arguments, from their schema's text."""
    try:
        parsed = json.loads(schema or "{}")
    except (ValueError, RecursionError):
        return {}
    properties = parsed.get("properties") if isinstance(parsed, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {name: types_of(value) for name, value in properties.items()}


def as_json(text: str, types: tuple[str, ...]) -> str:
    """Return an argument's text as JSON: a string, unless it fits one of the types."""
    for name in types:
        cast = _CASTS.get(name)
        value = None if cast is None else cast(text)
        if value is not None:
            return value
    return f'"{escaped(text)}"'


def json_or_text(text: str) -> str:
    """Return text unchanged if it is JSON, else as a string."""
    return text.strip() if _read(text) is not _NOTHING else f'"{escaped(text)}"'


_NOTHING = object()


def _read(text: str) -> object:
    def refuse(word: str) -> object:
        raise ValueError(word)

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return _NOTHING


def _integer(text: str) -> str | None:
    try:
        return str(int(text))
    except ValueError:
        pass
    number = _finite(text)
    return str(int(number)) if number is not None and number.is_integer() else None


def _number(text: str) -> str | None:
    number = _finite(text)
    if number is None:
        return None
    return str(int(number)) if number.is_integer() and "." not in text else json.dumps(number)


def _finite(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _boolean(text: str) -> str | None:
    return {"true": "true", "1": "true", "false": "false", "0": "false"}.get(text.strip().lower())


def _null(text: str) -> str | None:
    return "null" if text.strip() in ("null", "None") else None


def _container(kind: type) -> Callable[[str], str | None]:
    def cast(text: str) -> str | None:
        return text.strip() if isinstance(_read(text), kind) else _from_python(text, kind)

    return cast


def _from_python(text: str, kind: type) -> str | None:
    try:
        value = ast.literal_eval(text.strip())
        return json.dumps(value, allow_nan=False) if isinstance(value, kind) else None
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


_CASTS: dict[str, Callable[[str], str | None]] = {
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "null": _null,
    "object": _container(dict),
    "array": _container(list),
}
