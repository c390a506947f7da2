"""Presenter that refreshes the server page once a second while the page is visible."""

from __future__ import annotations

from PySide6.QtCore import QObject, QTimer, Slot

from app.core.engine_client import EngineClient
from app.core.translation import tr
from app.server.page.log_view import LogView
from app.server.page.server_panel import ServerPanel, state_text
from app.server.page.session import ServerSession

LOOK_MS = 1000


class ServerPresenter(QObject):
    """Connects the server page to the session until `close`."""

    def __init__(
        self, session: ServerSession, panel: ServerPanel, client: EngineClient, parent: QObject
    ) -> None:
        super().__init__(parent)
        self._session, self._panel, self._client = session, panel, client
        self._view = LogView()
        self._timer = QTimer(self, interval=LOOK_MS)
        self._timer.timeout.connect(session.look)
        panel.switched.connect(session.switch)
        panel.chosen.connect(lambda name, value: session.change(**{name: value}))
        panel.access.key_renewed.connect(session.renew_key)
        panel.shown.connect(self._on_shown)
        panel.hidden.connect(self._timer.stop)
        session.changed.connect(self.refresh)
        session.viewed.connect(self._on_view)
        client.state_changed.connect(self.refresh)
        self.refresh()

    def close(self) -> None:
        self._timer.stop()

    @Slot()
    def refresh(self) -> None:
        """Update the page."""
        session, panel = self._session, self._panel
        choices = session.choices
        if not session.address:
            self._view = LogView(tuple(r for r in self._view.requests if r.phase == "ended"))
            panel.show_view(self._view)
        panel.show_settings(session.settings, session.key, session.key_problem)
        panel.show_state(is_on=session.is_wanted, state=self._state_text(), problem=session.problem)
        address = session.address or f"http://127.0.0.1:{choices.port}"
        panel.show_address(f"{address}/v1", needs_key=choices.needs_key)
        if session.address and panel.isVisible() and not self._timer.isActive():
            self._timer.start()
            session.look()
        elif not session.address:
            self._timer.stop()

    def _state_text(self) -> str:
        session = self._session
        if session.is_changing:
            return tr("Starting …") if session.is_wanted else tr("Stopping …")
        if not session.address:
            return tr("Off. Other programs cannot use the model.")
        if self._client.model is None:
            return tr("On, but no model is loaded")
        return state_text(self._view)

    @Slot()
    def _on_shown(self) -> None:
        if self._session.choices.needs_key and not self._session.key:
            self._session.want_key()
        self.refresh()

    @Slot(object)
    def _on_view(self, view: LogView) -> None:
        if not self._session.address or not self._panel.isVisible():
            return
        self._view = view
        self._panel.show_view(view)
        self._panel.main.set_help(self._state_text())
