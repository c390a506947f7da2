"""Remote models in the window; network modules are imported on first use."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, QTimer, Signal, Slot

from app.core import paths
from app.core.background import LatestJob
from app.core.settings import Settings, SettingsStore
from app.core.translation import tr, translated
from app.core.units import decimal
from app.devices.monitor.views.monitor_panel import MonitorPanel
from app.remote.client.address import KeyStore, RemoteAddress, is_remote, split_path
from app.remote.client.switch import HostSwitch, MakeHost
from engine import EngineError

if TYPE_CHECKING:
    from app.remote.client.connection import Connection
    from app.remote.client.protocol import ServerFigures
    from app.remote.page.connecting import RemoteConnecting
    from engine import EngineHost, HostEvent

EVERY_MS = 1000


class ServerWatch(QObject):
    """Poller for one server's statistics.

    Args:
        is_seen: returns whether the statistics are visible.
    """

    figures_changed = Signal(str)  # one line, or ""

    def __init__(self, keys: KeyStore, is_seen: Callable[[], bool], parent: QObject) -> None:
        super().__init__(parent)
        self._keys, self._is_seen = keys, is_seen
        self._address: RemoteAddress | None = None
        self._connection: Connection | None = None
        self._job = LatestJob("tandem-server-figures", self)
        self._job.done.connect(self._on_read)
        self._job.failed.connect(self._on_failed)
        self._timer = QTimer(self, interval=EVERY_MS)
        self._timer.timeout.connect(self._ask)

    def watch(self, address: RemoteAddress | None) -> None:
        """Poll this server from now on, or stop polling if it is None."""
        self._stop()
        self._address = address
        self.figures_changed.emit("")
        if address is not None:
            self._timer.start()
            self._ask()

    def close(self) -> None:
        """Stop polling and abort the running request."""
        self._stop()
        self._job.close()

    def _stop(self) -> None:
        self._timer.stop()
        self._job.drop()
        if self._connection is not None:
            self._connection.abort()

    @Slot()
    def _ask(self) -> None:
        address = self._address
        if address is None or self._job.is_busy or not self._is_seen():
            return

        from app.remote.client.connection import Connection  # imported late: slow

        connection = self._connection = Connection(address)

        def read() -> ServerFigures:
            from app.remote.client.protocol import read_figures  # imported late: slow

            connection.key = self._keys.get(address)
            return read_figures(address, connection)

        self._job.run(read)

    @Slot(object)
    def _on_read(self, figures: ServerFigures) -> None:
        if self._address is not None:
            self.figures_changed.emit(figures_text(self._address.host, figures))

    @Slot(object)
    def _on_failed(self, error: EngineError) -> None:
        if self._address is not None:
            self.figures_changed.emit(translated(error.message))


def figures_text(host: str, figures: ServerFigures) -> str:
    """Format a server's statistics."""
    parts = [
        tr("{rate} tokens/s").format(rate=decimal(f"{figures.tokens_per_s:.1f}")),
        tr("{n} running").format(n=figures.n_running),
        tr("{n} waiting").format(n=figures.n_waiting),
    ]
    if figures.kv_used is not None and figures.kv_room:
        share = f"{100 * figures.kv_used / figures.kv_room:.0f}"
        parts.append(tr("KV cache {share} %").format(share=share))
    elif figures.kv_room:
        parts.append(tr("KV cache for {n} tokens").format(n=figures.kv_room))
    return f"{host}: {' · '.join(parts)}"


class RemotePart(QObject):
    """Remote models: their host, the connection dialog and server statistics.

    Args:
        make_engine: starts this machine's engine.
        is_engine_missing: returns whether no engine is installed.
        keep: saves settings.
        monitor: panel for the statistics; the dialog opens over its window.
        make_team: starts the host for models on several machines.
    """

    noticed = Signal(object)  # Notice
    opened = Signal(str)  # address of a model

    def __init__(
        self,
        make_engine: MakeHost,
        is_engine_missing: Callable[[], bool],
        settings: SettingsStore,
        keep: Callable[[Settings], None],
        monitor: MonitorPanel,
        make_team: MakeHost,
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
        """The servers' API keys."""
        return KeyStore(paths.api_keys_file())

    def make_host(self, on_event: Callable[[HostEvent], None]) -> EngineHost:
        """Return a host for local and remote models; remote models need no local engine."""
        starts_local = not self._is_engine_missing()
        self._hosts = HostSwitch(
            on_event, self._make_engine, self.keys.get, self._make_team, starts_local=starts_local
        )
        return self._hosts

    @Slot()
    def meet_team(self) -> None:
        """Start the host for models on several machines, before the first load."""
        if self._hosts is not None:
            self._hosts.team()

    @Slot()
    def open(self) -> None:
        """Show the connection dialog."""
        if self.connecting is None:
            from app.remote.page.connecting import RemoteConnecting

            over = self._monitor.window()
            self.connecting = RemoteConnecting(self.keys, self._settings, self._keep, over, self)
            self.connecting.noticed.connect(self.noticed)
            self.connecting.open_requested.connect(self.opened)
        self.connecting.open()

    def watch(self, path: str) -> None:
        """Show the statistics of the loaded model's server if it is a Tandem server."""
        if not is_remote(path) or self._hosts is None or not self._hosts.serves_tandem:
            self.unwatch()
            return
        if self._figures is None:
            self._figures = ServerWatch(self.keys, self._monitor.isVisible, self)
            self._figures.figures_changed.connect(self._monitor.show_server)
        self._figures.watch(split_path(path))

    @Slot()
    def unwatch(self) -> None:
        """Hide the statistics."""
        if self._figures is not None:
            self._figures.watch(None)

    def close(self) -> None:
        """Stop all work on threads."""
        for one in (self.connecting, self._figures):
            if one is not None:
                one.close()
