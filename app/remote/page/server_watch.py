"""Reads the figures of a Tandem's server once a second, while somebody looks at them."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QObject, QTimer, Signal, Slot

from app.core.background import LatestJob
from app.core.translation import tr
from app.core.units import decimal
from app.remote.client.address import RemoteAddress
from app.remote.client.connection import Connection
from app.remote.client.figures import ServerFigures, read_figures
from app.remote.client.keys import KeyStore
from engine import EngineError

EVERY_MS = 1000


class ServerWatch(QObject):
    """The figures of one server at a time.

    Args:
        is_seen: whether anybody looks.
    """

    told = Signal(str)  # the figures in one line, "" for none

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
        """Read from this server, and from no other; None for none."""
        self._stop()
        self._address = address
        self.told.emit("")
        if address is not None:
            self._timer.start()
            self._ask()

    def close(self) -> None:
        """End the question that is under way."""
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

        connection = self._connection = Connection(address)

        def read() -> ServerFigures:
            connection.key = self._keys.get(address)
            return read_figures(address, connection)

        self._job.run(read)

    @Slot(object)
    def _on_read(self, figures: ServerFigures) -> None:
        if self._address is not None:
            self.told.emit(figures_text(self._address.host, figures))

    @Slot(object)
    def _on_failed(self, error: EngineError) -> None:
        """Say why there are no figures; the next second tries again."""
        if self._address is not None:
            self.told.emit(error.message)


def figures_text(host: str, figures: ServerFigures) -> str:
    """Return the figures of a server in one line."""
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
