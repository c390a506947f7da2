"""What the hub tells of servers, their tools, and calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from app.tools.server_store import ToolServer
from engine import Tool

ServerStatus = Literal["off", "starting", "ready", "failed"]


@dataclass(frozen=True, slots=True)
class ServerTool:
    """A tool of a server.

    Attributes:
        server: name of its server.
        name: its name at the server.
        tool: what models are told of it; `tool.name` is unique among the tools of all servers.
        title: what people call it; its name where the server has no other.
        is_read_only: whether the server says that it changes nothing; None where it says nothing.
    """

    server: str
    name: str
    tool: Tool
    title: str = ""
    is_read_only: bool | None = None


@dataclass(frozen=True, slots=True)
class ToolServerState:
    """A server and what became of it.

    Attributes:
        problem: why it has failed, in a sentence; "" if it has not.
        tools: all that it has, also those that are hidden; () unless it is ready.
    """

    server: ToolServer
    status: ServerStatus
    problem: str = ""
    tools: tuple[ServerTool, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What came of a call: text for the model, or why there is none."""

    text: str
    is_error: bool = False


class RunningCall(Protocol):
    """A call that may still run."""

    def cancel(self) -> None:
        """End the call: its result is an error that says so. Without effect once it has one."""
        ...
