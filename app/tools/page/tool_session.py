"""The servers of tools of a window, and the hub that is connected to them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import QObject, Signal, Slot

from app.core import paths
from app.core.background import KeyedJobs
from app.core.engine_sentences import reason_of
from app.core.notice import Notice
from app.core.translation import tr
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

CLOSE_S = 8.0
"""Longest wait in seconds for programs to end; those that do not by themselves are ended before."""


class ToolSession(QObject):
    """Servers, kept in their file, and what they offer; nothing runs before `begin`.

    Attributes:
        servers: all servers, in the order in which they were added.
    """

    changed = Signal()  # servers, their states, or what they offer
    noticed = Signal(object)  # Notice

    _hub_changed = Signal()  # from the hub's thread

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
        from app.tools.hub import ToolHub  # late: the first picture does without asyncio

        return ToolHub(self._hub_changed.emit, self._store.headers_of)

    @property
    def states(self) -> tuple[ToolServerState, ...]:
        """State of each server."""
        return self._hub.states() if self.servers else ()

    @property
    def offered(self) -> tuple[ServerTool, ...]:
        """The tools that models are told of."""
        return self._hub.offered() if self.servers else ()

    def call(
        self, tool_name: str, arguments: Mapping[str, Any], on_done: Callable[[ToolResult], None]
    ) -> RunningCall:
        """Call a tool; see `ToolHub.call`. `on_done` is called on the hub's thread."""
        return self._hub.call(tool_name, arguments, on_done)

    @Slot()
    def begin(self) -> None:
        """Read the file, and connect to the servers that are on; does nothing later."""
        if not self._has_begun:
            self._has_begun = True
            self.servers = self._store.load()
            if self.servers:
                self._apply()

    def close(self) -> None:
        """Keep what has changed, and end all connections and programs."""
        self._is_closed = True
        self._jobs.close(CLOSE_S)
        if "_hub" in self.__dict__ and not self._hub.close(CLOSE_S):
            log.warning("a server of tools has not ended")

    def add(self, servers: Sequence[ToolServer]) -> None:
        """Add servers; those that have the name of another replace it."""
        for server in servers:
            self.put(server, server.name)

    def put(self, server: ToolServer, old_name: str = "") -> None:
        """Add a server, or put it in the place of the one that had a name.

        Values of headers that it lacks are those that the old one has.
        """
        self.begin()  # or the file's would take their place
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
                self._hub.restart(kept.name)  # only a secret is another
            if notice := _place_notice(places):
                self.noticed.emit(notice)

        self._jobs.run(f"secrets of {server.name}", keep, use)

    def remove(self, name: str) -> None:
        """Forget a server."""
        if self._server(name).headers:
            self._jobs.run(f"secrets of {name}", lambda: self._store.forget(name), _log)
        self._use(tuple(server for server in self.servers if server.name != name))

    def switch(self, name: str, on: bool) -> None:
        """Use a server, or do not."""
        self._replace(replace(self._server(name), is_on=on), name)

    def show_tool(self, name: str, tool: str, on: bool) -> None:
        """Tell models of a tool of a server, or do not."""
        server = self._server(name)
        hidden = tuple(one for one in server.hidden if one != tool)
        self._replace(replace(server, hidden=hidden if on else (*hidden, tool)), name)

    def restart(self, name: str) -> None:
        """Connect to a server anew."""
        self._hub.restart(name)

    def _server(self, name: str) -> ToolServer:
        return next(server for server in self.servers if server.name == name)

    def _replace(self, server: ToolServer, old_name: str) -> None:
        """Put a server in the place of the one that had a name, else behind all others."""
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
        log.info("secrets of a server could not be kept: %s", type(error).__name__)


def _place_notice(places: Sequence[Place]) -> Notice | None:
    """Return what a person should know of where secrets are kept."""
    if places == ["file"]:
        return Notice(tr("There is no keyring, so the key is in a file that only you can read."))
    if places == ["nowhere"]:
        text = tr("The key cannot be kept: it is used until Tandem closes.")
        return Notice(text, "", "warning")
    return None
