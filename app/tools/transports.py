"""Ways to a server: the pipes of a program, or HTTP to an address."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Final, Self

import httpx2
from mcp import StdioServerParameters
from mcp.client.sse import sse_client
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from app.tools.problems import parts_of
from app.tools.standard_error import StandardError
from app.tools.tool_server import ToolServer

CONNECT_S: Final = 15.0

for _name in ("mcp.client.stdio", "mcp.client.streamable_http", "mcp.client.sse", "client"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)  # errors of servers are told in the window
for _name in ("httpx2", "httpcore2"):  # they log addresses
    logging.getLogger(_name).setLevel(logging.WARNING)


class EndWatch:
    """A stream of messages that tells when it has ended.

    Args:
        on_end: is called when the other side sends nothing more.
    """

    def __init__(self, stream: Any, on_end: Callable[[], None]) -> None:
        self._stream, self._on_end = stream, on_end

    @property
    def last_context(self) -> Any:
        """Context of the sender of the last message, where the stream has such."""
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> Any:
        """Return the next message."""
        return await self._stream.receive()

    async def aclose(self) -> None:
        """Close the stream."""
        await self._stream.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except StopAsyncIteration:
            self._on_end()
            raise

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:  # fmt: skip
        is_handled: bool | None = await self._stream.__aexit__(kind, error, trace)
        return is_handled


@asynccontextmanager
async def program_streams(
    server: ToolServer, standard_error: StandardError, on_end: Callable[[], None]
) -> AsyncIterator[tuple[Any, Any]]:
    """Run a server's program; yield what it sends and takes.

    It gets the few variables that the package holds to be harmless, and its own. At the end its
    standard input is closed; if it then stays, it and all that it has started are ended.

    Raises:
        OSError: it cannot be started.
    """
    program, *arguments = server.command
    parameters = StdioServerParameters(
        command=program,
        args=arguments,
        env=dict(server.environment),
        cwd=server.folder or None,
        encoding_error_handler="replace",
    )
    async with stdio_client(parameters, standard_error.file) as (incoming, outgoing):
        yield EndWatch(incoming, on_end), outgoing


@asynccontextmanager
async def http_streams(
    server: ToolServer,
    headers: Mapping[str, str],
    on_status: Callable[[int], None],
    *,
    is_sse: bool,
    on_end: Callable[[], None],
) -> AsyncIterator[tuple[Any, Any]]:
    """Speak to a server's address; yield what it sends and takes.

    Redirects to another host are not followed, so headers go to no other.

    Args:
        on_status: is told the status of each answer.
        is_sse: whether it speaks the older form, with one stream of events for all answers.
    """

    async def note(response: httpx2.Response) -> None:
        on_status(response.status_code)

    def make_client(*_: Any, **__: Any) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            headers=dict(headers),
            timeout=httpx2.Timeout(None, connect=CONNECT_S),  # silence is limited for each call
            event_hooks={"response": [note]},
        )

    if is_sse:
        async with sse_client(server.url, httpx_client_factory=make_client) as (incoming, outgoing):
            yield EndWatch(incoming, on_end), outgoing
        return
    async with (
        make_client() as client,
        streamable_http_client(server.url, http_client=client) as (incoming, outgoing),
    ):
        yield EndWatch(incoming, on_end), outgoing


def unreachable(error: Exception) -> str | None:
    """Return why nothing gets to an address; None if an error is of another kind."""
    for part in parts_of(error):
        if isinstance(part, httpx2.TransportError | httpx2.InvalidURL):
            return str(part) or type(part).__name__
    return None
