"""Dataclasses read from JSON documents: their annotations say what is accepted.

Annotations may be str, int, float, bool, `Literal` texts, `tuple[X, ...]` (a list), `Mapping[str,
X]`, `JsonObject`, other dataclasses, and unions of these; with None where a field may be left out.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from dataclasses import field as dataclass_field
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from app.server.requests.body import read_json, too_large
from app.server.requests.shapes import (
    FlagShape,
    JsonShape,
    ListShape,
    Notes,
    NumberShape,
    ObjectShape,
    Schema,
    Shape,
    TableShape,
    TextShape,
    either,
)
from engine import SamplingParams

log = logging.getLogger(__name__)

T = TypeVar("T")

JsonObject = dict[str, Any]
"""Annotation of an object that is kept as it is."""

NOTED: set[str] = set()
"""Unknown fields that the log has a line of."""

MOST_NOTED = 1000
"""Number of unknown fields after which the log has no more lines."""


def asked(
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


def asked_like(name: str) -> Any:
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
        if name not in NOTED and len(NOTED) < MOST_NOTED:
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
