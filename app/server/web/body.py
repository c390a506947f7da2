"""The body of a request, read within limits of size and time."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from app.server.ledger import Ledger, RequestRecord
from app.server.refusal import BUSY_S, Refusal
from app.server.requests.body import ValueCounter, too_large
from app.server.settings import MIB, ServerSettings

SMALL_BODY = 256 << 10
"""Bytes of a body that is read however many others there are, and parsed without a thread."""


async def read_body(
    request: Request, settings: ServerSettings, ledger: Ledger, most: int
) -> bytearray:
    """Return the body of a request.

    Args:
        ledger: counts the bytes of all bodies.
        most: largest number of bytes.

    Raises:
        Refusal: it is too large or too slow, has too many values, there are too many other bodies,
            or the client has gone.
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
                ledger.hold(record, len(piece))
                if len(body) > most:
                    raise too_large(most)
                if len(body) > SMALL_BODY and ledger.n_held > settings.most_bodies:
                    raise _too_many(settings.most_bodies)
                values.add(piece)
    except TimeoutError:
        text = f"The request has not come within {settings.most_read_s:g} seconds."
        raise Refusal(408, text) from None
    except ClientDisconnect:
        raise Refusal(400, "The request ended in the middle.") from None
    return body


def _too_many(most: int) -> Refusal:
    return Refusal(
        503, f"The requests under way have more than {most / MIB:g} MiB.", "Try again later.",
        code="too_many_bytes", retry_after_s=BUSY_S,
    )  # fmt: skip
