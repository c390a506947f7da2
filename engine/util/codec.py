"""Typed JSON: reads documents into dataclasses by annotation, and describes them as JSON Schema.

    request = read_document(ChatRequest, json.loads(body))

The type says what a value must be; the metadata of a dataclass field may add "min" and "max"
(bounds for a number, or for the length of a list) and "help" (its description). Schemas follow
draft 2020-12, as in OpenAPI 3.1. Client requests and all files on disk are read here.
"""

from __future__ import annotations

import json
import re
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from typing import (
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

MAX_SHOWN = 60
"""Maximum number of characters from a wrong value that an error message repeats."""

T = TypeVar("T")

JsonSchema = dict[str, Any]

JsonObject = dict[str, Any]
"""Annotation for an object that is kept as it is."""


class WrongValue(ValueError):
    """Error for a value that does not have the expected type.

    Args:
        path: path to the value, such as "messages[0].role"; "" for the whole document.
        noun: expected value, such as "a string"; "" if a required value is missing.
    """

    def __init__(self, path: str, noun: str, value: Any = None) -> None:
        self.path, self.noun, self.value = path, noun, value
        super().__init__(self.sentence("The document"))

    def sentence(self, whole: str) -> str:
        """Return what is wrong; `whole` names a document that is wrong as a whole."""
        problem = f"must be {self.noun}, not {_shown(self.value)}" if self.noun else "is missing"
        return f"{self.path or whole} {problem}."


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


@dataclass(slots=True)
class ReadNotes:
    """Observations made while a document is read.

    Attributes:
        unknown: paths of unknown fields.
        n_files: number of characters in files.
    """

    unknown: list[str] = field(default_factory=list)
    n_files: int = 0


class Shape(ABC):
    """What a JSON value must be.

    Attributes:
        kinds: Python types that such a value may have.
    """

    __slots__ = ()
    kinds: ClassVar[tuple[type, ...]]

    @property
    @abstractmethod
    def noun(self) -> str:
        """Name of the expected value, such as "a string"."""

    def fits(self, value: Any) -> bool:
        """Return whether a value has the right type, regardless of its content."""
        return isinstance(value, self.kinds)

    def read(self, value: Any, path: str, notes: ReadNotes) -> Any:
        """Return a value as it is stored in a dataclass.

        Raises:
            WrongValue: the value does not have this shape.
        """
        if not self.fits(value):
            raise WrongValue(path, self.noun, value)
        return self._read(value, path, notes)

    def _read(self, value: Any, path: str, notes: ReadNotes) -> Any:
        return value

    @abstractmethod
    def schema(self, named: dict[str, JsonSchema]) -> JsonSchema:
        """Return the JSON schema; object schemas are put into `named` and referenced."""


@dataclass(frozen=True, slots=True)
class TextShape(Shape):
    """Any string, or one of a few choices."""

    kinds = (str,)
    choices: tuple[str, ...] = ()
    is_file: bool = False

    @property
    def noun(self) -> str:
        return " or ".join(f'"{one}"' for one in self.choices) or "a string"

    def _read(self, value: Any, path: str, notes: ReadNotes) -> Any:
        if self.choices and value not in self.choices:
            raise WrongValue(path, self.noun, value)
        notes.n_files += len(value) * self.is_file
        return value

    def schema(self, named: dict[str, JsonSchema]) -> JsonSchema:
        return {"type": "string"} | ({"enum": [*self.choices]} if self.choices else {})


@dataclass(frozen=True, slots=True)
class NumberShape(Shape):
    """A finite number within inclusive bounds; an integer may be written as 5.0."""

    kinds = (int, float)
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
        return isinstance(value, self.kinds) and not isinstance(value, bool)

    def _read(self, value: Any, path: str, notes: ReadNotes) -> Any:
        is_within = (
            abs(value) <= sys.float_info.max  # isfinite fails for integers that no float can hold
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
        )
        if not is_within or (self.kind is int and value != int(value)):
            raise WrongValue(path, self.noun, value)
        return self.kind(value)

    def schema(self, named: dict[str, JsonSchema]) -> JsonSchema:
        found: JsonSchema = {"type": "integer" if self.kind is int else "number"}
        if self.least is not None:
            found["minimum"] = self.least
        if self.most is not None:
            found["maximum"] = self.most
        return found


INTEGER = NumberShape(int)


@dataclass(frozen=True, slots=True)
class BoolShape(Shape):
    """True or false."""

    kinds = (bool,)
    noun = "true or false"

    def schema(self, named: dict[str, JsonSchema]) -> JsonSchema:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class JsonShape(Shape):
    """An object with any content, which is kept as it is."""

    kinds = (dict,)
    noun = "an object"

    def schema(self, named: dict[str, JsonSchema]) -> JsonSchema:
        return {"type": "object"}


@dataclass(frozen=True, slots=True)
class ListShape(Shape):
    """A list of values of one shape, which becomes a tuple."""

    kinds = (list, tuple)
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

    def _read(self, value: Any, path: str, notes: ReadNotes) -> Any:
        if len(value) < self.least or (self.most is not None and len(value) > self.most):
            raise WrongValue(path, self.noun, value)
        if self.item == INTEGER and set(map(type, value)) == {int}:
            return tuple(value)  # a prompt may be a million token ids
        return tuple(self.item.read(one, f"{path}[{at}]", notes) for at, one in enumerate(value))

    def schema(self, named: dict[str, JsonSchema]) -> JsonSchema:
        found: JsonSchema = {"type": "array", "items": self.item.schema(named)}
        if self.least:
            found["minItems"] = self.least
        if self.most is not None:
            found["maxItems"] = self.most
        return found


@dataclass(frozen=True, slots=True)
class TupleShape(Shape):
    """A list with a separate shape for each element."""

    kinds = (list, tuple)
    items: tuple[Shape, ...]

    @property
    def noun(self) -> str:
        return f"a list of {len(self.items)}"

    def _read(self, value: Any, path: str, notes: ReadNotes) -> Any:
        if len(value) != len(self.items):
            raise WrongValue(path, self.noun, value)
        pairs = enumerate(zip(self.items, value, strict=True))
        return tuple(item.read(one, f"{path}[{at}]", notes) for at, (item, one) in pairs)

    def schema(self, named: dict[str, JsonSchema]) -> JsonSchema:
        return {"type": "array", "prefixItems": [item.schema(named) for item in self.items]}


@dataclass(frozen=True, slots=True)
class TableShape(Shape):
    """An object with arbitrary keys whose values have one shape; numeric keys are in decimal."""

    kinds = (dict,)
    noun = "an object"
    item: Shape
    key: type = str

    def _read(self, value: Any, path: str, notes: ReadNotes) -> Any:
        if self.key is int and not all(str(key).isdecimal() for key in value):
            raise WrongValue(path, "an object with whole numbers as keys", value)
        return {
            self.key(key): self.item.read(one, f"{path}.{key}", notes) for key, one in value.items()
        }

    def schema(self, named: dict[str, JsonSchema]) -> JsonSchema:
        return {"type": "object", "additionalProperties": self.item.schema(named)}


@dataclass(frozen=True, slots=True)
class UnionShape(Shape):
    """A value with one of several shapes; the first shape that can read it counts.

    If none can, the error comes from the shapes that read furthest.
    """

    options: tuple[Shape, ...]

    @property
    def noun(self) -> str:
        return " or ".join(dict.fromkeys(option.noun for option in self.options))

    def fits(self, value: Any) -> bool:
        return any(option.fits(value) for option in self.options)

    def _read(self, value: Any, path: str, notes: ReadNotes) -> Any:
        errors = []
        for option in self.options:
            if option.fits(value):
                try:
                    return option.read(value, path, notes)
                except WrongValue as error:
                    errors.append(error)
        raise _furthest(errors)

    def schema(self, named: dict[str, JsonSchema]) -> JsonSchema:
        return {"anyOf": [option.schema(named) for option in self.options]}


def _furthest(errors: Sequence[WrongValue]) -> WrongValue:
    """Return the error whose path has the largest indices, with the nouns from all errors there."""
    furthest = max(errors, key=lambda error: [*map(int, re.findall(r"\[(\d+)\]", error.path))])
    nouns = [error.noun for error in errors if error.path == furthest.path]
    if not all(nouns):
        return furthest
    return WrongValue(furthest.path, " or ".join(dict.fromkeys(nouns)), furthest.value)


@dataclass(frozen=True, slots=True)
class ObjectShape(Shape):
    """An object that becomes a dataclass; unknown fields are noted and dropped.

    If a field has a default, null means that default.

    Attributes:
        fields: shapes by field name, which is the same in JSON and in the dataclass.
        nullable: names of fields that have no default but may be null.
    """

    kinds = (dict,)
    noun = "an object"
    kind: type
    fields: Mapping[str, tuple[Shape, Field[Any]]]
    nullable: frozenset[str]

    def _read(self, value: Any, path: str, notes: ReadNotes) -> Any:
        inside = f"{path}." if path else ""
        notes.unknown += [f"{inside}{name}" for name in value if name not in self.fields]
        found = {}
        for name, (shape, spec) in self.fields.items():
            given = value.get(name)
            if given is not None:
                found[name] = shape.read(given, f"{inside}{name}", notes)
            elif name in value and name in self.nullable:
                found[name] = None
            elif is_needed(spec):
                raise WrongValue(f"{inside}{name}", shape.noun if name in value else "")
        return self.kind(**found)

    def schema(self, named: dict[str, JsonSchema]) -> JsonSchema:
        name = self.kind.__name__
        if name not in named:
            named[name] = {}  # ends the recursion of circular types
            named[name] = self._described(named)
        return {"$ref": f"#/components/schemas/{name}"}

    def _described(self, named: dict[str, JsonSchema]) -> JsonSchema:
        properties = {}
        for name, (shape, spec) in self.fields.items():
            found = shape.schema(named)
            if not is_needed(spec):
                found = {"anyOf": [found, {"type": "null"}]}
            if text := spec.metadata.get("help", ""):
                found = found | {"description": text}
            properties[name] = found
        needed = [name for name, (_, spec) in self.fields.items() if is_needed(spec)]
        described: JsonSchema = {"type": "object", "properties": properties}
        return described | ({"required": needed} if needed else {})


def is_needed(spec: Field[Any]) -> bool:
    """Return whether a dataclass field has no default."""
    return spec.default is MISSING and spec.default_factory is MISSING


def read_document(kind: type[T], value: object, notes: ReadNotes | None = None) -> T:
    """Return the dataclass that a JSON document describes.

    Raises:
        WrongValue: a field is missing or has another type.
        Exception: whatever the constructor of a dataclass raises.
    """
    return cast(T, shape_of(cast(Any, kind)).read(value, "", notes or ReadNotes()))


def document_schema(kind: type, named: dict[str, JsonSchema]) -> JsonSchema:
    """Return the JSON schema of a dataclass; see `Shape.schema`."""
    return shape_of(kind).schema(named)


def read_entries(kind: type[T], table: object) -> dict[str, T]:
    """Return the readable entries of a JSON object; {} if `table` is not an object."""
    found = {}
    for name, value in table.items() if isinstance(table, Mapping) else ():
        with suppress(ValueError):
            found[name] = read_document(kind, value)
    return found


def read_value(hint: object, value: object) -> Any:
    """Return a JSON value as the type that an annotation names.

    Raises:
        WrongValue: the value has another type.
    """
    if value is None and type(None) in get_args(hint):
        return None
    return _shape(hint, {}).read(value, "", ReadNotes())


@cache
def shape_of(kind: type) -> ObjectShape:
    """Return the shape of a dataclass."""
    hints = get_type_hints(kind)
    found = {spec.name: (_shape(hints[spec.name], spec.metadata), spec) for spec in fields(kind)}
    needed = (name for name, (_, spec) in found.items() if is_needed(spec))
    nullable = frozenset(name for name in needed if type(None) in get_args(hints[name]))
    return ObjectShape(kind, found, nullable)


def _shape(hint: Any, metadata: Mapping[str, Any]) -> Shape:
    """Return the shape of an annotation."""
    origin, inner = get_origin(hint), get_args(hint)
    least, most = metadata.get("min"), metadata.get("max")
    if origin in (Union, types.UnionType):
        options = tuple(_shape(one, metadata) for one in inner if one is not type(None))
        return options[0] if len(options) == 1 else UnionShape(options)
    if origin is Literal:
        return TextShape(inner)
    if origin is tuple and inner[-1] is not ...:
        return TupleShape(tuple(_shape(one, {}) for one in inner))
    if origin is tuple:
        item = _shape(inner[0], {"is_file": metadata.get("is_file")})
        return ListShape(item, int(least or 0), most)
    if origin is not None and issubclass(origin, Mapping):
        return JsonShape() if inner[1] is Any else TableShape(_shape(inner[1], metadata), inner[0])
    if hint in (int, float):
        return NumberShape(hint, least, most)
    if is_dataclass(hint) and isinstance(hint, type):
        return shape_of(hint)
    return BoolShape() if hint is bool else TextShape(is_file=bool(metadata.get("is_file")))
