"""Connections of the server: how long each may take, and how many there may be."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.server.refusal import BUSY_S, Refusal
from app.server.web.responses import refusal_response
from app.server.web.site import shape_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

MOST_CONNECTIONS = 512
"""Number of connections beyond which requests are refused."""

IDLE_S = 75
"""Seconds after which a connection without a request is closed."""

HEAD_S = 20.0
"""Seconds in which the head of a request comes, from the connection or its first byte on."""

BACKLOG = 128


class TimedProtocol(H11Protocol):
    """HTTP on a connection that is closed unless the head of a request comes in time.

    uvicorn itself waits for the first one, and for the rest of one that has begun, for ever.
    """

    _begun: float | None = None  # when the client began with the head that it is sending

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begun = self.loop.time()
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._begun = None
            return
        self._begun = self._begun or self.loop.time()
        self._wait_for_head()

    def _wait_for_head(self) -> None:
        assert self._begun is not None, "the client is sending a head"
        self._unset_keepalive_if_required()
        left = max(0.0, self._begun + HEAD_S - self.loop.time())
        self.timeout_keep_alive_task = self.loop.call_later(left, self.timeout_keep_alive_handler)


class QuietServer(uvicorn.Server):
    """uvicorn without a hand in signals, which belong to the program."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Uncrowded:
    """An application that refuses requests while there are too many connections.

    uvicorn could do so itself, but tells it in no protocol's shape.

    Attributes:
        server: the server whose connections count.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.server: uvicorn.Server | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        n = 0 if self.server is None else len(self.server.server_state.connections)
        if scope["type"] != "http" or n <= MOST_CONNECTIONS:
            await self._app(scope, receive, send)
            return
        refusal = Refusal(
            503, f"There are more than {MOST_CONNECTIONS} connections.", "Try again later.",
            code="too_many_connections", retry_after_s=BUSY_S,
        )  # fmt: skip
        response = refusal_response(refusal, shape_of(scope["path"]))
        response.headers["connection"] = "close"
        await response(scope, receive, send)


def make_server(app: ASGIApp) -> QuietServer:
    """Return a server for an application, which starts with `serve(sockets=[...])`."""
    uncrowded = Uncrowded(app)
    config = uvicorn.Config(
        uncrowded, loop="asyncio", http=TimedProtocol, ws="none", lifespan="off", log_config=None,
        log_level="critical", access_log=False, proxy_headers=False, server_header=False,
        timeout_keep_alive=IDLE_S, backlog=BACKLOG,
    )  # fmt: skip
    server = uncrowded.server = QuietServer(config)
    return server
