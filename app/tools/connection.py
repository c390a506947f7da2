"""Connection to an MCP server, which lists its tools and calls them."""

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

LIST_PAUSE_S: Final = 1.0  # minimum interval in seconds between listings
MAX_DESCRIPTION: Final = 16 << 10
MAX_SCHEMA: Final = 128 << 10

SSE_STATUSES: Final = (400, 404, 405, 406, 415)
"""HTTP statuses with which SSE-only servers reject Streamable HTTP."""


class ToolConnection:
    """One connection, from `run` to its end; used only on the hub's thread.

    Args:
        headers: headers for every request.
        prefix: the server's prefix in the tool names that models see.
        on_tools: called with the tools when the server is ready, and whenever they change.
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
        self._names: dict[str, str] = {}  # the server's tool names, by the names that models see
        self._scope = anyio.CancelScope()
        self._is_stopping = False
        self._has_new_tools = anyio.Event()
        self._ending = Ending()

    async def run(self) -> str:
        """Stay connected until `stop` or a failure; return the problem, or "" after `stop`."""
        await self._live()
        if self._may_speak("legacy"):
            await self._live(mode="legacy")
        elif self._may_speak("sse"):
            await self._live(mode="legacy", is_sse=True)
        return "" if self._is_stopping else ending_sentence(self._server, self._ending)

    def stop(self) -> None:
        self._is_stopping = True
        self._scope.cancel()

    async def call(self, tool_name: str, arguments: Mapping[str, Any]) -> ToolResult | None:
        """Call a tool by the name that models see; return None if the connection is closed."""
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
                result = await client.call_tool(name, dict(arguments), progress_callback=renew)
                return tool_result(result, self._limits.most_result)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED or self._client is not client:
                self._scope.cancel()
                return None
            text = call_sentence(self._server, error)
        except Exception as error:  # noqa: BLE001 servers may answer anything
            text = call_sentence(self._server, error)
        else:
            sentence = tr("{name} has not responded for {n} s, so the call was cancelled.")
            text = sentence.format(name=self._server.name, n=f"{silence_s:g}")
        return ToolResult(limited(text, self._limits.most_result), is_error=True)

    def _may_speak(self, protocol: str) -> bool:
        ending = self._ending
        if self._is_stopping or ending.was_ready or ending.is_late or ending.misuse:
            return False
        if protocol == "legacy":  # some programs exit on an unknown first message
            return bool(self._server.command) and ending.has_closed
        return bool(self._server.url) and ending.status in SSE_STATUSES

    async def _live(self, mode: str = "auto", *, is_sse: bool = False) -> None:
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
        await self._list_tools(client)
        self._scope.deadline = math.inf
        self._ending.was_ready = True
        self._client = client
        async with AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(anyio.create_task_group())
            tasks.start_soon(self._listen, client)
            while True:
                await self._has_new_tools.wait()
                self._has_new_tools = anyio.Event()
                await self._list_tools(client)
                await anyio.sleep(LIST_PAUSE_S)

    async def _listen(self, client: Client) -> None:
        """Subscribe to tool list changes, since some servers report them only on request."""
        try:
            async with client.listen(tools_list_changed=True) as changes:
                async for _ in changes:
                    self._has_new_tools.set()
        except ListenNotSupportedError:
            pass  # the server sends notifications instead
        except Exception:
            log.debug("%s does not report tool changes", self._server.name, exc_info=True)

    async def _list_tools(self, client: Client) -> None:
        listed: dict[str, ListedTool] = {}
        capabilities = client.server_capabilities
        cursor: str | None = None
        for _ in range(MAX_PAGES if capabilities.tools is not None else 0):
            page = await client.list_tools(cursor=cursor)
            listed.update((tool.name, tool) for tool in page.tools)
            cursor = page.next_cursor
            if cursor is None or len(listed) >= self._limits.most_tools:
                break
        kept = list(listed.values())[: self._limits.most_tools]
        names = tool_names(self._prefix, [tool.name for tool in kept])
        self._names = dict(zip(names, (tool.name for tool in kept), strict=True))
        tools = (self._server_tool(tool, name) for tool, name in zip(kept, names, strict=True))
        self._on_tools(tuple(tool for tool in tools if tool is not None))

    def _server_tool(self, tool: ListedTool, name: str) -> ServerTool | None:
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
            self._has_new_tools.set()
        elif isinstance(message, Exception):
            self._ending.has_rubbish = True
        await anyio.lowlevel.checkpoint()

    def _on_end(self) -> None:
        self._ending.has_closed = True
        self._scope.cancel()

    def _on_misuse(self, misuse: Misuse) -> None:
        self._ending.misuse = misuse
        self._scope.cancel()
