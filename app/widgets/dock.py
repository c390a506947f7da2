"""A dock with a plain title bar: its name, a button to detach it and one to close it."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal, Slot
from PySide6.QtGui import QCloseEvent
from PySide6.QtWidgets import QDockWidget, QFrame, QHBoxLayout, QMainWindow, QWidget

from app.core.translation import tr
from app.widgets.buttons import IconButton
from app.widgets.text import label

FRAME = (
    Qt.WindowType.Window
    | Qt.WindowType.CustomizeWindowHint
    | Qt.WindowType.WindowTitleHint
    | Qt.WindowType.WindowMinMaxButtonsHint
    | Qt.WindowType.WindowCloseButtonHint
)
"""Flags of a detached panel: a window with the desktop's frame, to be moved and resized."""


class Dock(QDockWidget):
    """A dock for one panel, moved by its title, detached by its button or a double click.

    Args:
        name: what the window's layout is stored by, in all languages.
        beside: widget in the title bar, right of the title.
    """

    closed = Signal()

    def __init__(
        self,
        name: str,
        title: str,
        content: QWidget,
        parent: QMainWindow,
        beside: QWidget | None = None,
    ) -> None:
        super().__init__(title, parent)
        self.setObjectName(name)
        self.setWidget(content)
        self._float = IconButton("detach", "", self, size=14)
        self._float.clicked.connect(self._toggle_floating)
        close = IconButton("close", tr("Close {title}").format(title=title), self, size=14)
        close.clicked.connect(self.close)
        shown = label(title, "title")
        bar = QFrame(self)
        bar.setProperty("role", "panel")
        layout = QHBoxLayout(bar)
        layout.setContentsMargins(16, 8, 8, 4)
        layout.setSpacing(2)
        layout.addWidget(shown)
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
        text = tr("Put back {title}") if is_floating else tr("Detach {title}")
        self._float.set_text(text.format(title=self.windowTitle()))
        self.keep_frame()

    def keep_frame(self) -> None:
        """Give a detached panel a frame, which Qt leaves out where a panel has its own title bar.

        Restoring a layout takes it away without a signal.
        """
        if self.isFloating() and self.windowFlags() & Qt.WindowType.FramelessWindowHint:
            is_shown = not self.isHidden()
            self.setWindowFlags(FRAME)
            self.setVisible(is_shown)

    def closeEvent(self, event: QCloseEvent) -> None:
        super().closeEvent(event)
        self.closed.emit()

    @Slot()
    def _toggle_floating(self) -> None:
        self.setFloating(not self.isFloating())
