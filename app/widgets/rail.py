"""The rail: a column of icons, each of which shows, raises or hides one panel."""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtWidgets import QDockWidget, QMainWindow, QSizePolicy, QToolBar, QWidget

from app.core.translation import tr
from app.widgets.buttons import IconButton
from app.widgets.sizes import scaled

ICON_SIZE = 20


class Rail(QToolBar):
    """Column of icon buttons at the left edge of a window."""

    panel_clicked = Signal(object)  # QDockWidget

    def __init__(self, parent: QMainWindow) -> None:
        super().__init__(tr("Views"), parent)
        self.setObjectName("rail")
        self.setProperty("role", "rail")
        scaled(self, self._set_icon_size, ICON_SIZE)
        self.setMovable(False)
        self.setFloatable(False)
        self.toggleViewAction().setVisible(False)
        self.setContextMenuPolicy(Qt.ContextMenuPolicy.PreventContextMenu)

    def _set_icon_size(self, size: int) -> None:
        self.setIconSize(QSize(size, size))  # Qt gives it to the buttons

    def add_page(self, icon: str, text: str) -> IconButton:
        """Add the button of a page, which the window checks while it is seen, and return it."""
        made = self._add_button(icon, text)
        made.clicked.connect(lambda is_checked: made.setChecked(not is_checked))
        return made

    def add_panel(self, icon: str, text: str, dock: QDockWidget) -> IconButton:
        """Add the button of a panel, checked while the panel is seen, and return it."""
        made = self._add_button(icon, text)
        dock.visibilityChanged.connect(made.setChecked)

        def click() -> None:
            made.setChecked(is_in_front(dock))  # the panel decides, not the click
            self.panel_clicked.emit(dock)

        made.clicked.connect(click)
        return made

    def _add_button(self, icon: str, text: str) -> IconButton:
        made = IconButton(icon, text, self, size=ICON_SIZE)
        made.setCheckable(True)
        self.addWidget(made)
        return made

    def add_space(self) -> None:
        """Push what is added from now on to the lower end."""
        space = QWidget(self)
        space.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Expanding)
        self.addWidget(space)


def is_in_front(dock: QDockWidget) -> bool:
    """Return whether a panel is seen; Qt calls one behind another's tab visible, too."""
    return dock.isVisible() and not dock.visibleRegion().isEmpty()
