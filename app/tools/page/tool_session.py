"""The window's tool servers, and the hub that connects to them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import QObject, Signal, Slot

from app.core import paths
from app.core.background import KeyedJobs
from app.core.notice import Notice, secret_notice
from app.core.translation import reason_of, tr
from engine import EngineError

if TYPE_CHECKING:
    from app.core.system_keyring import Place
    from app.tools.hub import RunningCall, ToolHub
    from app.tools.server_store import (
        ServerTool,
        ToolResult,
        ToolServer,
        ToolServerState,
        ToolServerStore,
    )

log = logging.getLogger(__name__)

CLOSE_S = 8.0  # timeout in seconds for programs to stop


class ToolSession(QObject):
    """Tool servers, their file and connections; nothing starts before `begin`.

    Attributes:
        servers: all servers, in the order in which they were added.
    """

    changed = Signal()  # servers, states or tools have changed
    noticed = Signal(object)  # Notice

    _hub_changed = Signal()  # emitted on the hub's thread

    def __init__(self, parent: QObject) -> None:
        super().__init__(parent)
        self.servers: tuple[ToolServer, ...] = ()
        self._hub_changed.connect(self.changed)
        self._jobs = KeyedJobs("tandem-tool-servers", self)
        self._has_begun = self._is_closed = False

    @cached_property
    def _store(self) -> ToolServerStore:
        from app.core.system_keyring import SecretStore
        from app.tools.server_store import ToolServerStore

        return ToolServerStore(paths.tool_servers_file(), SecretStore(paths.tool_secrets_file()))

    @cached_property
    def _hub(self) -> ToolHub:
        from app.tools.hub import ToolHub  # imported late: asyncio would slow down the start

        return ToolHub(self._hub_changed.emit, self._store.headers_of)

    @property
    def states(self) -> tuple[ToolServerState, ...]:
        """The state of each server."""
        return self._hub.states() if self.servers else ()

    @property
    def offered(self) -> tuple[ServerTool, ...]:
        """The tools for models."""
        return self._hub.offered() if self.servers else ()

    def call(
        self, tool_name: str, arguments: Mapping[str, Any], on_done: Callable[[ToolResult], None]
    ) -> RunningCall:
        """Call a tool; see `ToolHub.call`. `on_done` is called on the hub's thread."""
        return self._hub.call(tool_name, arguments, on_done)

    @Slot()
    def begin(self) -> None:
        """Read the file and connect to the enabled servers; later calls do nothing."""
        if not self._has_begun:
            self._has_begun = True
            self.servers = self._store.load()
            if self.servers:
                self._apply()

    def close(self) -> None:
        """Save pending changes and stop all connections and programs."""
        self._is_closed = True
        self._jobs.close(CLOSE_S)
        if "_hub" in self.__dict__ and not self._hub.close(CLOSE_S):
            log.warning("a tool server has not ended")

    def add(self, servers: Sequence[ToolServer]) -> None:
        """Add servers, replacing those with the same name."""
        for server in servers:
            self.put(server, server.name)

    def put(self, server: ToolServer, old_name: str = "") -> None:
        """Add a server or replace the one named `old_name`; empty headers keep their old values."""
        self.begin()  # otherwise, reading the file later would undo the change
        names = [known.name for known in self.servers]
        if not server.headers:
            if old_name in names and self._server(old_name).headers:
                self._jobs.run(f"secrets of {old_name}", lambda: self._store.forget(old_name), _log)
            self._replace(server, old_name)
            return
        old = self._server(old_name) if old_name in names else None
        places: list[Place] = []

        def keep() -> None:
            places.append(self._store.keep_secrets(server, old))

        def use(error: Exception | None) -> None:
            _log(error)
            kept = replace(server, headers=dict.fromkeys(server.headers, ""))
            self._replace(kept, old_name)
            if old is not None and old.name == kept.name and old.connects_like(kept):
                self._hub.restart(kept.name)  # only a secret has changed
            if places and (notice := secret_notice(places[0])):
                self.noticed.emit(notice)

        self._jobs.run(f"secrets of {server.name}", keep, use)

    def remove(self, name: str) -> None:
        """Remove a server."""
        if self._server(name).headers:
            self._jobs.run(f"secrets of {name}", lambda: self._store.forget(name), _log)
        self._use(tuple(server for server in self.servers if server.name != name))

    def switch(self, name: str, on: bool) -> None:
        """Enable or disable a server."""
        self._replace(replace(self._server(name), is_on=on), name)

    def show_tool(self, name: str, tool: str, on: bool) -> None:
        """Show a tool to models or hide it from them."""
        server = self._server(name)
        hidden = tuple(one for one in server.hidden if one != tool)
        self._replace(replace(server, hidden=hidden if on else (*hidden, tool)), name)

    def restart(self, name: str) -> None:
        """Reconnect to a server."""
        self._hub.restart(name)

    def _server(self, name: str) -> ToolServer:
        return next(server for server in self.servers if server.name == name)

    def _replace(self, server: ToolServer, old_name: str) -> None:
        others = [known for known in self.servers if known.name not in (server.name, old_name)]
        names = [known.name for known in self.servers]
        place = next((names.index(n) for n in (old_name, server.name) if n in names), len(others))
        self._use((*others[:place], server, *others[place:]))

    def _use(self, servers: tuple[ToolServer, ...]) -> None:
        self.servers = servers
        self._jobs.run("file", lambda: self._store.save(servers), self._on_saved)
        self._apply()

    def _apply(self) -> None:
        self._hub.set_servers(self.servers)
        self.changed.emit()

    def _on_saved(self, error: Exception | None) -> None:
        if error is not None and not self._is_closed:
            why = reason_of(error)
            text = tr("The list of tool servers cannot be saved: {why}.").format(why=why)
            self.noticed.emit(Notice.of(EngineError(text)))


def _log(error: Exception | None) -> None:
    if error is not None:
        log.info("a server's secrets could not be stored: %s", type(error).__name__)
