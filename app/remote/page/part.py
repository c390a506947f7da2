"""Remote models in a window; what speaks to the network is imported when it is first wanted."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal, Slot

from app.core import paths
from app.core.settings import Settings, SettingsStore
from app.devices.monitor.views.monitor_panel import MonitorPanel
from app.remote.client.address import is_remote, split_path
from app.remote.client.switch import HostSwitch, MakeLocal, MakeTeam

if TYPE_CHECKING:
    from app.remote.client.keys import KeyStore
    from app.remote.page.connecting import RemoteConnecting
    from app.remote.page.server_watch import ServerWatch
    from engine import EngineHost, HostEvent


class RemotePart(QObject):
    """The host of local and remote models, the dialog that connects, and the figures of a server.

    Args:
        make_engine: starts the engine of this machine.
        is_engine_missing: whether there is none.
        keep: stores settings and has them written.
        monitor: panel that shows the figures; the dialog opens over its window.
        make_team: makes the host of models that several machines compute.
    """

    noticed = Signal(object)  # Notice
    opened = Signal(str)  # address of a model, in the place of a path

    def __init__(
        self,
        make_engine: MakeLocal,
        is_engine_missing: Callable[[], bool],
        settings: SettingsStore,
        keep: Callable[[Settings], None],
        monitor: MonitorPanel,
        make_team: MakeTeam,
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._make_engine, self._is_engine_missing = make_engine, is_engine_missing
        self._settings, self._keep, self._monitor = settings, keep, monitor
        self._make_team = make_team
        self._hosts: HostSwitch | None = None
        self.connecting: RemoteConnecting | None = None
        self._figures: ServerWatch | None = None

    @cached_property
    def keys(self) -> KeyStore:
        """The keys of servers."""
        from app.remote.client.keys import KeyStore

        return KeyStore(paths.api_keys_file())

    def make_host(self, on_event: Callable[[HostEvent], None]) -> EngineHost:
        """Return a host of models here and on other machines; these need no engine."""
        starts_local = not self._is_engine_missing()
        self._hosts = HostSwitch(
            on_event, self._make_engine, self.keys.get, self._make_team, starts_local=starts_local
        )
        return self._hosts

    @Slot()
    def meet_team(self) -> None:
        """Make the host of models that several machines compute, before the first one is loaded."""
        if self._hosts is not None:
            self._hosts.team()

    @Slot()
    def open(self) -> None:
        """Show the dialog that connects."""
        if self.connecting is None:
            from app.remote.page.connecting import RemoteConnecting

            over = self._monitor.window()
            self.connecting = RemoteConnecting(self.keys, self._settings, self._keep, over, self)
            self.connecting.noticed.connect(self.noticed)
            self.connecting.open_requested.connect(self.opened)
        self.connecting.open()

    def watch(self, path: str) -> None:
        """Show the figures of the loaded model's server, if another Tandem is one."""
        if not is_remote(path) or self._hosts is None or not self._hosts.serves_tandem:
            self.unwatch()
            return
        if self._figures is None:
            from app.remote.page.server_watch import ServerWatch

            self._figures = ServerWatch(self.keys, self._monitor.isVisible, self)
            self._figures.told.connect(self._monitor.show_server)
        self._figures.watch(split_path(path))

    @Slot()
    def unwatch(self) -> None:
        """Show no server's figures."""
        if self._figures is not None:
            self._figures.watch(None)

    def close(self) -> None:
        """End all work on threads."""
        for one in (self.connecting, self._figures):
            if one is not None:
                one.close()
