"""Random JSON schemas whose instances are small, so that answers with their form end."""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

WORDS = (
    "name", "größe", "naïve key", 'with "quotes"', "back\\slash", "日本", "a/b~c", "", "x1", "🙂",
)  # fmt: skip
VALUES = (
    None, True, False, 0, -7, 2.5, 1e-3, "", "plain", 'q"uo\\te', "tab\there", "ünï",
    "日本語", "🙂",
)  # fmt: skip
PATTERNS = (
    "^[a-c]{1,4}$", "^(yes|no)$", "^[0-9]{3}-[0-9]{2}$", "^a?b?c?$", "^[^a-z]{2}$", r"^\w{1,5}$",
    r"^\d{1,4}(\.\d{2})?$", "^(ä|ö|ü)$",
)  # fmt: skip
FORMATS = ("ipv4", "uuid", "ipv6")  # a time has any number of digits, a year 0 is no date in Python


def random_schema(seed: int) -> Schema:
    """Return a schema, the same one for the same number."""
    rng = random.Random(seed)
    defs = {f"d{n}": _leaf(rng) for n in range(rng.randrange(3))}
    schema = _any(rng, depth=rng.choice((1, 2, 2, 3)), defs=tuple(defs))
    if defs:
        schema = schema | {"$defs": defs}
    return schema


def _any(rng: random.Random, depth: int, defs: tuple[str, ...]) -> Schema:
    """Return a schema, of a structure as long as `depth` allows."""
    if depth == 0:
        is_named = defs and rng.random() < 0.2
        return {"$ref": f"#/$defs/{rng.choice(defs)}"} if is_named else _leaf(rng)
    make: Callable[[random.Random, int, tuple[str, ...]], Schema]
    make = rng.choice((_object, _object, _object, _array, _tuple, _union, _map, _both))
    return make(rng, depth - 1, defs)


def _leaf(rng: random.Random) -> Schema:
    return rng.choice((_text, _text, _whole, _number, _enum, _const, _simple))(rng)


def _text(rng: random.Random) -> Schema:
    kind = rng.randrange(3)
    if kind == 0:
        least = rng.randrange(4)
        return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(1, 9)}
    if kind == 1:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    return {"type": "string", "format": rng.choice(FORMATS)}


def _whole(rng: random.Random) -> Schema:
    least = rng.choice((-1000, -5, 0, 1, 17))
    schema = {"type": "integer", "minimum": least, "maximum": least + rng.choice((0, 3, 99, 5000))}
    return schema | (
        {"multipleOf": rng.choice((1, 2, 5))}
        if rng.random() < 0.3 and schema["maximum"] > least + 9
        else {}
    )


def _number(rng: random.Random) -> Schema:
    low = rng.choice((-1.5, 0, 0.25))
    return {
        "type": "number",
        "exclusiveMinimum": low,
        "maximum": low + rng.choice((0.5, 2, 100)),
        "multipleOf": 0.25,
    }


def _enum(rng: random.Random) -> Schema:
    return {"enum": rng.sample(VALUES, rng.randrange(1, 6))}


def _const(rng: random.Random) -> Schema:
    return {"const": rng.choice((*VALUES, [1, "a"], {"k": [None]}))}


def _simple(rng: random.Random) -> Schema:
    return {"type": rng.choice(("boolean", "null", ["boolean", "null"]))}


def _object(rng: random.Random, depth: int, defs: tuple[str, ...]) -> Schema:
    names = rng.sample(WORDS, rng.randrange(1, 5))
    required = [name for name in names if rng.random() < 0.6]
    return {
        "type": "object",
        "properties": {name: _any(rng, depth, defs) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _map(rng: random.Random, depth: int, defs: tuple[str, ...]) -> Schema:
    return {
        "type": "object",
        "properties": {"kind": {"const": rng.choice(("a", "b"))}},
        "required": ["kind"],
        "patternProperties": {"^x_[a-c]{1,2}$": _any(rng, depth, defs)},
        "additionalProperties": False,
        "maxProperties": 3,
    }


def _array(rng: random.Random, depth: int, defs: tuple[str, ...]) -> Schema:
    least = rng.randrange(3)
    return {
        "type": "array", "items": _any(rng, depth, defs),
        "minItems": least, "maxItems": least + rng.randrange(3),
    }  # fmt: skip


def _tuple(rng: random.Random, depth: int, defs: tuple[str, ...]) -> Schema:
    items = [_any(rng, depth, defs) for _ in range(rng.randrange(1, 4))]
    return {
        "type": "array",
        "prefixItems": items,
        "items": False,
        "minItems": rng.randrange(len(items) + 1),
    }


def _union(rng: random.Random, depth: int, defs: tuple[str, ...]) -> Schema:
    return {"anyOf": [_any(rng, depth, defs) for _ in range(rng.randrange(2, 4))]}


def _both(rng: random.Random, depth: int, defs: tuple[str, ...]) -> Schema:
    first, second = rng.sample(("name", "größe", "x1"), 2)
    part = {"type": "object", "properties": {first: _any(rng, depth, defs)}, "required": [first]}
    other = {"type": "object", "properties": {second: _any(rng, depth, defs)}, "required": [second]}
    return {
        "allOf": [part, other],
        "maxProperties": 2,
        "properties": {first: True, second: True},
        "required": [first, second],
    }
