"""The source of tools, as far as chats know it: a `ToolSession` is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from app.tools.server_store import ServerTool, ToolResult, ToolServerState

if TYPE_CHECKING:
    from app.tools.hub import RunningCall


class ToolSource(Protocol):
    """All tools of all servers."""

    @property
    def states(self) -> Sequence[ToolServerState]:
        """The servers, with their tools."""
        ...

    @property
    def offered(self) -> Sequence[ServerTool]:
        """The tools that models are told of."""
        ...

    def call(
        self, tool_name: str, arguments: Mapping[str, Any], on_done: Callable[[ToolResult], None]
    ) -> RunningCall:
        """Start a call of a tool.

        Args:
            on_done: called once with the result, on any thread.
        """
        ...
