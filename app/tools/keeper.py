"""Keeps the connection to one server: starts it, again after it has ended, and passes calls on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from app.core.translation import tr
from app.tools.states import ServerTool, ToolResult, ToolServerState
from app.tools.tool_server import ToolLimits, ToolServer
from engine import EngineError

if TYPE_CHECKING:
    from app.tools.connection import ToolConnection

HeadersOf = Callable[[ToolServer], Mapping[str, str]]


class ServerKeeper:
    """One server and the connection to it; on the hub's thread only.

    Args:
        prefix: part of its tools' names for models.
        headers_of: returns headers with their secrets; called on another thread.
        on_change: is told of each change of `state`.

    Attributes:
        state: what there is to tell of the server.
    """

    def __init__(
        self,
        server: ToolServer,
        prefix: str,
        headers_of: HeadersOf,
        limits: ToolLimits,
        on_change: Callable[[], None],
    ) -> None:
        self.state = ToolServerState(server, "starting")
        self.prefix = prefix
        self._headers_of, self._limits, self._on_change = headers_of, limits, on_change
        self._connection: ToolConnection | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_settled = asyncio.Event()  # ready, or ended

    def rename(self, server: ToolServer) -> None:
        """Take what a person has changed of a server that is connected to as before."""
        self.state = replace(self.state, server=server)

    def start(self) -> None:
        """Connect, unless it is connected."""
        if self._task is None or self._task.done():
            self._is_settled.clear()
            self._tell(ToolServerState(self.state.server, "starting"))
            self._task = asyncio.get_running_loop().create_task(self._live())

    async def stop(self) -> None:
        """End the connection, and the program."""
        if self._connection is not None:
            self._connection.stop()
        elif self._task is not None:
            self._task.cancel()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool; a server that has ended is started again first."""
        self.start()
        await self._is_settled.wait()
        connection = self._connection
        if connection is None or self.state.status != "ready":
            return ToolResult(self.state.problem, is_error=True)
        result = await connection.call(name, arguments)
        if result is None:  # the connection has ended; in a moment it is known why
            assert self._task is not None, "there was a connection"
            await asyncio.wait([self._task])
            return ToolResult(self.state.problem or stopped_sentence(self.state.server), True)
        return result

    async def _live(self) -> None:
        """Connect, and stay until the server or the connection ends."""
        server = self.state.server
        try:
            problem = await self._connected(server)
        except EngineError as error:
            problem = f"{error.message} {error.hint}".strip()
        finally:
            self._connection = None
            self._is_settled.set()
        self._tell(ToolServerState(self.state.server, "failed", problem))

    async def _connected(self, server: ToolServer) -> str:
        """Be connected; return why that ended."""
        headers = await asyncio.to_thread(self._headers_of, server) if server.headers else {}
        from app.tools.connection import ToolConnection  # late: `mcp` takes a second to import

        self._connection = ToolConnection(
            server, headers, self.prefix, self._limits, self._on_tools
        )
        return await self._connection.run()

    def _on_tools(self, tools: tuple[ServerTool, ...]) -> None:
        self._tell(ToolServerState(self.state.server, "ready", tools=tools))
        self._is_settled.set()

    def _tell(self, state: ToolServerState) -> None:
        if state != self.state:
            self.state = state
            self._on_change()


def stopped_sentence(server: ToolServer) -> str:
    """Return what is said of a call whose server was stopped."""
    return tr("{name} was stopped.").format(name=server.name)
