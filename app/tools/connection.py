"""A connection to one server: its tools, and calls of them."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Final

import anyio
from mcp import Client, MCPError
from mcp.client.session import IncomingMessage
from mcp.client.subscriptions import ListenNotSupportedError
from mcp.types import CONNECTION_CLOSED, Implementation, ToolListChangedNotification
from mcp.types import Tool as ListedTool

from app.core.translation import tr
from app.tools.results import limited, tool_names, tool_result
from app.tools.server_store import ServerTool, ToolLimits, ToolResult, ToolServer
from app.tools.transports import (
    Ending,
    EndWatch,
    Misuse,
    StandardError,
    call_sentence,
    ending_sentence,
    http_streams,
    program_streams,
    unreachable,
)
from engine import Tool, one_line, package_version, printable

log = logging.getLogger(__name__)

MAX_PAGES: Final = 100

LIST_PAUSE_S: Final = 1.0
"""Seconds between two listings, however often tools change."""

MAX_DESCRIPTION: Final = 16 << 10
MAX_SCHEMA: Final = 128 << 10

SSE_STATUSES: Final = (400, 404, 405, 406, 415)
"""Statuses with which servers that only have the older form of HTTP answer the newer one."""


class ToolConnection:
    """One life of a connection, from `run` to its end; on the hub's thread only.

    Args:
        headers: of each request to the server's address.
        prefix: part of the tools' names for models.
        on_tools: is told the server's tools once it is ready, and whenever they change.
    """

    def __init__(
        self,
        server: ToolServer,
        headers: Mapping[str, str],
        prefix: str,
        limits: ToolLimits,
        on_tools: Callable[[tuple[ServerTool, ...]], None],
    ) -> None:
        self._server, self._headers, self._prefix = server, headers, prefix
        self._limits, self._on_tools = limits, on_tools
        self._client: Client | None = None
        self._names: dict[str, str] = {}  # at the server, by those for models
        self._scope = anyio.CancelScope()
        self._is_stopping = False
        self._are_tools_old = anyio.Event()
        self._ending = Ending()

    async def run(self) -> str:
        """Connect and stay until `stop` or the end of the connection; return why it ended."""
        await self._live()
        if self._might_know("legacy"):
            await self._live(mode="legacy")
        elif self._might_know("sse"):
            await self._live(mode="legacy", is_sse=True)
        return "" if self._is_stopping else ending_sentence(self._server, self._ending)

    def stop(self) -> None:
        """End the connection."""
        self._is_stopping = True
        self._scope.cancel()

    async def call(self, tool_name: str, arguments: Mapping[str, Any]) -> ToolResult | None:
        """Call a tool by its name for models; return None if the connection has ended."""
        client, name = self._client, self._names.get(tool_name)
        if client is None:
            return None
        if name is None:
            text = tr("{server} has no tool {name}.")
            return ToolResult(text.format(server=self._server.name, name=tool_name), True)
        silence_s = self._limits.silence_s
        scope = anyio.CancelScope(deadline=anyio.current_time() + silence_s)

        async def renew(progress: float, total: float | None, message: str | None) -> None:
            scope.deadline = anyio.current_time() + silence_s

        try:
            with scope:
                found = await client.call_tool(name, dict(arguments), progress_callback=renew)
                return tool_result(found, self._limits.most_result)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED or self._client is not client:
                self._scope.cancel()  # whatever is left of it
                return None
            text = call_sentence(self._server, error)
        except Exception as error:  # noqa: BLE001 whatever a server answers
            text = call_sentence(self._server, error)
        else:
            sentence = tr("{name} has not answered for {n} s, so the call was ended.")
            text = sentence.format(name=self._server.name, n=f"{silence_s:g}")
        return ToolResult(limited(text, self._limits.most_result), is_error=True)

    def _might_know(self, form: str) -> bool:
        ending = self._ending
        if self._is_stopping or ending.was_ready or ending.is_late or ending.misuse:
            return False
        if form == "legacy":  # programs that end when the first message is not the one they know
            return bool(self._server.command) and ending.has_closed
        return bool(self._server.url) and ending.status in SSE_STATUSES

    async def _live(self, mode: str = "auto", *, is_sse: bool = False) -> None:
        """Connect and stay; `_ending` says how it ended."""
        ending = self._ending = Ending()
        deadline = anyio.current_time() + self._limits.start_s
        standard_error = StandardError(self._server.name)
        try:
            with standard_error, anyio.CancelScope(deadline=deadline) as self._scope:
                if self._is_stopping:
                    return
                async with Client(
                    self._streams(standard_error, is_sse=is_sse),
                    mode=mode,
                    message_handler=self._on_message,
                    client_info=Implementation(name="Tandem", version=package_version() or "0"),
                    cache=None,
                ) as client:
                    await self._stay(client)
        except Exception as error:
            log.debug("%s: the connection has ended", self._server.name, exc_info=True)
            ending.error, ending.unreachable = error, unreachable(error)
        finally:
            self._client = None
        is_ended = ending.has_closed or ending.was_ready or self._is_stopping or ending.misuse
        ending.is_late = self._scope.cancelled_caught and not is_ended
        ending.last_line = standard_error.last_line

    def _streams(
        self, standard_error: StandardError, *, is_sse: bool
    ) -> AbstractAsyncContextManager[tuple[Any, Any]]:
        def watch(incoming: Any) -> EndWatch:
            return EndWatch(incoming, self._on_end, self._on_misuse, self._limits.most_tools)

        if self._server.command:
            return program_streams(self._server, standard_error, watch, self._on_misuse)
        note = self._ending.note_status
        return http_streams(
            self._server, self._headers, note, watch, self._on_misuse, is_sse=is_sse
        )  # fmt: skip

    async def _stay(self, client: Client) -> None:
        """List the tools, and again whenever they change."""
        await self._list_tools(client)
        self._scope.deadline = math.inf
        self._ending.was_ready = True
        self._client = client
        async with AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(anyio.create_task_group())
            tasks.start_soon(self._listen, client)
            while True:
                await self._are_tools_old.wait()
                self._are_tools_old = anyio.Event()
                await self._list_tools(client)
                await anyio.sleep(LIST_PAUSE_S)

    async def _listen(self, client: Client) -> None:
        """Hear of changes, as servers tell them that have no notifications without a request."""
        try:
            async with client.listen(tools_list_changed=True) as changes:
                async for _ in changes:
                    self._are_tools_old.set()
        except ListenNotSupportedError:
            pass  # it tells them by notifications
        except Exception:
            log.debug("%s does not tell of changes", self._server.name, exc_info=True)

    async def _list_tools(self, client: Client) -> None:
        """Tell the server's tools."""
        listed: dict[str, ListedTool] = {}
        capabilities = client.server_capabilities
        cursor: str | None = None
        for _ in range(MAX_PAGES if capabilities.tools is not None else 0):
            page = await client.list_tools(cursor=cursor)
            listed.update((tool.name, tool) for tool in page.tools)
            cursor = page.next_cursor
            if cursor is None or len(listed) >= self._limits.most_tools:
                break
        found = list(listed.values())[: self._limits.most_tools]
        names = tool_names(self._prefix, [tool.name for tool in found])
        self._names = dict(zip(names, (tool.name for tool in found), strict=True))
        tools = (self._listed(tool, name) for tool, name in zip(found, names, strict=True))
        self._on_tools(tuple(tool for tool in tools if tool is not None))

    def _listed(self, tool: ListedTool, name: str) -> ServerTool | None:
        """Return what people and models are told of a tool; None for one that is too large."""
        schema = json.dumps(tool.input_schema, ensure_ascii=False)
        if len(schema) > MAX_SCHEMA:
            log.info("%s: the schema of %s is too large", self._server.name, one_line(name, 100))
            return None
        hints = tool.annotations
        title = tool.title or (hints and hints.title) or tool.name
        description = printable((tool.description or "")[:MAX_DESCRIPTION])
        return ServerTool(
            self._server.name,
            tool.name,
            Tool(name, description, schema),
            one_line(title, 200),
            hints.read_only_hint if hints else None,
        )

    async def _on_message(self, message: IncomingMessage) -> None:
        if isinstance(message, ToolListChangedNotification):
            self._are_tools_old.set()
        elif isinstance(message, Exception):
            self._ending.has_rubbish = True
        await anyio.lowlevel.checkpoint()

    def _on_end(self) -> None:
        """End the connection, as the other side has done."""
        self._ending.has_closed = True
        self._scope.cancel()

    def _on_misuse(self, misuse: Misuse) -> None:
        """End the connection, as the server takes too much of this machine."""
        self._ending.misuse = misuse
        self._scope.cancel()
