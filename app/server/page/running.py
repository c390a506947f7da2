"""A server that runs before the window's engine. Imports `app.server`, so it is imported late."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from app.core.translation import tr
from app.server.desk import Desk
from app.server.link import EngineLink
from app.server.models import HeldModel
from app.server.page.ledger_view import LedgerView, view_of
from app.server.settings import ServerHints, ServerSettings
from app.server.web.running import ServerThread

if TYPE_CHECKING:
    from app.core.engine_client.sharing import EngineSharing
    from app.server.page.choices import ServerChoices

ANYWHERE = ("192.0.2.1", 9)
"""An address of nobody's, kept for examples, to which nothing is sent."""


class RunningServer:
    """A server on a thread of its own, which uses the window's engine.

    Args:
        sharing: the way to the engine.
        key: what clients must know; "" for nothing.

    Attributes:
        address: address for programs on this machine or, if it is on a network, for all.
    """

    def __init__(self, sharing: EngineSharing, choices: ServerChoices, key: str) -> None:
        self._sharing = sharing
        self._link = EngineLink(sharing.submit, sharing.cancel)
        self._settings = ServerSettings(
            host=choices.host, port=choices.port, key=key, origins=choices.pages, hints=_hints()
        )
        self._desk: Desk | None = None
        self._thread = ServerThread(self._make_desk, self._settings)
        self.address = ""

    def start(self) -> None:
        """Start it.

        Raises:
            EngineError: it cannot listen there.
        """
        self._link.model = self._sharing.watch(self._link.on_event)
        try:
            address = self._thread.start()
        except BaseException:
            self._sharing.on_event = None
            raise
        host, _, port = address.rpartition(":")
        is_local = self._settings.host == host.partition("//")[2] != "0.0.0.0"
        self.address = address if is_local else f"http://{own_address()}:{port}"

    def stop(self) -> None:
        """End it and its answers, within two seconds."""
        self._thread.stop()
        self._sharing.on_event = None

    def view(self, then: Callable[[LedgerView], None]) -> None:
        """Have `then` called on the server's thread with what the server notes, if it runs."""
        desk = self._desk
        if desk is not None:
            self._thread.call(lambda: then(view_of(desk.ledger)))

    def _make_desk(self) -> Desk:
        self._desk = Desk(self._link, HeldModel(self._link), self._settings)
        return self._desk


def _hints() -> ServerHints:
    """Return what refusals say that can be done in the window."""
    pages = tr("Web pages may ask (CORS)")
    return ServerHints(
        host=tr("Use the address that Tandem shows under “{page}”.").format(page=tr("Server")),
        page=tr("Add them under “{switch}” in Tandem.").format(switch=pages),
    )


def own_address() -> str:
    """Return the address of this machine in its network; its name if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(ANYWHERE)  # chooses a network card; sends nothing
            return str(sock.getsockname()[0])
        except OSError:
            return socket.gethostname()
