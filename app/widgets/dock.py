"""A dock with a plain title bar: its name, a button to detach it and one to close it."""

from __future__ import annotations

from PySide6.QtCore import Signal, Slot
from PySide6.QtGui import QCloseEvent
from PySide6.QtWidgets import QDockWidget, QFrame, QHBoxLayout, QMainWindow, QWidget

from app.widgets.buttons import IconButton
from app.widgets.text import label


class Dock(QDockWidget):
    """A dock for one panel, moved by its title, detached by its button or a double click.

    Args:
        beside: widget in the title bar, right of the name.
    """

    closed = Signal()

    def __init__(
        self, title: str, content: QWidget, parent: QMainWindow, beside: QWidget | None = None
    ) -> None:
        super().__init__(title, parent)
        self.setObjectName(title.lower())
        self.setWidget(content)
        self._float = IconButton("detach", "", self, size=14)
        self._float.clicked.connect(self._toggle_floating)
        close = IconButton("close", f"Close {title}", self, size=14)
        close.clicked.connect(self.close)
        name = label(title, "title")
        bar = QFrame(self)
        bar.setProperty("role", "panel")
        layout = QHBoxLayout(bar)
        layout.setContentsMargins(16, 8, 8, 4)
        layout.setSpacing(2)
        layout.addWidget(name)
        layout.addStretch()
        if beside is not None:
            layout.addWidget(beside)
            layout.addSpacing(4)
        layout.addWidget(self._float)
        layout.addWidget(close)
        self.setTitleBarWidget(bar)
        self.topLevelChanged.connect(self._on_floating)
        self._on_floating(False)

    @Slot(bool)
    def _on_floating(self, is_floating: bool) -> None:
        verb = "Put back" if is_floating else "Detach"
        self._float.set_text(f"{verb} {self.windowTitle()}")

    def closeEvent(self, event: QCloseEvent) -> None:
        super().closeEvent(event)
        self.closed.emit()

    @Slot()
    def _toggle_floating(self) -> None:
        self.setFloating(not self.isFloating())
