"""The application as Qt sees it: with a signal for files that macOS opens with it."""

from __future__ import annotations

import logging
import signal
import socket
from types import FrameType

from PySide6.QtCore import QEvent, QObject, QSocketNotifier, Signal, Slot
from PySide6.QtGui import QFileOpenEvent
from PySide6.QtWidgets import QApplication

from app.core.process.interruption import handle, restore
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


log = logging.getLogger(__name__)


class SignalWatch(QObject):
    """Watch for the signals that end a program, from `install` until `uninstall`."""

    came = Signal()

    def install(self) -> None:
        self._read_end, self._write_end = socket.socketpair()
        self._read_end.setblocking(False)
        self._write_end.setblocking(False)
        self._notifier = QSocketNotifier(self._read_end.fileno(), QSocketNotifier.Type.Read, self)
        self._notifier.activated.connect(self._read)
        self._former_fd = signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        self._former = handle(_go_on)

    def uninstall(self) -> None:
        restore(self._former)
        signal.set_wakeup_fd(self._former_fd)
        self._notifier.setEnabled(False)
        self._read_end.close()
        self._write_end.close()

    @Slot()
    def _read(self) -> None:
        names = [signal.Signals(number).name for number in self._read_end.recv(64)]
        log.info("the window closes for %s", ", ".join(names))
        self.came.emit()


def _go_on(number: int, frame: FrameType | None) -> None:
    """Leave a signal to the socket; more of them must not cut the closing short."""
