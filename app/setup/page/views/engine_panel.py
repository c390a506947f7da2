"""The engine's part of the settings page: what is in use, and what can be done with it."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QVBoxLayout, QWidget

from app.core.translation import tr
from app.widgets.buttons import button
from app.widgets.flow import FlowBox
from app.widgets.text import label, set_tip


class EnginePanel(QWidget):
    """Panel that names the engine in use, with buttons to replace it."""

    change_requested = Signal()
    update_requested = Signal()
    roll_back_requested = Signal()
    remove_requested = Signal()
    environment_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._title, self._details = label(), label(role="muted")
        self._news = label(role="ok")
        for text in (self._title, self._details, self._news):
            text.setWordWrap(True)
        self.update_engine = button(tr("Update"), "primary")
        self.change, self.remove = button(tr("Change…")), button(tr("Remove…"))
        self.roll_back = button(tr("Go back"))
        self.environment = button(tr("Use an existing Python environment…"))
        self._controls = {
            self.update_engine: self.update_requested,
            self.change: self.change_requested,
            self.roll_back: self.roll_back_requested,
            self.environment: self.environment_requested,
            self.remove: self.remove_requested,
        }
        for control, signal in self._controls.items():
            control.clicked.connect(signal)
        self._buttons = FlowBox()
        self._buttons.set_widgets(tuple(self._controls))
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 6, 0, 6)
        layout.setSpacing(6)
        for widget in (self._title, self._details, self._news, self._buttons):
            layout.addWidget(widget)
        self.show_engine("", "", "", {})

    @property
    def text(self) -> str:
        """Text of the panel about the engine."""
        lines = (self._title.text(), self._details.text(), self._news.text())
        return "\n".join(line for line in lines if line)

    def show_engine(self, title: str, details: str, news: str, tips: dict[QWidget, str]) -> None:
        """Show the engine in use.

        Args:
            news: what is newer, "" for nothing.
            tips: the buttons that make sense now, each with what it does.
        """
        for text, words in ((self._title, title), (self._details, details), (self._news, news)):
            text.setText(words)
            text.setVisible(bool(words))
        for control in self._controls:
            control.setEnabled(control in tips)
            control.setAccessibleDescription(tips.get(control, ""))
            set_tip(control, tips.get(control, ""))
        self._buttons.setVisible(bool(tips))
