"""A hub of tools for tests: waits for what its thread does."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.tools.hub import RunningCall, ToolHub
from app.tools.server_store import ToolLimits, ToolResult, ToolServer, ToolServerState

WAIT_S = 60.0

LIMITS = ToolLimits()

PLAIN = Path(__file__).with_name("plain_mcp_server.py")


def plain_server(name: str = "plain", way: str = "", **more: Any) -> ToolServer:
    """Return a server that begins at once; see `plain_mcp_server`."""
    return ToolServer(name, (sys.executable, "-I", str(PLAIN), way), **more)


class WatchedHub:
    """A hub, and what it has told.

    Attributes:
        changes: number of changes told so far.
    """

    def __init__(self, limits: ToolLimits = LIMITS, **more: Any) -> None:
        self._changed = threading.Condition()
        self.changes = 0
        self.hub = ToolHub(self._on_change, limits=limits, **more)

    def state(self, name: str) -> ToolServerState:
        return next(state for state in self.hub.states() if state.server.name == name)

    def wait(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so, looking at each change."""
        with self._changed:
            assert self._changed.wait_for(is_so, WAIT_S), self.hub.states()

    def settled(self, *servers: ToolServer) -> list[ToolServerState]:
        """Use these servers; return their states once none starts any more."""
        self.hub.set_servers(servers)
        self.wait(lambda: all(state.status != "starting" for state in self.hub.states()))
        return list(self.hub.states())

    def begin(self, tool: str, **arguments: Any) -> tuple[RunningCall, Callable[[], ToolResult]]:
        """Begin a call; return it, and what waits for its result."""
        found: list[ToolResult] = []
        is_done = threading.Event()

        def take(result: ToolResult) -> None:
            found.append(result)
            is_done.set()

        def result() -> ToolResult:
            assert is_done.wait(WAIT_S)
            (only,) = found
            return only

        return self.hub.call(tool, arguments, take), result

    def call(self, tool: str, arguments: Mapping[str, Any] | None = None) -> ToolResult:
        """Return the result of a call."""
        return self.begin(tool, **(arguments or {}))[1]()

    def _on_change(self) -> None:
        with self._changed:
            self.changes += 1
            self._changed.notify_all()


@contextmanager
def watched_hub(limits: ToolLimits = LIMITS, **more: Any) -> Iterator[WatchedHub]:
    """Yield a hub, and close it."""
    made = WatchedHub(limits, **more)
    try:
        yield made
    finally:
        assert made.hub.close(WAIT_S)
