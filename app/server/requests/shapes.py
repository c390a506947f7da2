"""Shapes of JSON values: each reads a value, or says what it must be, and describes itself.

Descriptions are JSON Schema (draft 2020-12), as OpenAPI 3.1 has them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field
from typing import Any, Protocol

from app.server.refusal import Refusal

MOST_SHOWN = 60
"""Largest number of characters of a wrong value that an error repeats."""

Schema = dict[str, Any]


@dataclass(slots=True)
class Notes:
    """Observations made while a document is read: the places of unknown fields."""

    unknown: list[str] = field(default_factory=list)


class Shape(Protocol):
    """Interface of a shape.

    Attributes:
        noun: what a value must be, such as "a text".
    """

    @property
    def noun(self) -> str: ...

    def fits(self, value: Any) -> bool:
        """Return whether a value is of this kind, whatever is inside of it."""
        ...

    def read(self, value: Any, path: str, notes: Notes) -> Any:
        """Return the value for a dataclass.

        Raises:
            Refusal: it is something else; the error names its place, which is `path`.
        """
        ...

    def schema(self, named: dict[str, Schema]) -> Schema:
        """Return the JSON schema; those of objects are put into `named` and referred to."""
        ...


def wrong(path: str, noun: str, value: Any) -> Refusal:
    """Return the refusal of a value that is not `noun`."""
    place = path or "The request body"
    return Refusal(400, f"{place} must be {noun}, not {_shown(value)}.", param=path or None)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 1]}…"


@dataclass(frozen=True, slots=True)
class TextShape:
    """A text, or one of a few."""

    choices: tuple[str, ...] = ()

    @property
    def noun(self) -> str:
        return " or ".join(f'"{one}"' for one in self.choices) or "a text"

    def fits(self, value: Any) -> bool:
        return isinstance(value, str)

    def read(self, value: Any, path: str, notes: Notes) -> Any:
        if not isinstance(value, str) or (self.choices and value not in self.choices):
            raise wrong(path, self.noun, value)
        return value

    def schema(self, named: dict[str, Schema]) -> Schema:
        return {"type": "string"} | ({"enum": [*self.choices]} if self.choices else {})


@dataclass(frozen=True, slots=True)
class NumberShape:
    """A number within bounds, both included; a whole one may be written as 5.0."""

    kind: type[int] | type[float]
    least: float | None = None
    most: float | None = None

    @property
    def noun(self) -> str:
        noun = "a whole number" if self.kind is int else "a number"
        if self.least is not None and self.most is not None:
            return f"{noun} from {self.least} to {self.most}"
        return noun if self.least is None else f"{noun} of at least {self.least}"

    def fits(self, value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    def read(self, value: Any, path: str, notes: Notes) -> Any:
        if not self.fits(value) or not self._is_within(value):
            raise wrong(path, self.noun, value)
        if self.kind is int and value != int(value):
            raise wrong(path, self.noun, value)
        return self.kind(value)

    def _is_within(self, value: float) -> bool:
        is_large = self.least is None or value >= self.least
        return is_large and (self.most is None or value <= self.most)

    def schema(self, named: dict[str, Schema]) -> Schema:
        found: Schema = {"type": "integer" if self.kind is int else "number"}
        if self.least is not None:
            found["minimum"] = self.least
        if self.most is not None:
            found["maximum"] = self.most
        return found


@dataclass(frozen=True, slots=True)
class FlagShape:
    """True or false."""

    noun = "true or false"

    def fits(self, value: Any) -> bool:
        return isinstance(value, bool)

    def read(self, value: Any, path: str, notes: Notes) -> Any:
        if not isinstance(value, bool):
            raise wrong(path, self.noun, value)
        return value

    def schema(self, named: dict[str, Schema]) -> Schema:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class JsonShape:
    """An object with anything inside, which is kept as it is."""

    noun = "an object"

    def fits(self, value: Any) -> bool:
        return isinstance(value, dict)

    def read(self, value: Any, path: str, notes: Notes) -> Any:
        if not isinstance(value, dict):
            raise wrong(path, self.noun, value)
        return value

    def schema(self, named: dict[str, Schema]) -> Schema:
        return {"type": "object"}


@dataclass(frozen=True, slots=True)
class ListShape:
    """A list of values of one shape, which becomes a tuple."""

    item: Shape
    least: int = 0
    most: int | None = None

    @property
    def noun(self) -> str:
        noun = "a list"
        if self.least or self.most is not None:
            sizes = [f"at least {self.least}"] if self.least else []
            sizes += [] if self.most is None else [f"at most {self.most}"]
            noun += f" of {' and '.join(sizes)}"
        return noun

    def fits(self, value: Any) -> bool:
        return isinstance(value, list)

    def read(self, value: Any, path: str, notes: Notes) -> Any:
        if not isinstance(value, list) or len(value) < self.least:
            raise wrong(path, self.noun, value)
        if self.most is not None and len(value) > self.most:
            raise wrong(path, self.noun, value)
        return tuple(self.item.read(one, f"{path}[{at}]", notes) for at, one in enumerate(value))

    def schema(self, named: dict[str, Schema]) -> Schema:
        found: Schema = {"type": "array", "items": self.item.schema(named)}
        if self.least:
            found["minItems"] = self.least
        if self.most is not None:
            found["maxItems"] = self.most
        return found


@dataclass(frozen=True, slots=True)
class TableShape:
    """An object whose keys are free and whose values have one shape."""

    item: Shape
    noun = "an object"

    def fits(self, value: Any) -> bool:
        return isinstance(value, dict)

    def read(self, value: Any, path: str, notes: Notes) -> Any:
        if not isinstance(value, dict):
            raise wrong(path, self.noun, value)
        return {key: self.item.read(one, f"{path}.{key}", notes) for key, one in value.items()}

    def schema(self, named: dict[str, Schema]) -> Schema:
        return {"type": "object", "additionalProperties": self.item.schema(named)}


@dataclass(frozen=True, slots=True)
class EitherShape:
    """A value of one of several shapes; the first that reads it counts.

    If none does, the error is that of the shape that has read furthest.
    """

    options: tuple[Shape, ...]

    @property
    def noun(self) -> str:
        return " or ".join(dict.fromkeys(option.noun for option in self.options))

    def fits(self, value: Any) -> bool:
        return any(option.fits(value) for option in self.options)

    def read(self, value: Any, path: str, notes: Notes) -> Any:
        fitting = [option for option in self.options if option.fits(value)]
        if not fitting:
            raise wrong(path, self.noun, value)
        refusals = list[Refusal]()
        for option in fitting:
            try:
                return option.read(value, path, notes)
            except Refusal as refusal:
                refusals.insert(0, refusal)
        raise max(refusals, key=_indices)

    def schema(self, named: dict[str, Schema]) -> Schema:
        return {"anyOf": [option.schema(named) for option in self.options]}


def _indices(refusal: Refusal) -> list[int]:
    """Return the indices in the place of a wrong value; the further it was read, the larger."""
    return [int(index) for index in re.findall(r"\[(\d+)\]", refusal.param or "")]


@dataclass(frozen=True, slots=True)
class ObjectShape:
    """An object that becomes a dataclass; unknown fields are noted and left out.

    A field that may be left out may also be null, which means the same.

    Attributes:
        fields: shapes by the name of the field in JSON, which is also that in the dataclass.
    """

    kind: type
    fields: Mapping[str, tuple[Shape, Field[Any]]]
    noun = "an object"

    def fits(self, value: Any) -> bool:
        return isinstance(value, dict)

    def read(self, value: Any, path: str, notes: Notes) -> Any:
        if not isinstance(value, dict):
            raise wrong(path, self.noun, value)
        inside = f"{path}." if path else ""
        notes.unknown += [f"{inside}{name}" for name in value if name not in self.fields]
        found = {}
        for name, (shape, spec) in self.fields.items():
            given = value.get(name)
            if given is not None:
                found[name] = shape.read(given, f"{inside}{name}", notes)
            elif is_needed(spec):
                if name in value:
                    raise wrong(f"{inside}{name}", shape.noun, None)
                raise Refusal(400, f"{inside}{name} is missing.", param=f"{inside}{name}")
        return self.kind(**found)

    def schema(self, named: dict[str, Schema]) -> Schema:
        name = self.kind.__name__
        if name not in named:
            named[name] = {}  # ends a circle
            named[name] = self._described(named)
        return {"$ref": f"#/components/schemas/{name}"}

    def _described(self, named: dict[str, Schema]) -> Schema:
        properties = {}
        for name, (shape, spec) in self.fields.items():
            found = shape.schema(named)
            if not is_needed(spec):
                found = {"anyOf": [found, {"type": "null"}]}
            if text := spec.metadata.get("help", ""):
                found = found | {"description": text}
            properties[name] = found
        needed = [name for name, (_, spec) in self.fields.items() if is_needed(spec)]
        described: Schema = {"type": "object", "properties": properties}
        return described | ({"required": needed} if needed else {})


def is_needed(spec: Field[Any]) -> bool:
    """Return whether a field of a dataclass has no default."""
    return spec.default is MISSING and spec.default_factory is MISSING


def either(options: Sequence[Shape]) -> Shape:
    """Return the shape of a value of one of several shapes, or the only one."""
    return options[0] if len(options) == 1 else EitherShape(tuple(options))
