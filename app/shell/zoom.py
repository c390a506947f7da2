"""The zoom of the window: by keys, by the wheel over the chat, kept in the settings."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QObject, QSize, Qt, Slot
from PySide6.QtWidgets import QApplication, QDockWidget

from app.scale import px
from app.shell.main_window import MONITOR_HEIGHT, SIDEBAR_WIDTH, SPLIT_WIDTH, MainWindow

STEPS: Final = (70, 80, 90, 100, 110, 125, 150, 175, 200)
"""Percentages that the keys and the wheel go through; the settings page allows others."""


def next_zoom(percent: int, direction: int) -> int:
    """Return the next zoom in a direction: 1 larger, -1 smaller, 0 back to 100 %."""
    if direction > 0:
        return next((step for step in STEPS if step > percent), STEPS[-1])
    if direction < 0:
        return next((step for step in reversed(STEPS) if step < percent), STEPS[0])
    return 100


def room_on_screen(window: MainWindow) -> QSize:
    """Return the largest size of a window on its screen."""
    return window.screen().availableSize()


class DockFit(QObject):
    """What makes room for the panels on a small screen or at another zoom, and hides those without.

    The list of chats goes first if that is enough, then what is on the right: the chat itself
    stays. What was hidden comes back once there is room for it.
    """

    def __init__(self, window: MainWindow) -> None:
        super().__init__(window)
        self._window = window
        self._hidden: list[QDockWidget] = []

    @Slot()
    def fit_screen(self) -> None:
        """Hide the panels for which the screen has no room; the window may not be seen yet."""
        room = room_on_screen(self._window)
        if self._window.minimumSizeHint().width() > room.width():
            self.fit(self._window.size().boundedTo(room))

    @Slot(object)
    def make_way(self, opened: QDockWidget) -> None:
        """Hide the panels of the other side, if the screen has no room for one that was opened."""
        window, room, size = self._window, room_on_screen(self._window), self._window.size()
        QApplication.sendPostedEvents()  # the window takes its new least size
        if window.minimumSizeHint().width() <= room.width():
            return
        for dock in window.right_docks if opened is window.chats_dock else (window.chats_dock,):
            dock.hide()
        QApplication.sendPostedEvents()
        if not window.isMaximized():
            window.resize(size.boundedTo(room))

    def fit(self, size: QSize) -> None:
        """Lay the panels out anew in a window that keeps this size."""
        window = self._window
        docks = [window.chats_dock, *window.right_docks]
        shown = [dock for dock in docks if not dock.isHidden() or dock in self._hidden]
        chats = [dock for dock in shown if dock is window.chats_dock]
        right = [dock for dock in shown if dock is not window.chats_dock]
        for self._hidden in ([], chats, right, shown):
            for dock in shown:
                dock.setVisible(dock not in self._hidden)
            QApplication.sendPostedEvents()  # the panels take their new sizes
            if window.minimumSizeHint().width() <= size.width():
                break
        if not window.isMaximized():
            window.resize(size)
        widths = [px(SIDEBAR_WIDTH), *(px(SPLIT_WIDTH) for _ in window.right_docks)]
        window.resizeDocks(docks, widths, Qt.Orientation.Horizontal)
        height = min(px(MONITOR_HEIGHT), size.height() // 3)
        window.resizeDocks([window.monitor_dock], [height], Qt.Orientation.Vertical)
