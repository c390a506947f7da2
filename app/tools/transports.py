"""Stdio and HTTP transports to MCP servers, with limits on message size and rate."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TextIO

import anyio
import httpx2
from anyio.streams.text import TextReceiveStream
from mcp import StdioServerParameters
from mcp.client import stdio as mcp_stdio
from mcp.client.sse import sse_client
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from app.core.translation import tr
from app.tools.server_store import MAX_MESSAGE, ToolServer
from engine import one_line

MESSAGES_AT_ONCE: Final = 1000
MESSAGES_PER_S: Final = 500.0
BYTES_AT_ONCE: Final = 16 << 20
BYTES_PER_S: Final = float(2 << 20)

FLOOD_S: Final = 10.0  # seconds for which a server may exceed the rate


class FloodLimit:
    """Token bucket that slows down a sender.

    Args:
        burst: capacity of the bucket.
        rate: amount per second.
        on_flood: called once the sender has exceeded the rate for `FLOOD_S`.
    """

    def __init__(self, burst: float, rate: float, on_flood: Callable[[], None]) -> None:
        self._burst, self._rate, self._on_flood = burst, rate, on_flood
        self._left, self._at = burst, time.monotonic()
        self._slowed_since: float | None = None

    async def take(self, amount: float = 1.0) -> None:
        """Wait until `amount` is available."""
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate) - amount
        self._at = now
        if self._left > self._burst / 2:
            self._slowed_since = None
        if self._left >= 0:
            return
        if self._slowed_since is None:
            self._slowed_since = now
        elif now - self._slowed_since > FLOOD_S:
            self._on_flood()
        await anyio.sleep(-self._left / self._rate)


class LimitedText(TextReceiveStream):
    """A program's output in whole lines, up to the first line that is too long.

    Replaces a class in the `mcp` package that buffers lines of any length.
    """

    def __post_init__(self, encoding: str, errors: str) -> None:
        super().__post_init__(encoding, errors)
        self._open: list[str] = []  # pieces of an incomplete line
        self._n_open = 0
        self._on_large = on_large_line.get()

    async def receive(self) -> str:
        """Return the next lines; the last line of the output may be incomplete."""
        while self._n_open <= MAX_MESSAGE:
            try:
                text = await super().receive()
            except anyio.EndOfStream:
                if not self._open:
                    raise
                return self._taken("")
            whole, end, rest = text.rpartition("\n")
            if end:
                lines = self._taken(whole + end)
                self._open, self._n_open = [rest], len(rest)
                return lines
            self._open.append(text)
            self._n_open += len(text)
        self._on_large()
        raise anyio.EndOfStream

    def _taken(self, more: str) -> str:
        text = "".join([*self._open, more])
        self._open, self._n_open = [], 0
        return text


on_large_line: ContextVar[Callable[[], None]] = ContextVar("on_large_line", default=lambda: None)
"""Called if a program prints a line that is too long; set before the program is started."""

setattr(mcp_stdio, "TextReceiveStream", LimitedText)  # noqa: B010 not a public name


def cap_listed(message: Any, most: int) -> None:
    """Keep only the first `most` tools in a message that has not been parsed yet."""
    result = getattr(getattr(message, "message", None), "result", None)
    tools = result.get("tools") if isinstance(result, dict) else None
    if isinstance(tools, list):
        del tools[most:]


MAX_SHOWN = 300  # maximum length of a server's message in the window


Misuse = Literal["", "flood", "large", "encoded"]
"""Why Tandem closed a connection: too many messages, too large a message, or compression."""

OnMisuse = Callable[[Misuse], None]


@dataclass(slots=True)
class Ending:
    """How a connection ended.

    Attributes:
        error: exception, if any.
        was_ready: whether the server had listed its tools.
        is_late: whether the server did not list its tools in time.
        has_closed: whether the server closed the connection.
        has_rubbish: whether the server sent invalid messages.
        status: last HTTP status, or 0.
        last_line: last line of the program's stderr.
        unreachable: why the URL cannot be reached; None if it can be.
    """

    error: Exception | None = None
    was_ready: bool = False
    is_late: bool = False
    has_closed: bool = False
    has_rubbish: bool = False
    misuse: Misuse = ""
    status: int = 0
    last_line: str = ""
    unreachable: str | None = None

    def note_status(self, status: int) -> None:
        """Store a response's status, unless an earlier one is more informative."""
        if self.status < 400 or status in (401, 403):
            self.status = status


def ending_sentence(server: ToolServer, ending: Ending) -> str:
    """Describe how a connection ended."""
    sentence = _reason(server, ending)
    if server.command and ending.last_line:
        output = tr("Its last output: {line}").format(line=one_line(ending.last_line, MAX_SHOWN))
        return f"{sentence} {output}"
    return sentence


def call_sentence(server: ToolServer, error: Exception) -> str:
    """Describe why a call failed."""
    why = one_line(str(error), 2000) or type(error).__name__
    return tr("{name} says: {text}").format(name=server.name, text=why)


def _reason(server: ToolServer, ending: Ending) -> str:
    name = server.name
    if ending.misuse == "flood":
        return tr("{name} sent too many messages, so it was stopped.").format(name=name)
    if ending.misuse == "large":
        text = tr("{name} sent a message of more than {n} MiB, so it was stopped.")
        return text.format(name=name, n=MAX_MESSAGE >> 20)
    if ending.misuse == "encoded":
        text = tr("{name} sends compressed responses although the request forbids them.")
        return text.format(name=name)
    if ending.unreachable is not None:
        why = one_line(ending.unreachable, MAX_SHOWN)
        return tr("{url} cannot be reached: {why}").format(url=server.url, why=why)
    for error in parts_of(ending.error):
        if isinstance(error, OSError) and server.command and not ending.was_ready:
            return _start_sentence(server, error)
    if ending.status in (401, 403):
        text = tr("{name} denied access ({status}). It may need an “Authorization” header.")
        return text.format(name=name, status=ending.status)
    if ending.status >= 400:
        text = tr("{name} returned status {status}. Check its address.")
        return text.format(name=name, status=ending.status)
    if ending.is_late and ending.has_rubbish:
        return tr("{name} printed text instead of MCP messages.").format(name=name)
    if ending.is_late:
        return tr("{name} did not respond in time.").format(name=name)
    if server.command and (ending.has_closed or ending.error is None):
        return tr("The program for {name} has exited.").format(name=name)
    errors = [one_line(str(error), MAX_SHOWN) for error in parts_of(ending.error)]
    return tr("{name} failed: {why}").format(name=name, why=", ".join(filter(None, errors)))


def _start_sentence(server: ToolServer, error: OSError) -> str:
    program = server.command[0]
    if server.folder and error.filename == server.folder:
        text = tr("{name} cannot run in {folder}: {why}.")
        return text.format(name=server.name, folder=server.folder, why=error.strerror)
    if error.errno == errno.ENOENT:
        return tr("The program {program} was not found.").format(program=program)
    return tr("{program} cannot be started: {why}.").format(program=program, why=error.strerror)


def parts_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, or each error in a group."""
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from parts_of(part)
    elif error is not None:
        yield error


log = logging.getLogger(__name__)

MAX_LINE: Final = 4096  # bytes after which a line is split
MAX_LOGGED: Final = 500  # maximum number of lines logged per run of a program
LAST_S: Final = 0.5  # seconds to wait for the last lines after a program has exited


class StandardError:
    """Pipe for a program's stderr, read by a thread while it is open.

    Args:
        name: name of the server, for the log.

    Attributes:
        file: the program's end of the pipe.
        last_line: last non-empty line, or "".
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.last_line = ""
        reading, writing = os.pipe()
        self.file: TextIO = open(writing, "w", encoding="utf-8")  # noqa: SIM115 closed in __exit__
        self._thread = threading.Thread(
            target=self._read, args=(reading,), name="tandem-tool-stderr", daemon=True
        )

    def __enter__(self) -> StandardError:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.file.close()
        self._thread.join(LAST_S)  # a leftover process may keep the pipe open

    def _read(self, reading: int) -> None:
        n_lines = 0
        with open(reading, "rb") as pipe:
            while data := pipe.readline(MAX_LINE):
                line = one_line(data.decode(errors="replace"), 1000)
                if not line:
                    continue
                self.last_line = line
                n_lines += 1
                if n_lines <= MAX_LOGGED:
                    log.debug("%s: %s", self._name, line)


CONNECT_S: Final = 15.0

IS_LINUX: Final = sys.platform == "linux"

SUPERVISOR: Final = sys.executable, "-I", "-S", str(Path(__file__).with_name("supervisor.py"))
"""Command that runs a program and then kills its descendants; see `supervisor`."""

for _name in ("mcp.client.stdio", "mcp.client.streamable_http", "mcp.client.sse", "client"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)  # the window shows servers' errors
for _name in ("httpx2", "httpcore2"):  # they log URLs
    logging.getLogger(_name).setLevel(logging.WARNING)


class EndWatch:
    """Message stream that reports its end and slows down a flood.

    Args:
        on_end: called when the server has closed the stream.
        on_misuse: called when the connection has to be closed.
        most_tools: maximum number of tools in a listing.
    """

    def __init__(
        self, stream: Any, on_end: Callable[[], None], on_misuse: OnMisuse, most_tools: int
    ) -> None:
        self._stream, self._on_end, self._most_tools = stream, on_end, most_tools
        self._limit = FloodLimit(MESSAGES_AT_ONCE, MESSAGES_PER_S, lambda: on_misuse("flood"))

    @property
    def last_context(self) -> Any:
        """The stream's `last_context`, if it has one."""
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> Any:
        return await self._limited(await self._stream.receive())

    async def aclose(self) -> None:
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
    """Body of a response: a single message or an event stream.

    Args:
        on_large: called if a single message is too large.
        events: rate limit for an event stream; None for a single message.
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
        await self._body.aclose()


@asynccontextmanager
async def program_streams(
    server: ToolServer,
    standard_error: StandardError,
    watch: Callable[[Any], EndWatch],
    on_misuse: OnMisuse,
) -> AsyncIterator[tuple[Any, Any]]:
    """Run a server's program; yield its incoming and outgoing streams.

    The program's environment contains only the variables that the `mcp` package considers safe,
    and the server's own. At the end, stdin is closed. A program that does not exit is then killed,
    with its descendants: by `supervisor` on Linux, elsewhere by `mcp` (on macOS only its session).

    Args:
        watch: wraps the incoming stream.

    Raises:
        OSError: the program cannot be started.
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
    """Check that a program can start, since its supervisor cannot report why it failed.

    Raises:
        OSError: the program or its folder is missing or inaccessible.
    """
    if server.folder and not stat.S_ISDIR(os.stat(server.folder).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), server.folder)
    program = server.command[0]
    path = os.path.join(server.folder, program) if os.sep in program else program
    if shutil.which(path, path=server.environment.get("PATH")) is None:
        number = errno.EACCES if os.path.exists(path) else errno.ENOENT
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
    """Connect to a server's URL; yield its incoming and outgoing streams.

    Redirects to other hosts are not followed, so the headers are never sent to them.

    Args:
        on_status: called with the status of each response.
        watch: wraps the incoming stream.
        is_sse: whether to use the older HTTP+SSE transport.
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
            headers={"Accept-Encoding": "identity", **headers},  # against decompression bombs
            timeout=httpx2.Timeout(None, connect=CONNECT_S),  # calls have their own timeout
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
    """Return why a URL cannot be reached; None for other kinds of errors."""
    for part in parts_of(error):
        if isinstance(part, httpx2.TransportError | httpx2.InvalidURL):
            return str(part) or type(part).__name__
    return None
