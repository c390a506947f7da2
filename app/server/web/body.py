"""The body of a request, read within limits of size and time."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from app.server.refusal import Refusal


async def read_body(request: Request, most: int, most_s: float) -> bytes:
    """Return the body of a request.

    Args:
        most: largest number of bytes.
        most_s: seconds in which it must have come.

    Raises:
        Refusal: it is too large or too slow, or the client has gone.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > most:
        raise _too_large(most)
    body = bytearray()
    try:
        async with asyncio.timeout(most_s):
            async for piece in request.stream():
                body += piece
                if len(body) > most:
                    raise _too_large(most)
    except TimeoutError:
        raise Refusal(408, f"The request has not come within {most_s:g} seconds.") from None
    except ClientDisconnect:
        raise Refusal(400, "The request ended in the middle.") from None
    return bytes(body)


def _too_large(most: int) -> Refusal:
    return Refusal(413, f"The request is larger than {most} bytes.", code="request_too_large")
