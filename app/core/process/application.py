"""The application as Qt sees it: with a signal for files that macOS opens with it."""

from __future__ import annotations

from PySide6.QtCore import QEvent, Signal
from PySide6.QtGui import QFileOpenEvent
from PySide6.QtWidgets import QApplication

from app.core.process.single_window import OpenRequest


class Application(QApplication):
    """The application.

    On macOS a double-click on a model, and one that is dropped on the Dock's icon, reaches the
    running program as an event rather than in the arguments of a start.
    """

    opened = Signal(object)  # OpenRequest

    def event(self, event: QEvent) -> bool:
        if isinstance(event, QFileOpenEvent) and event.file():
            self.opened.emit(OpenRequest(event.file()))
            return True
        return super().event(event)
