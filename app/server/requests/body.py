"""The body of a request as a JSON document that is safe to handle."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from app.server.refusal import Refusal

MOST_DEPTH = 64
"""Most levels of lists and objects inside each other."""

MOST_NUMBER = 1e300
"""Largest number, which a whole number cannot exceed either."""


def read_json(body: bytes) -> Any:
    """Return the document of a body.

    Halves of characters, which JavaScript leaves where it cuts a text, become question marks.

    Raises:
        Refusal: it is no JSON, a number is not finite, or it is nested too deeply.
    """
    try:
        document = json.loads(body.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError:
        raise Refusal(400, "The request body is not UTF-8.") from None
    except ValueError as error:
        raise Refusal(400, f"The request body is not JSON: {error}.") from None
    has_halves = b"\\ud" in body or b"\\uD" in body
    return _cleaned(document, has_halves=has_halves)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _too_deep() -> Refusal:
    return Refusal(400, f"The request body has more than {MOST_DEPTH} levels.")


def _cleaned(value: Any, depth: int = 0, *, has_halves: bool) -> Any:
    """Return a document whose numbers are finite and whose texts are whole characters."""
    if depth > MOST_DEPTH:
        raise _too_deep()
    if isinstance(value, str):
        return whole_characters(value) if has_halves else value
    if isinstance(value, int | float) and not -MOST_NUMBER <= value <= MOST_NUMBER:
        raise Refusal(400, "The request body has a number that is too large.")
    if isinstance(value, list):
        if set(map(type, value)) == {int} and max(map(abs, value)) <= MOST_NUMBER:
            return value  # such as a million tokens, which must not hold up other requests
        return [_cleaned(item, depth + 1, has_halves=has_halves) for item in value]
    if isinstance(value, dict):
        return {
            _cleaned(key, depth, has_halves=has_halves): _cleaned(
                item, depth + 1, has_halves=has_halves
            )
            for key, item in value.items()
        }
    return value


def whole_characters(text: str) -> str:
    """Return a text in which a surrogate without its other half is a question mark."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
