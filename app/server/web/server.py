"""The running server: its connections, their limits and timeouts, and its thread."""

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

from app.core.translation import tr_later
from app.server.context import ServerContext
from app.server.refusal import BUSY_S, Refusal
from app.server.settings import ServerSettings
from app.server.web.access import check_settings
from app.server.web.responses import refusal_response
from app.server.web.routes import make_app, shape_of
from engine import EngineError, Sentence

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 512
"""Maximum number of connections; at most half of the process's file descriptors."""

MAX_PER_ADDRESS = 256  # maximum number of connections from one address
IDLE_S = 75  # keep-alive timeout in seconds
CROWDED_IDLE_S = 5  # keep-alive timeout above half the maximum number of connections
HEAD_S = 20.0  # timeout for a request's head, from the connection or the head's first byte
FRESH_S = 1.0
"""Seconds for which new and newly idle connections are spared, if possible, when making room."""

UNREAD_S = 60.0  # timeout for clients that do not read their response
NO_FILES_S = 0.1
"""Delay in seconds between attempts to accept a connection while no file descriptor is free."""

WARNED_S = 60.0  # minimum interval in seconds between warnings about this
BACKLOG = 128


def max_connections() -> int:
    """Return the maximum number of connections in this process."""
    if os.name != "posix":
        return MAX_CONNECTIONS
    import resource

    n_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_CONNECTIONS if n_files < 0 else min(MAX_CONNECTIONS, n_files // 2)


class TimedProtocol(H11Protocol):
    """HTTP protocol with timeouts for request heads and unread responses.

    uvicorn would wait for both forever.

    Attributes:
        since: when the connection was made, a head or request started, or the connection became
            idle, whichever is latest, by the loop's clock.
    """

    since = 0.0
    _begun: float | None = None  # when the client started sending the current head

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
        """Rank for closing connections to make room, lowest first; None if this one must stay.

        0: its head is still incomplete after `FRESH_S`. 1: it is idle. 2: its request is
        incomplete. 3: it is new, or has just started a head. 4: it has just become idle, so its
        client may be sending the next request.
        """
        if self._begun is not None:
            return 0 if self.loop.time() > self._begun + FRESH_S else 3
        if self.cycle is None or self.cycle.response_complete:
            if self.transport.get_write_buffer_size():
                return None
            return 1 if self.loop.time() > self.since + FRESH_S else 4
        return 2 if self.cycle.more_body else None


class QuietServer(uvicorn.Server):
    """uvicorn without signal handlers and with connection limits.

    If there are too many connections, a new one replaces the oldest inactive one. The class accepts
    connections itself: asyncio logs hundreds of errors a second when file descriptors run out.
    """

    _accepting: list[asyncio.Task[None]]
    _warned = float("-inf")  # time of the last warning about file descriptors

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
        """Return the number of connections, or only of those from an address."""
        connections = self._connections()
        if client is None:
            return len(connections)
        return sum(_address(one) == client for one in connections)

    async def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(sock)
            except ConnectionError:
                continue  # the client has already closed it
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
            log.warning("new connections have to wait: %s", error.strerror)
        has_room = error.errno in (errno.EMFILE, errno.ENFILE) and self._make_room()
        await asyncio.sleep(0 if has_room else NO_FILES_S)

    def _make_room(self, client: str | None = None) -> bool:
        candidates = [
            (one.rank, one.since, id(one), one)
            for one in self._connections()
            if one.rank is not None and client in (None, _address(one))
        ]
        if not candidates:
            return False
        *_, oldest = min(candidates)
        oldest.transport.abort()
        self.server_state.connections.discard(oldest)
        return True

    def _connections(self) -> set[TimedProtocol]:
        return cast("set[TimedProtocol]", self.server_state.connections)


def _address(connection: TimedProtocol) -> str | None:
    return None if connection.client is None else connection.client[0]


class ConnectionLimitMiddleware:
    """Refuses requests in the protocol's error format while there are too many connections.

    Attributes:
        server: the server whose connections are counted.
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
    """Return a server for an application; start it with `serve(sockets=[...])`."""
    uncrowded = ConnectionLimitMiddleware(app)
    config = uvicorn.Config(
        uncrowded, loop="asyncio", http=TimedProtocol, ws="none", lifespan="off", log_config=None,
        log_level="critical", access_log=False, proxy_headers=False, server_header=False,
        timeout_keep_alive=IDLE_S, backlog=BACKLOG,
    )  # fmt: skip
    server = uncrowded.server = QuietServer(config)
    return server


START_S = 10.0  # timeout in seconds for starting a server on a thread
STOP_S = 2.0  # timeout in seconds for stopping it


Listener = socket.socket


def listen(settings: ServerSettings) -> Listener:
    """Return a listening socket.

    Raises:
        EngineError: the address is invalid or in use, or the settings are unsafe.
    """
    check_settings(settings)
    host, port = settings.host, settings.port
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError, OverflowError):
        hint = "Use --host 127.0.0.1."
        raise EngineError("{host} is not a valid address.", hint, host=host) from None
    family, kind, protocol, _, address = infos[0]
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
        text = tr_later("Port {port} of {host} is already in use.")
        return EngineError(text, "Choose another one with --port.", port=port, host=host)
    if number in (errno.EACCES, errno.EPERM):
        text = tr_later("Listening on port {port} is not permitted.")
        return EngineError(text, "Choose 1024 or higher with --port.", port=port)
    if number == errno.EADDRNOTAVAIL:
        hint = "Use --host 127.0.0.1."
        return EngineError("{host} is not an address of this machine.", hint, host=host)
    problem = Sentence(getattr(error, "strerror", None) or str(error))
    text = tr_later("The server cannot listen on {host}:{port}: {problem}.")
    return EngineError(text, host=host, port=port, problem=problem)


def address_of(sock: Listener) -> str:
    """Return the URL of a listening socket, such as "http://127.0.0.1:11435"."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    context: ServerContext, sock: Listener, on_ready: Callable[[QuietServer], None]
) -> None:
    """Serve until the server stops.

    Args:
        sock: result of `listen`.
        on_ready: called with the server once it accepts requests; set its `should_exit` to stop it
            after the running answers, and also its `force_exit` to stop it immediately.
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
    tasks = list(server.server_state.tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class ServerThread:
    """A server on its own thread.

    Args:
        make_context: creates the context; called on the thread, inside its running loop.
    """

    def __init__(self, make_context: Callable[[], ServerContext], settings: ServerSettings) -> None:
        self._make_context, self._settings = make_context, settings
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: QuietServer | None = None
        self._is_ready = threading.Event()
        self._problem: BaseException | None = None

    def start(self) -> str:
        """Start the server and return its URL.

        Raises:
            EngineError: it cannot listen or start in time, or is already running.
        """
        if self._thread is not None:
            raise EngineError("The server is already running.")
        sock = listen(self._settings)
        address = address_of(sock)
        self._is_ready.clear()
        self._problem = None
        self._thread = threading.Thread(target=self._run, args=(sock,), name="tandem-server")
        self._thread.start()
        if not self._is_ready.wait(START_S) or self._problem is not None:
            self.stop()
            late = Sentence(tr_later("it took too long"))
            problem = late if self._problem is None else str(self._problem)
            raise EngineError(tr_later("The server could not start: {problem}."), problem=problem)
        return address

    def stop(self) -> bool:
        """Stop the server and its answers; return whether it stopped in time."""
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
        """Call a function on the server's loop, unless the loop has ended. Thread-safe."""
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
            log.exception("the server crashed")
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
