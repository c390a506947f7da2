"""What the schemas of functions say of the types of their arguments."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable, Mapping

from engine.text.tool_calls.json_text import escaped


def types_of(schema: object) -> tuple[str, ...]:
    """Return the JSON types that a schema allows, in its order; none where it does not say."""
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
    """Return the types of a function's arguments, from the text of their schema."""
    try:
        read = json.loads(schema or "{}")
    except (ValueError, RecursionError):
        return {}
    properties = read.get("properties") if isinstance(read, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {name: types_of(value) for name, value in properties.items()}


def as_json(text: str, types: tuple[str, ...]) -> str:
    """Return the text of an argument as JSON: a string, unless one of the types fits it."""
    for name in types:
        cast = _CASTS.get(name)
        found = None if cast is None else cast(text)
        if found is not None:
            return found
    return f'"{escaped(text)}"'


def json_or_text(text: str) -> str:
    """Return text as it is if it is JSON, else as a string."""
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
    """Return a container as JSON that is written as Python does, which some templates make."""
    try:
        found = ast.literal_eval(text.strip())
        return json.dumps(found, allow_nan=False) if isinstance(found, kind) else None
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
