"""Shapes of JSON values: each reads a value, or says what it must be, and describes itself.

Descriptions are JSON Schema (draft 2020-12), as OpenAPI 3.1 has them.
"""

from __future__ import annotations

import json
import logging
import re
import types
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from dataclasses import field as dataclass_field
from functools import cache
from typing import (
    Any,
    ClassVar,
    Literal,
    Protocol,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from app.server.refusal import Refusal
from app.server.request_body import read_json, too_large
from engine import SamplingParams

MAX_SHOWN = 60
"""Largest number of characters of a wrong value that an error repeats."""

Schema = dict[str, Any]


@dataclass(slots=True)
class Notes:
    """Observations made while a document is read.

    Attributes:
        unknown: places of unknown fields.
        n_files: characters of files.
    """

    unknown: list[str] = field(default_factory=list)
    n_files: int = 0


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


class WrongValue(Refusal):
    """Refusal of a value that is not what it must be.

    Args:
        path: place of the value; "" for the whole request.
        noun: what it must be.
    """

    def __init__(self, path: str, noun: str, value: Any) -> None:
        place = path or "The request body"
        super().__init__(400, f"{place} must be {noun}, not {_shown(value)}.", param=path or None)
        self.noun, self.value = noun, value


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


class KindShape(ABC):
    """A shape whose values are of some Python types.

    Attributes:
        kinds: these types.
    """

    __slots__ = ()
    kinds: ClassVar[tuple[type, ...]]

    @property
    @abstractmethod
    def noun(self) -> str: ...

    def fits(self, value: Any) -> bool:
        return isinstance(value, self.kinds)

    def read(self, value: Any, path: str, notes: Notes) -> Any:
        if not self.fits(value):
            raise WrongValue(path, self.noun, value)
        return self._read(value, path, notes)

    @abstractmethod
    def _read(self, value: Any, path: str, notes: Notes) -> Any:
        """Return a value that fits; see `Shape.read`."""


@dataclass(frozen=True, slots=True)
class TextShape(KindShape):
    """A text, or one of a few."""

    kinds = (str,)
    choices: tuple[str, ...] = ()
    is_file: bool = False

    @property
    def noun(self) -> str:
        return " or ".join(f'"{one}"' for one in self.choices) or "a text"

    def _read(self, value: Any, path: str, notes: Notes) -> Any:
        if self.choices and value not in self.choices:
            raise WrongValue(path, self.noun, value)
        notes.n_files += len(value) * self.is_file
        return value

    def schema(self, named: dict[str, Schema]) -> Schema:
        return {"type": "string"} | ({"enum": [*self.choices]} if self.choices else {})


@dataclass(frozen=True, slots=True)
class NumberShape(KindShape):
    """A number within bounds, both included; a whole one may be written as 5.0."""

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

    def _read(self, value: Any, path: str, notes: Notes) -> Any:
        if not self._is_within(value) or (self.kind is int and value != int(value)):
            raise WrongValue(path, self.noun, value)
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


WHOLE = NumberShape(int)
"""Shape of any whole number."""


@dataclass(frozen=True, slots=True)
class FlagShape(KindShape):
    """True or false."""

    kinds = (bool,)
    noun = "true or false"

    def _read(self, value: Any, path: str, notes: Notes) -> Any:
        return value

    def schema(self, named: dict[str, Schema]) -> Schema:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class JsonShape(KindShape):
    """An object with anything inside, which is kept as it is."""

    kinds = (dict,)
    noun = "an object"

    def _read(self, value: Any, path: str, notes: Notes) -> Any:
        return value

    def schema(self, named: dict[str, Schema]) -> Schema:
        return {"type": "object"}


@dataclass(frozen=True, slots=True)
class ListShape(KindShape):
    """A list of values of one shape, which becomes a tuple."""

    kinds = (list,)
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

    def _read(self, value: Any, path: str, notes: Notes) -> Any:
        if len(value) < self.least or (self.most is not None and len(value) > self.most):
            raise WrongValue(path, self.noun, value)
        if self.item == WHOLE and set(map(type, value)) == {int}:
            return tuple(value)  # without a look at each of what may be a million tokens
        return tuple(self.item.read(one, f"{path}[{at}]", notes) for at, one in enumerate(value))

    def schema(self, named: dict[str, Schema]) -> Schema:
        found: Schema = {"type": "array", "items": self.item.schema(named)}
        if self.least:
            found["minItems"] = self.least
        if self.most is not None:
            found["maxItems"] = self.most
        return found


@dataclass(frozen=True, slots=True)
class TableShape(KindShape):
    """An object whose keys are free and whose values have one shape."""

    kinds = (dict,)
    noun = "an object"
    item: Shape

    def _read(self, value: Any, path: str, notes: Notes) -> Any:
        return {key: self.item.read(one, f"{path}.{key}", notes) for key, one in value.items()}

    def schema(self, named: dict[str, Schema]) -> Schema:
        return {"type": "object", "additionalProperties": self.item.schema(named)}


@dataclass(frozen=True, slots=True)
class EitherShape:
    """A value of one of several shapes; the first that reads it counts.

    If none does, the error is that of the shapes that have read furthest.
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
            raise WrongValue(path, self.noun, value)
        refusals = list[Refusal]()
        for option in fitting:
            try:
                return option.read(value, path, notes)
            except Refusal as refusal:
                refusals.append(refusal)
        raise _furthest(refusals)

    def schema(self, named: dict[str, Schema]) -> Schema:
        return {"anyOf": [option.schema(named) for option in self.options]}


def _furthest(refusals: Sequence[Refusal]) -> Refusal:
    """Return the refusal of a shape that has read furthest; of several, what all of them want."""
    furthest = max(refusals, key=_indices)
    rivals = [one for one in refusals if one.param == furthest.param]
    nouns = [one.noun for one in rivals if isinstance(one, WrongValue)]
    if isinstance(furthest, WrongValue) and len(nouns) == len(rivals):
        noun = " or ".join(dict.fromkeys(nouns))
        return WrongValue(furthest.param or "", noun, furthest.value)
    return furthest


def _indices(refusal: Refusal) -> list[int]:
    """Return the indices in the place of a wrong value; the further it was read, the larger."""
    return [int(index) for index in re.findall(r"\[(\d+)\]", refusal.param or "")]


@dataclass(frozen=True, slots=True)
class ObjectShape(KindShape):
    """An object that becomes a dataclass; unknown fields are noted and left out.

    A field that may be left out may also be null, which means the same.

    Attributes:
        fields: shapes by the name of the field in JSON, which is also that in the dataclass.
    """

    kinds = (dict,)
    noun = "an object"
    kind: type
    fields: Mapping[str, tuple[Shape, Field[Any]]]

    def _read(self, value: Any, path: str, notes: Notes) -> Any:
        inside = f"{path}." if path else ""
        notes.unknown += [f"{inside}{name}" for name in value if name not in self.fields]
        found = {}
        for name, (shape, spec) in self.fields.items():
            given = value.get(name)
            if given is not None:
                found[name] = shape.read(given, f"{inside}{name}", notes)
            elif is_needed(spec):
                if name in value:
                    raise WrongValue(f"{inside}{name}", shape.noun, None)
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


log = logging.getLogger(__name__)

T = TypeVar("T")

JsonObject = dict[str, Any]
"""Annotation of an object that is kept as it is."""

NOTED: set[str] = set()
"""Unknown fields that the log has a line of."""

MAX_NOTED = 1000
"""Number of unknown fields after which the log has no more lines."""


def body_field(
    help: str, default: Any = MISSING, *, least: float | None = None, most: float | None = None,  # noqa: A002
    is_file: bool = False,
) -> Any:  # fmt: skip
    """Return a field of a request.

    Args:
        default: value where the client says nothing; without one, it must.
        least, most: bounds of its numbers, or of the length of its list.
        is_file: whether its texts are files.
    """
    metadata = {"help": help, "min": least, "max": most, "is_file": is_file}
    return dataclass_field(default=default, metadata=metadata)


def sampling_field(name: str) -> Any:
    """Return a field of a request that sets the field of `SamplingParams` with that name."""
    (spec,) = (spec for spec in fields(SamplingParams) if spec.name == name)
    return dataclass_field(default=None, metadata=spec.metadata)


def read_request(kind: type[T], body: bytes | bytearray, most: int | None = None) -> T:
    """Return the request in a body; unknown fields get a line in the log, once each.

    Args:
        most: largest number of bytes besides files; None for any.

    Raises:
        Refusal: it is something else; the error says where.
    """
    notes = Notes()
    request: T = shape_of(cast(Any, kind)).read(read_json(body), "", notes)
    for name in notes.unknown:
        if name not in NOTED and len(NOTED) < MAX_NOTED:
            NOTED.add(name)
            log.warning("requests have the field %.80r, which is not known and not used", name)
    if most is not None and len(body) - notes.n_files > most:
        raise too_large(most)
    return request


def schema_of(kind: type, named: dict[str, Schema]) -> Schema:
    """Return the JSON schema of a dataclass; see `Shape.schema`."""
    return shape_of(kind).schema(named)


@cache
def shape_of(kind: type) -> ObjectShape:
    """Return the shape of a dataclass."""
    hints = get_type_hints(kind)
    found = {spec.name: (_shape(hints[spec.name], spec.metadata), spec) for spec in fields(kind)}
    return ObjectShape(kind, found)


def _shape(hint: Any, metadata: Mapping[str, Any]) -> Shape:
    """Return the shape of an annotation."""
    origin, inner = get_origin(hint), get_args(hint)
    least, most = metadata.get("min"), metadata.get("max")
    if origin in (Union, types.UnionType):
        return either([_shape(one, metadata) for one in inner if one is not type(None)])
    if origin is Literal:
        return TextShape(inner)
    if origin is tuple:
        item = _shape(inner[0], {"is_file": metadata.get("is_file")})
        return ListShape(item, int(least or 0), most)
    if hint == JsonObject:
        return JsonShape()
    if origin is not None and issubclass(origin, Mapping):
        return TableShape(_shape(inner[1], {}))
    if hint in (int, float):
        return NumberShape(hint, least, most)
    if is_dataclass(hint) and isinstance(hint, type):
        return shape_of(hint)
    return FlagShape() if hint is bool else TextShape(is_file=bool(metadata.get("is_file")))
