"""The server of the window while it runs; HTTP takes long to import, so this is imported late."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from app.core.translation import tr
from app.server.async_engine import AsyncEngine
from app.server.context import ServerContext
from app.server.models import HeldModel
from app.server.page.choices import ServerChoices, own_address
from app.server.page.log_view import LogView, view_of
from app.server.settings import ServerHints, ServerSettings
from app.server.web.server import ServerThread

if TYPE_CHECKING:
    from app.core.engine_client.inbox import EngineSharing


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
        self._engine = AsyncEngine(sharing.submit, sharing.cancel)
        self._settings = ServerSettings(
            host=choices.host, port=choices.port, key=key, origins=choices.pages, hints=_hints()
        )
        self._context: ServerContext | None = None
        self._thread = ServerThread(self._make_context, self._settings)
        self.address = ""

    def start(self) -> None:
        """Start it.

        Raises:
            EngineError: it cannot listen there.
        """
        self._engine.model = self._sharing.watch(self._engine.on_event)
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

    def view(self, then: Callable[[LogView], None]) -> None:
        """Have `then` called on the server's thread with what the server notes, if it runs."""
        context = self._context
        if context is not None:
            self._thread.call(lambda: then(view_of(context.request_log)))

    def _make_context(self) -> ServerContext:
        self._context = ServerContext(self._engine, HeldModel(self._engine), self._settings)
        return self._context


def _hints() -> ServerHints:
    """Return what refusals say that can be done in the window."""
    pages = tr("Web pages may ask (CORS)")
    return ServerHints(
        host=tr("Use the address that Tandem shows under “{page}”.").format(page=tr("Server")),
        page=tr("Add them under “{switch}” in Tandem.").format(switch=pages),
    )
