"""Responses whose computation is cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.server.refusal import Refusal, refusal_of, server_bug
from engine import EngineError

log = logging.getLogger(__name__)

Document = dict[str, Any]

ErrorShape = Callable[[Refusal], Document]
"""Converts a refusal into a protocol's error document."""

PING = b": ping\n\n"

EVENTS = "text/event-stream"

GONE = 499  # status logged if the client disconnects before the response, as in nginx


def json_bytes(document: object) -> bytes:
    """Serialize a document as compact JSON."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def json_response(
    document: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Return a JSON response."""
    return Response(json_bytes(document), status, headers, media_type="application/json")


def refusal_response(refusal: Refusal, shape: ErrorShape) -> Response:
    """Return the error response for a refusal."""
    headers = {}
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(refusal.retry_after_s)
    if refusal.status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(shape(refusal), refusal.status, headers)


def event_bytes(document: object, name: str = "") -> bytes:
    """Return a server-sent event with JSON data."""
    begin = f"event: {name}\n".encode() if name else b""
    return begin + b"data: " + json_bytes(document) + b"\n\n"


class AwaitedJson(Response):
    """JSON response that is slow to compute; `make` is cancelled if the client disconnects."""

    def __init__(self, make: Callable[[], Awaitable[Document]], shape: ErrorShape) -> None:
        self._make, self._shape = make, shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def work() -> None:
            try:
                response = json_response(await self._make())
            except EngineError as error:
                response = _error_response(scope, error, self._shape)
            await response(scope, receive, send)

        await _until_gone(scope, receive, work)


class EventStream(Response):
    """A stream of server-sent events.

    Status and headers are sent with the first event or ping, so that earlier errors can have their
    own status.

    Args:
        frames: events as bytes; closed when the client disconnects.
        ping_s: seconds between comments that keep the connection alive; None for no comments.
        last_words: creates the event for an error during the stream.
        media_type: media type of the stream.
    """

    def __init__(
        self, frames: AsyncGenerator[bytes, None], shape: ErrorShape, ping_s: float | None,
        last_words: Callable[[Document], bytes] = event_bytes, media_type: str = EVENTS,
    ) -> None:  # fmt: skip
        self._frames, self._shape, self._ping_s = frames, shape, ping_s
        self._last_words, self._type = last_words, media_type
        self._is_started = False
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def work() -> None:
            if self._ping_s is None:
                await self._write(scope, receive, send)
                return
            pinger = asyncio.create_task(self._ping(send, self._ping_s))
            try:
                await self._write(scope, receive, send)
            finally:
                pinger.cancel()

        async with aclosing(self._frames):
            await _until_gone(scope, receive, work)

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for frame in self._frames:
                await self._send(send, frame)
        except EngineError as error:
            if not self._is_started:
                self._is_started = True
                await _error_response(scope, error, self._shape)(scope, receive, send)
                return
            await self._send_error(send, _logged(scope, error))
        except Exception:  # a bug must not end a stream silently
            if self._is_started:
                await self._send_error(send, server_bug())
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            raise
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_error(self, send: Send, refusal: Refusal) -> None:
        await self._send(send, self._last_words(self._shape(refusal)))

    async def _ping(self, send: Send, interval_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._sent_at = loop.time()
        while True:
            await asyncio.sleep(max(0.0, self._sent_at + interval_s - loop.time()))
            if loop.time() >= self._sent_at + interval_s:
                await self._send(send, PING)

    async def _send(self, send: Send, frame: bytes) -> None:
        if not self._is_started:
            self._is_started = True
            headers = [
                (b"content-type", f"{self._type}; charset=utf-8".encode()),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),  # otherwise nginx buffers the events
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._sent_at = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": frame, "more_body": True})


def _error_response(scope: Scope, error: EngineError, shape: ErrorShape) -> Response:
    return refusal_response(_logged(scope, error), shape)


def _logged(scope: Scope, error: EngineError) -> Refusal:
    refusal = refusal_of(error)
    scope["state"]["record"].problem = str(refusal)
    return refusal


async def _until_gone(scope: Scope, receive: Receive, work: Callable[[], Awaitable[None]]) -> None:
    working = asyncio.ensure_future(work())
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            scope["state"]["record"].status = GONE
    finally:
        is_done = working.done()
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
    if is_done:
        working.result()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
