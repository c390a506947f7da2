"""A server that runs: in the foreground of a program, or on a thread of a window."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.server.desk import Desk
from app.server.refusal import BUSY_S, Refusal
from app.server.settings import ServerSettings
from app.server.web.gate import check_settings
from app.server.web.responses import refusal_response
from app.server.web.site import make_site, shape_of
from engine import EngineError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 512
"""Number of connections beyond which requests are refused."""

IDLE_S = 75
"""Seconds after which a connection without a request is closed."""

HEAD_S = 20.0
"""Seconds in which the head of a request comes, from the connection or its first byte on."""

START_S = 10.0
"""Seconds in which a server on a thread has started."""

STOP_S = 2.0
"""Seconds in which a server on a thread has ended."""

BACKLOG = 128


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


async def serve(desk: Desk, sock: Listener, on_ready: Callable[[QuietServer], None]) -> None:
    """Serve a desk until its server is told to end.

    Args:
        sock: what `listen` returned.
        on_ready: called with the server once it takes requests; `should_exit` ends it when the
            answers under way have ended, and `force_exit` at once.
    """
    server = make_server(make_site(desk))
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
        make_desk: makes the desk, on the thread and inside its running loop.
        settings: where it listens.
    """

    def __init__(self, make_desk: Callable[[], Desk], settings: ServerSettings) -> None:
        self._make_desk, self._settings = make_desk, settings
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
        desk = self._make_desk()
        desk.link.open()
        try:
            await serve(desk, sock, self._started)
        finally:
            desk.link.close()

    def _started(self, server: QuietServer) -> None:
        self._server = server
        self._is_ready.set()
