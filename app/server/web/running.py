"""A server that runs: in the foreground of a program, or on a thread of a window."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import threading
from collections.abc import Callable

from app.server.desk import Desk
from app.server.settings import ServerSettings
from app.server.web.connections import BACKLOG, QuietServer, make_server
from app.server.web.gate import check_settings
from app.server.web.site import make_site
from engine import EngineError

log = logging.getLogger(__name__)

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
