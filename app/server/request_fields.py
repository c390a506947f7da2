"""Request fields: their declaration, and parsing of bodies into request dataclasses."""

from __future__ import annotations

import logging
from dataclasses import MISSING, fields
from dataclasses import field as dataclass_field
from typing import Any, TypeVar

from app.server.refusal import Refusal
from app.server.request_body import read_json, too_large
from engine import ReadNotes, SamplingParams, WrongValue, read_document

log = logging.getLogger(__name__)

T = TypeVar("T")

NOTED: set[str] = set()
"""Unknown fields that have been logged."""

MAX_NOTED = 1000
"""Maximum number of unknown fields that are logged."""


def body_field(
    help: str, default: Any = MISSING, *, least: float | None = None, most: float | None = None,  # noqa: A002
    is_file: bool = False,
) -> Any:  # fmt: skip
    """Return a request field.

    Args:
        default: value if the client sends none; if omitted, the field is required.
        least, most: bounds for its numbers, or for its list's length.
        is_file: whether its texts are files.
    """
    metadata = {"help": help, "min": least, "max": most, "is_file": is_file}
    return dataclass_field(default=default, metadata=metadata)


def sampling_field(name: str) -> Any:
    """Return a request field that sets the `SamplingParams` field with the same name."""
    (spec,) = (spec for spec in fields(SamplingParams) if spec.name == name)
    return dataclass_field(default=None, metadata=spec.metadata)


def read_request(kind: type[T], body: bytes | bytearray, most: int | None = None) -> T:
    """Parse the request in a body; log each unknown field once.

    Args:
        most: maximum number of bytes, not counting files; None for no limit.

    Raises:
        Refusal: the body is too large or not a valid request; the error says what is wrong.
    """
    notes = ReadNotes()
    try:
        request = read_document(kind, read_json(body), notes)
    except WrongValue as error:
        raise Refusal(400, error.sentence("The request body"), param=error.path or None) from None
    for name in notes.unknown:
        if name not in NOTED and len(NOTED) < MAX_NOTED:
            NOTED.add(name)
            log.warning("requests contain the unknown field %.80r, which is ignored", name)
    if most is not None and len(body) - notes.n_files > most:
        raise too_large(most)
    return request
