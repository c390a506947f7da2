"""A hub of tools without servers: calls wait until a test says what came of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.tools.server_store import ServerTool, ToolResult, ToolServer, ToolServerState
from engine import Tool

SEARCH = ServerTool("web", "search", Tool("web_search", "Searches the web."), "Search the web")
WRITE = ServerTool("files", "write", Tool("files_write", "Writes a file."))


@dataclass
class FakeCall:
    """A call that was started."""

    name: str
    arguments: Mapping[str, Any]
    on_done: Callable[[ToolResult], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def end(self, text: str, *, is_error: bool = False) -> None:
        """Tell a result on a thread of its own, as the hub does."""
        result = ToolResult(text, is_error)
        thread = threading.Thread(target=self.on_done, args=(result,), name="fake-tool")
        thread.start()
        thread.join()


@dataclass
class FakeToolHub:
    """Two servers with a tool each, unless a test says otherwise."""

    tools: Sequence[ServerTool] = (SEARCH, WRITE)
    calls: list[FakeCall] = field(default_factory=list)

    def states(self) -> list[ToolServerState]:
        servers = dict.fromkeys(tool.server for tool in self.tools)
        return [
            ToolServerState(
                ToolServer(name, ("program",)), "ready",
                tools=tuple(tool for tool in self.tools if tool.server == name),
            )
            for name in servers
        ]  # fmt: skip

    def offered(self) -> Sequence[ServerTool]:
        return self.tools

    def call(
        self, tool_name: str, arguments: Mapping[str, Any], on_done: Callable[[ToolResult], None]
    ) -> FakeCall:
        self.calls.append(FakeCall(tool_name, arguments, on_done))
        return self.calls[-1]

    def set_servers(self, servers: Sequence[ToolServer]) -> None:
        """Do nothing: the tools are those of the test."""

    def restart(self, name: str) -> None:
        """Do nothing."""

    def close(self, timeout_s: float = 8.0) -> bool:
        return True
