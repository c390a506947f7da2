"""Connections of the server: time limits, counts, and which ones are closed for new ones."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.server.context import ServerContext
from app.server.refusal import BUSY_S, Refusal
from app.server.settings import ServerSettings
from app.server.web.access import check_settings
from app.server.web.responses import refusal_response
from app.server.web.routes import make_app, shape_of
from engine import EngineError

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


class ConnectionLimitMiddleware:
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
    uncrowded = ConnectionLimitMiddleware(app)
    config = uvicorn.Config(
        uncrowded, loop="asyncio", http=TimedProtocol, ws="none", lifespan="off", log_config=None,
        log_level="critical", access_log=False, proxy_headers=False, server_header=False,
        timeout_keep_alive=IDLE_S, backlog=BACKLOG,
    )  # fmt: skip
    server = uncrowded.server = QuietServer(config)
    return server


START_S = 10.0
"""Seconds in which a server on a thread has started."""

STOP_S = 2.0
"""Seconds in which a server on a thread has ended."""


Listener = socket.socket
"""A socket that listens."""


def listen(settings: ServerSettings) -> Listener:
    """Return a socket that listens as the settings say.

    Raises:
        EngineError: the address is not this machine's or is in use, or the server would be open
            to others without a key.
    """
    check_settings(settings)
    host, port = settings.host, settings.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError, OverflowError):
        raise EngineError(f"There is no address {host}.", "Use --host 127.0.0.1.") from None
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        sock.close()
        raise _not_listening(host, port, error) from None
    sock.setblocking(False)
    return sock


def _not_listening(host: str, port: int, error: Exception) -> EngineError:
    number = getattr(error, "errno", None)
    if number in (errno.EADDRINUSE, getattr(errno, "WSAEADDRINUSE", None)):
        return EngineError(
            f"Port {port} of {host} is in use already.", "Choose another one with --port."
        )
    if number in (errno.EACCES, errno.EPERM):
        return EngineError(
            f"This system does not let you listen on port {port}.",
            "Choose one of 1024 or more with --port.",
        )
    if number == errno.EADDRNOTAVAIL:
        return EngineError(f"{host} is no address of this machine.", "Use --host 127.0.0.1.")
    reason = getattr(error, "strerror", None) or str(error)
    return EngineError(f"The server cannot listen on {host}:{port}: {reason}.")


def address_of(sock: Listener) -> str:
    """Return the address of a listening socket, such as "http://127.0.0.1:11435"."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    context: ServerContext, sock: Listener, on_ready: Callable[[QuietServer], None]
) -> None:
    """Serve until the server is told to end.

    Args:
        sock: what `listen` returned.
        on_ready: called with the server once it takes requests; `should_exit` ends it when the
            answers under way have ended, and `force_exit` at once.
    """
    server = make_server(make_app(context))
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        while not (server.started or serving.done()):
            await asyncio.sleep(0.01)
        if server.started:
            on_ready(server)
        await asyncio.shield(serving)
    finally:
        server.should_exit = server.force_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        await _end_requests(server)
        sock.close()


async def _end_requests(server: QuietServer) -> None:
    """Cancel the requests that are still under way, so that what they have asked for ends."""
    tasks = list(server.server_state.tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class ServerThread:
    """A server on a thread of its own, for a program with another main loop.

    Args:
        make_context: makes the context, on the thread and inside its running loop.
        settings: where it listens.
    """

    def __init__(self, make_context: Callable[[], ServerContext], settings: ServerSettings) -> None:
        self._make_context, self._settings = make_context, settings
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: QuietServer | None = None
        self._is_ready = threading.Event()
        self._problem: BaseException | None = None

    def start(self) -> str:
        """Start the server and return its address.

        Raises:
            EngineError: it cannot listen there, or runs already.
        """
        if self._thread is not None:
            raise EngineError("The server runs already.")
        sock = listen(self._settings)
        address = address_of(sock)
        self._is_ready.clear()
        self._problem = None
        self._thread = threading.Thread(target=self._run, args=(sock,), name="tandem-server")
        self._thread.start()
        if not self._is_ready.wait(START_S) or self._problem is not None:
            self.stop()
            raise EngineError(f"The server could not start: {self._problem or 'it took too long'}.")
        return address

    def stop(self) -> bool:
        """End the server and its answers; return whether it has ended in time."""
        thread = self._thread
        if thread is None:
            return True
        self.call(self._end)
        thread.join(STOP_S)
        if thread.is_alive():
            return False
        self._thread = self._loop = self._server = None
        return True

    def call(self, function: Callable[[], object]) -> None:
        """Have a function called soon inside the server's loop, unless it has ended."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(function)

    def _end(self) -> None:
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True

    def _run(self, sock: Listener) -> None:
        try:
            asyncio.run(self._serve(sock))
        except Exception as error:
            log.exception("the server has ended")
            self._problem = error
        finally:
            sock.close()
            self._is_ready.set()

    async def _serve(self, sock: Listener) -> None:
        self._loop = asyncio.get_running_loop()
        context = self._make_context()
        context.engine.open()
        try:
            await serve(context, sock, self._started)
        finally:
            context.engine.close()

    def _started(self, server: QuietServer) -> None:
        self._server = server
        self._is_ready.set()
