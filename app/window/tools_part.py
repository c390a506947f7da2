"""Tools in a window: their servers, the dialog, and the panel of the settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal, Slot
from PySide6.QtWidgets import QWidget

from app.core.translation import tr, tr_later
from app.tools.page.session import ToolSession
from app.window.preferences.settings_view import SettingsPage

if TYPE_CHECKING:
    from app.tools.page.presenter import ToolPresenter
    from app.tools.page.tool_dialog import ToolPanel


class ToolPart(QObject):
    """Servers of tools, and what the window shows of them; made when it is first wanted.

    Args:
        over: widget of the window over which the dialog opens.

    Attributes:
        session: the servers, and calls of their tools.
        presenter: the dialog; None until it is wanted.
    """

    noticed = Signal(object)  # Notice

    def __init__(self, over: QWidget, parent: QObject) -> None:
        super().__init__(parent)
        self._over = over
        self.session = ToolSession(self)
        self.session.noticed.connect(self.noticed)
        self.presenter: ToolPresenter | None = None
        self._panel: ToolPanel | None = None

    def add_to(self, settings: SettingsPage) -> None:
        """Show the servers among the settings, too."""
        words = tr("MCP Model Context Protocol server plugin function call")
        settings.add_panel(tr_later("Tools"), self._make_panel, words)

    @Slot()
    def open(self) -> None:
        """Show the dialog."""
        if self.presenter is None:
            from app.tools.page.presenter import ToolPresenter

            self.presenter = ToolPresenter(self.session, self._over.window(), self)
        self.session.begin()
        self.presenter.open()

    def close(self) -> None:
        """End all connections and programs."""
        self.session.close()

    def _make_panel(self) -> QWidget:
        from app.tools.page.tool_dialog import ToolPanel

        panel = self._panel = ToolPanel()
        panel.change.clicked.connect(self.open)
        self.session.changed.connect(self._refresh)
        self._refresh()
        return panel

    @Slot()
    def _refresh(self) -> None:
        if self._panel is not None:
            self._panel.show_states(self.session.states)
