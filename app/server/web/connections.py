"""Connections of the server: time limits, counts, and which ones are closed for new ones."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.server.refusal import BUSY_S, Refusal
from app.server.web.responses import refusal_response
from app.server.web.site import shape_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 512
"""Maximum number of connections; half of the files that the process may open, if that is less."""

MAX_PER_ADDRESS = 256
"""Maximum number of connections from one address."""

IDLE_S = 75
"""Seconds after which a connection without a request is closed."""

CROWDED_IDLE_S = 5
"""The same where there are more than half of the connections that there may be."""

HEAD_S = 20.0
"""Seconds in which the head of a request comes, from the connection or its first byte on."""

FRESH_S = 1.0
"""Seconds for which a new or newly idle connection is spared if others can make room."""

UNREAD_S = 60.0
"""Seconds after which a connection whose client reads nothing of its answer is closed."""

NO_FILES_S = 0.1
"""Seconds between attempts to accept a connection while the process has no free file."""

WARNED_S = 60.0
"""Minimum seconds between log lines about that."""

BACKLOG = 128


def max_connections() -> int:
    """Return the maximum number of connections of this process."""
    if os.name != "posix":
        return MAX_CONNECTIONS
    import resource

    n_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_CONNECTIONS if n_files < 0 else min(MAX_CONNECTIONS, n_files // 2)


class TimedProtocol(H11Protocol):
    """HTTP on a connection that is closed unless the head of a request comes in time.

    uvicorn itself waits for the first one, and for the rest of one that has begun, for ever. It
    does the same for clients that do not read their answers.

    Attributes:
        since: time when the connection was made, began with a head or with a request, or became
            idle, as of the loop's clock.
    """

    since = 0.0
    _begun: float | None = None  # when the client began with the head that it is sending

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.since = self._begun = self.loop.time()
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        cycle = self.cycle
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self.cycle is not cycle:
            self.since = self.loop.time()
        if self.cycle is not None and not self.cycle.response_complete:
            self._begun = None
            return
        if self._begun is None:
            self.since = self._begun = self.loop.time()
        self._wait_for_head()

    def on_response_complete(self) -> None:
        n = len(self.server_state.connections)
        self.timeout_keep_alive = IDLE_S if n <= max_connections() / 2 else CROWDED_IDLE_S
        self.since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._close_if_unread(None)

    def _close_if_unread(self, n_before: int | None) -> None:
        n = self.transport.get_write_buffer_size()
        if self.flow.write_paused and n == n_before:
            self.transport.abort()
        elif self.flow.write_paused:
            self.loop.call_later(UNREAD_S, self._close_if_unread, n)

    def _wait_for_head(self) -> None:
        assert self._begun is not None, "the client is sending a head"
        self._unset_keepalive_if_required()
        left = max(0.0, self._begun + HEAD_S - self.loop.time())
        self.timeout_keep_alive_task = self.loop.call_later(left, self.timeout_keep_alive_handler)

    @property
    def rank(self) -> int | None:
        """Rank among the connections that make room for others, None for those that do not.

        0: it has long sent no complete head. 1: it is idle. 2: it has not sent all of its request.
        3: it has just been made, or begun with a head. 4: it has just become idle, and its client
        may be sending the next request.
        """
        if self._begun is not None:
            return 0 if self.loop.time() > self._begun + FRESH_S else 3
        if self.cycle is None or self.cycle.response_complete:
            if self.transport.get_write_buffer_size():
                return None
            return 1 if self.loop.time() > self.since + FRESH_S else 4
        return 2 if self.cycle.more_body else None


class QuietServer(uvicorn.Server):
    """uvicorn without signal handlers, which belong to the program, and with connection limits.

    If there are too many connections, a new one replaces the oldest that does nothing.
    asyncio's own loop for accepting would log hundreds of errors a second where the process may
    open no more files.
    """

    _accepting: list[asyncio.Task[None]]
    _warned = float("-inf")  # when the log had the last line about a lack of files

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets, "the caller listens"
        await self.lifespan.startup()
        self.servers = []
        self._accepting = [asyncio.create_task(self._accept(sock)) for sock in sockets]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await super().shutdown(sockets)

    def n_connections(self, client: str | None = None) -> int:
        """Return the number of connections, or of those from an address."""
        found = self._connections()
        return len(found) if client is None else sum(_address(one) == client for one in found)

    async def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(sock)
            except ConnectionError:
                continue  # it has gone already
            except OSError as error:
                await self._wait_for_file(error)
                continue
            if self.n_connections(address[0]) >= MAX_PER_ADDRESS:
                self._make_room(address[0])
            elif self.n_connections() >= max_connections():
                self._make_room()
            await loop.connect_accepted_socket(self._make_protocol, connection)

    def _make_protocol(self) -> TimedProtocol:
        return TimedProtocol(self.config, self.server_state, self.lifespan.state)

    async def _wait_for_file(self, error: OSError) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() > self._warned + WARNED_S:
            self._warned = loop.time()
            log.warning("new connections wait: %s", error.strerror)
        has_room = error.errno in (errno.EMFILE, errno.ENFILE) and self._make_room()
        await asyncio.sleep(0 if has_room else NO_FILES_S)

    def _make_room(self, client: str | None = None) -> bool:
        """Close the oldest connection that does nothing, and return whether there is one.

        Args:
            client: address from which it must be; None for any.
        """
        found = [
            (one.rank, one.since, id(one), one)
            for one in self._connections()
            if one.rank is not None and client in (None, _address(one))
        ]
        if not found:
            return False
        *_, oldest = min(found)
        oldest.transport.abort()
        self.server_state.connections.discard(oldest)
        return True

    def _connections(self) -> set[TimedProtocol]:
        return cast("set[TimedProtocol]", self.server_state.connections)


def _address(connection: TimedProtocol) -> str | None:
    return None if connection.client is None else connection.client[0]


class Uncrowded:
    """An application that refuses requests while there are too many connections.

    uvicorn could do so itself, but tells it in no protocol's shape.

    Attributes:
        server: the server whose connections count.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.server: QuietServer | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(scope) if scope["type"] == "http" else ""
        if not problem:
            await self._app(scope, receive, send)
            return
        refusal = Refusal(
            503, problem, "Try again later.", code="too_many_connections", retry_after_s=BUSY_S
        )
        response = refusal_response(refusal, shape_of(scope["path"]))
        response.headers["connection"] = "close"
        await response(scope, receive, send)

    def _problem(self, scope: Scope) -> str:
        """Return why a request is refused; "" if it is not."""
        if self.server is None:
            return ""
        n = self.server.n_connections()
        if n > (most := max_connections()):
            return f"There are more than {most} connections."
        client = scope["client"] and scope["client"][0]
        if n > MAX_PER_ADDRESS and self.server.n_connections(client) > MAX_PER_ADDRESS:
            return f"There are more than {MAX_PER_ADDRESS} connections from your address."
        return ""


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
