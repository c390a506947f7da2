"""Ways to a server: the pipes of a program, or HTTP to an address."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx2
from mcp import StdioServerParameters
from mcp.client.sse import sse_client
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from app.tools.floods import (
    BYTES_AT_ONCE,
    BYTES_PER_S,
    MESSAGES_AT_ONCE,
    MESSAGES_PER_S,
    FloodLimit,
    cap_listed,
    on_large_line,
)
from app.tools.problems import OnMisuse, parts_of
from app.tools.standard_error import StandardError
from app.tools.tool_server import MAX_MESSAGE, ToolServer

CONNECT_S: Final = 15.0

IS_LINUX: Final = sys.platform == "linux"

SUPERVISOR: Final = sys.executable, "-I", "-S", str(Path(__file__).with_name("supervisor.py"))
"""Program that runs another and ends all that it has started, see there."""

for _name in ("mcp.client.stdio", "mcp.client.streamable_http", "mcp.client.sse", "client"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)  # errors of servers are told in the window
for _name in ("httpx2", "httpcore2"):  # they log addresses
    logging.getLogger(_name).setLevel(logging.WARNING)


class EndWatch:
    """A stream of messages that tells when it has ended, and slows down a flood.

    Args:
        on_end: is called when the other side sends nothing more.
        on_misuse: is told what the other side does that ends the connection.
        most_tools: number of tools beyond which a listing is cut.
    """

    def __init__(
        self, stream: Any, on_end: Callable[[], None], on_misuse: OnMisuse, most_tools: int
    ) -> None:
        self._stream, self._on_end, self._most_tools = stream, on_end, most_tools
        self._limit = FloodLimit(MESSAGES_AT_ONCE, MESSAGES_PER_S, lambda: on_misuse("flood"))

    @property
    def last_context(self) -> Any:
        """Context of the sender of the last message, where the stream has such."""
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> Any:
        """Return the next message."""
        return await self._limited(await self._stream.receive())

    async def aclose(self) -> None:
        """Close the stream."""
        await self._stream.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            message = await self._stream.__anext__()
        except StopAsyncIteration:
            self._on_end()
            raise
        return await self._limited(message)

    async def _limited(self, message: Any) -> Any:
        cap_listed(message, self._most_tools)
        await self._limit.take()
        return message

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:  # fmt: skip
        is_handled: bool | None = await self._stream.__aexit__(kind, error, trace)
        return is_handled


class LimitedBody(httpx2.AsyncByteStream):
    """The body of an answer: one message, or a stream of events.

    Args:
        on_large: is called if a message is too large.
        events: limits a stream of events; None for one message.
    """

    def __init__(
        self, body: httpx2.AsyncByteStream, on_large: Callable[[], None], events: FloodLimit | None
    ) -> None:
        self._body, self._on_large, self._events = body, on_large, events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        n_bytes = 0
        async for chunk in self._body:
            n_bytes += len(chunk)
            if self._events is not None:
                await self._events.take(len(chunk))
            elif n_bytes > MAX_MESSAGE:
                self._on_large()
                raise httpx2.ReadError("")
            yield chunk

    async def aclose(self) -> None:
        """Close the body."""
        await self._body.aclose()


@asynccontextmanager
async def program_streams(
    server: ToolServer,
    standard_error: StandardError,
    watch: Callable[[Any], EndWatch],
    on_misuse: OnMisuse,
) -> AsyncIterator[tuple[Any, Any]]:
    """Run a server's program; yield what it sends and takes.

    It gets the few variables that the package holds to be harmless, and its own. At the end its
    standard input is closed; if it then stays, it is ended, and all that it has started: by a
    `supervisor` on Linux, elsewhere by the package, on macOS those of its session alone.

    Args:
        watch: makes the stream that is read.

    Raises:
        OSError: it cannot be started.
    """
    if IS_LINUX:
        _check_start(server)
    program, *arguments = (*SUPERVISOR, *server.command) if IS_LINUX else server.command
    parameters = StdioServerParameters(
        command=program,
        args=arguments,
        env=dict(server.environment),
        cwd=server.folder or None,
        encoding_error_handler="replace",
    )
    on_large_line.set(lambda: on_misuse("large"))
    async with stdio_client(parameters, standard_error.file) as (incoming, outgoing):
        yield watch(incoming), outgoing


def _check_start(server: ToolServer) -> None:
    """Find what keeps a program from starting, before its supervisor does.

    Raises:
        OSError: its folder or it is not there, or may not be used.
    """
    if server.folder and not stat.S_ISDIR(os.stat(server.folder).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), server.folder)
    program = server.command[0]
    found = os.path.join(server.folder, program) if os.sep in program else program
    if shutil.which(found, path=server.environment.get("PATH")) is None:
        number = errno.EACCES if os.path.exists(found) else errno.ENOENT
        raise OSError(number, os.strerror(number), program)


@asynccontextmanager
async def http_streams(
    server: ToolServer,
    headers: Mapping[str, str],
    on_status: Callable[[int], None],
    watch: Callable[[Any], EndWatch],
    on_misuse: OnMisuse,
    *,
    is_sse: bool,
) -> AsyncIterator[tuple[Any, Any]]:
    """Speak to a server's address; yield what it sends and takes.

    Redirects to another host are not followed, so headers go to no other.

    Args:
        on_status: is told the status of each answer.
        watch: makes the stream that is read.
        is_sse: whether it speaks the older form, with one stream of events for all answers.
    """

    async def note(response: httpx2.Response) -> None:
        on_status(response.status_code)
        if response.headers.get("content-encoding", "identity") != "identity":
            on_misuse("encoded")
            raise httpx2.DecodingError("")
        assert isinstance(response.stream, httpx2.AsyncByteStream), "of an asynchronous client"
        kind = response.headers.get("content-type", "").lower()
        is_stream = kind.startswith("text/event-stream")
        response.stream = LimitedBody(
            response.stream, lambda: on_misuse("large"), events if is_stream else None
        )

    events = FloodLimit(BYTES_AT_ONCE, BYTES_PER_S, lambda: on_misuse("flood"))

    def make_client(*_: Any, **__: Any) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            headers={"Accept-Encoding": "identity", **headers},  # a few bytes may become gigabytes
            timeout=httpx2.Timeout(None, connect=CONNECT_S),  # silence is limited for each call
            event_hooks={"response": [note]},
        )

    if is_sse:
        async with sse_client(server.url, httpx_client_factory=make_client) as (incoming, outgoing):
            yield watch(incoming), outgoing
        return
    async with (
        make_client() as client,
        streamable_http_client(server.url, http_client=client) as (incoming, outgoing),
    ):
        yield watch(incoming), outgoing


def unreachable(error: Exception) -> str | None:
    """Return why nothing gets to an address; None if an error is of another kind."""
    for part in parts_of(error):
        if isinstance(part, httpx2.TransportError | httpx2.InvalidURL):
            return str(part) or type(part).__name__
    return None
