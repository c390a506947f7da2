"""Request bodies, read and parsed into JSON documents that are safe to handle."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from app.server.refusal import BUSY_S, Refusal
from app.server.request_log import RequestLog, RequestRecord
from app.server.settings import MIB, ServerSettings

MAX_DEPTH = 64
"""Maximum nesting depth of lists and objects."""

MAX_NUMBER = 1e300
"""Largest absolute value of a number, including integers."""

MAX_VALUES = 200_000
"""Maximum number of values in a body; eight numbers count as one value.

Python parses about two million values per second, and no other thread can run meanwhile.
"""


class ValueCounter:
    """Counts the values in a JSON document while it arrives."""

    def __init__(self) -> None:
        self._n = 0.0
        self._is_in_text = False
        self._rest = b""  # a backslash that escapes the next piece's first character

    def add(self, piece: bytes) -> None:
        """Count the lists, objects, strings and commas in a piece of the document.

        Raises:
            Refusal: there are more values than `MAX_VALUES`.
        """
        piece = self._rest + piece
        n_slashes = len(piece) - len(piece.rstrip(b"\\"))
        self._rest = b"\\" * (n_slashes % 2)
        piece = piece[: len(piece) - len(self._rest)]
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        plain = b"".join(parts[self._is_in_text :: 2])
        n_quotes = len(parts) - 1
        self._is_in_text ^= bool(n_quotes % 2)
        n_commas = plain.count(b",")
        self._n += n_quotes / 2 + plain.count(b"[") + plain.count(b"{") + n_commas / 8
        if self._n > MAX_VALUES:
            raise Refusal(
                413, f"The request body has more than {MAX_VALUES} values.",
                code="request_too_large",
            )  # fmt: skip


def read_json(body: bytes | bytearray) -> Any:
    """Parse the JSON document in a body.

    Lone surrogates, which JavaScript can leave when it cuts a string, are replaced.

    Raises:
        Refusal: the body is not JSON, has a number that is too large, or is nested too deeply.
    """
    try:
        document = json.loads(body.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError:
        raise Refusal(400, "The request body is not UTF-8.") from None
    except ValueError as error:
        raise Refusal(400, f"The request body is not JSON: {error}.") from None
    _check(document)
    return _whole(document) if b"\\ud" in body or b"\\uD" in body else document


def too_large(most: int) -> Refusal:
    """Return the refusal for a body with more than `most` bytes."""
    return Refusal(413, f"The request is larger than {most} bytes.", code="request_too_large")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a valid number")


def _too_deep() -> Refusal:
    return Refusal(400, f"The request body has more than {MAX_DEPTH} levels of nesting.")


def _check(document: Any) -> None:
    level = [document]
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for value in level:
            if isinstance(value, list):
                below += value
            elif isinstance(value, dict):
                below += value.values()
            elif isinstance(value, int | float) and not -MAX_NUMBER <= value <= MAX_NUMBER:
                raise Refusal(400, "The request body contains a number that is too large.")
        if not below:
            return
        level = below
    raise _too_deep()


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        return whole_characters(value)
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        return {whole_characters(key): _whole(item) for key, item in value.items()}
    return value


def whole_characters(text: str) -> str:
    """Return a text with lone surrogates replaced by U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


SMALL_BODY = 256 << 10
"""Maximum size in bytes of bodies that are always read, and parsed without a thread."""


async def read_body(
    request: Request, settings: ServerSettings, request_log: RequestLog, most: int
) -> bytearray:
    """Read a request's body.

    Args:
        request_log: counts the bytes in all bodies.
        most: maximum number of bytes.

    Raises:
        Refusal: the body is too large, arrives too slowly or has too many values; all bodies
            together are too large; or the client has disconnected.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > most:
        raise too_large(most)
    record: RequestRecord = request.state.record
    body, values = bytearray(), ValueCounter()
    try:
        async with asyncio.timeout(settings.most_read_s):
            async for piece in request.stream():
                body += piece
                request_log.hold(record, len(piece))
                if len(body) > most:
                    raise too_large(most)
                if len(body) > SMALL_BODY and request_log.n_held > settings.most_bodies:
                    raise _too_many(settings.most_bodies)
                values.add(piece)
    except TimeoutError:
        text = f"The request did not arrive within {settings.most_read_s:g} seconds."
        raise Refusal(408, text) from None
    except ClientDisconnect:
        raise Refusal(400, "The request ended prematurely.") from None
    return body


def _too_many(most: int) -> Refusal:
    return Refusal(
        503, f"All requests together exceed {most / MIB:g} MiB.", "Try again later.",
        code="too_many_bytes", retry_after_s=BUSY_S,
    )  # fmt: skip
