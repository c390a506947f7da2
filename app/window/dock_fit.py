"""Room for the panels: which of them give way in a window that has too little for all."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QObject, QSize, Qt, QTimer, Slot
from PySide6.QtWidgets import QApplication, QDockWidget

from app.core.scale import px
from app.window.main_window import MONITOR_HEIGHT, SIDEBAR_WIDTH, SPLIT_WIDTH, MainWindow


def room_on_screen(window: MainWindow) -> QSize:
    """Return the largest size of a window on its screen."""
    return window.screen().availableSize()


class DockFit(QObject):
    """What hides panels without room, in a window made narrow, on a small screen, at another zoom.

    What is on the right goes first, then the list of chats: the chat itself stays. What was hidden
    comes back once there is room for it.
    """

    def __init__(self, window: MainWindow) -> None:
        super().__init__(window)
        self._window = window
        self._hidden: list[QDockWidget] = []
        self._wanted = 0  # width from which on some of these have room
        self._resized = QTimer(self, singleShot=True, interval=0)
        self._resized.timeout.connect(self._on_resized)
        window.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() is QEvent.Type.Resize:
            self._resized.start()
        return super().eventFilter(watched, event)

    @Slot()
    def _on_resized(self) -> None:
        """Hide panels in a window that was made narrow, and show them in one made wide."""
        width, needed = self._window.width(), self._window.minimumSizeHint().width()
        if needed > width or (self._hidden and width >= self._wanted):
            had_hidden = bool(self._hidden)
            self._hide_for(width)
            if had_hidden and not self._hidden:
                self._widen()

    @Slot()
    def fit_screen(self) -> None:
        """Hide the panels for which the screen has no room; the window may not be seen yet."""
        window, room = self._window, room_on_screen(self._window)
        needed = window.minimumSizeHint().width()
        if needed > room.width():
            self.fit(window.size().boundedTo(room))
        elif needed > window.width():
            window.resize(needed, window.height())

    @Slot(object)
    def make_way(self, opened: QDockWidget) -> None:
        """Widen the window for a panel that was opened, or hide those of the other side."""
        window, room, size = self._window, room_on_screen(self._window), self._window.size()
        self._hidden = [dock for dock in self._hidden if dock is not opened]
        QApplication.sendPostedEvents()  # the panel takes its place
        needed = window.minimumSizeHint().width()
        if needed <= size.width():
            return
        if needed <= room.width() and not window.isMaximized():
            window.resize(needed, size.height())
            return
        for dock in window.right_docks if opened is window.chats_dock else (window.chats_dock,):
            dock.hide()
        QApplication.sendPostedEvents()
        if not window.isMaximized():
            window.resize(size.boundedTo(room))

    def fit(self, size: QSize) -> None:
        """Lay the panels out anew in a window that keeps this size."""
        window = self._window
        self._hide_for(size.width())
        if not window.isMaximized():
            window.resize(size)
        docks, widths = zip(*self._usual_widths(), strict=True)
        window.resizeDocks(docks, widths, Qt.Orientation.Horizontal)
        height = min(px(MONITOR_HEIGHT), size.height() // 3)
        window.resizeDocks([window.monitor_dock], [height], Qt.Orientation.Vertical)

    def _usual_widths(self) -> list[tuple[QDockWidget, int]]:
        """Return the panels at the sides with the widths that they have in a wide window."""
        right = [(dock, px(SPLIT_WIDTH)) for dock in self._window.right_docks]
        return [(self._window.chats_dock, px(SIDEBAR_WIDTH)), *right]

    def _widen(self) -> None:
        """Give panels their usual widths again, which they lost before one had to be hidden."""
        shown = [(dock, width) for dock, width in self._usual_widths() if not dock.isHidden()]
        for dock, width in shown:
            if dock.width() < width:
                self._window.resizeDocks([dock], [width], Qt.Orientation.Horizontal)

    def _hide_for(self, width: int) -> None:
        """Hide as few panels as a width in pixels asks for, of those that a person wants to see."""
        window = self._window
        docks = [window.chats_dock, *window.right_docks]
        shown = [dock for dock in docks if not dock.isHidden() or dock in self._hidden]
        right = [dock for dock in shown if dock is not window.chats_dock]
        wanted = []
        for self._hidden in ([], right, shown):
            for dock in shown:
                dock.setVisible(dock not in self._hidden)
            QApplication.sendPostedEvents()  # the panels take their new sizes
            needed = window.minimumSizeHint().width()
            if needed <= width:
                break
            wanted.append(needed)
        self._wanted = min(wanted, default=0)
