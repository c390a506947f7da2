"""The window's running server; imported late, since HTTP modules take long to import."""

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
    """A server on its own thread that shares the window's engine.

    Args:
        key: API key, or "".

    Attributes:
        address: its URL; on a network, one that other machines can use.
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
        """Start the server.

        Raises:
            EngineError: it cannot listen or start in time.
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
        """Stop the server and its answers, waiting up to two seconds."""
        self._thread.stop()
        self._sharing.on_event = None

    def view(self, then: Callable[[LogView], None]) -> None:
        """Call `then` with a snapshot on the server's thread, if that is running."""
        context = self._context
        if context is not None:
            self._thread.call(lambda: then(view_of(context.request_log)))

    def _make_context(self) -> ServerContext:
        self._context = ServerContext(self._engine, HeldModel(self._engine), self._settings)
        return self._context


def _hints() -> ServerHints:
    pages = tr("Allow web pages (CORS)")
    return ServerHints(
        host=tr("Use the address shown under “{page}” in Tandem.").format(page=tr("Server")),
        page=tr("Add them under “{switch}” in Tandem.").format(switch=pages),
    )
