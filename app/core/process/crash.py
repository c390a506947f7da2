"""Logs uncaught exceptions and shows them in the banner, so that the window stays open."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from types import TracebackType

from PySide6.QtCore import QObject, QtMsgType, Signal, Slot, qInstallMessageHandler
from PySide6.QtGui import QGuiApplication

from app.core.notice import Notice
from app.core.translation import tr
from engine import error_line

log = logging.getLogger(__name__)
qt_log = logging.getLogger("qt")

LEVELS = {
    QtMsgType.QtDebugMsg: logging.DEBUG,
    QtMsgType.QtInfoMsg: logging.INFO,
    QtMsgType.QtWarningMsg: logging.WARNING,
    QtMsgType.QtCriticalMsg: logging.ERROR,
    QtMsgType.QtFatalMsg: logging.CRITICAL,
}


class CrashReporter(QObject):
    """Handler of uncaught exceptions on all threads, from `install` until `uninstall`."""

    noticed = Signal(object)  # Notice

    _crashed = Signal(str, str)  # one line, all lines

    def __init__(self, parent: QObject) -> None:
        super().__init__(parent)
        self._crashed.connect(self._say)

    def install(self) -> None:
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception
        qInstallMessageHandler(_on_qt_message)

    def uninstall(self) -> None:
        sys.excepthook = sys.__excepthook__
        threading.excepthook = threading.__excepthook__
        qInstallMessageHandler(None)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        log.error("a bug in the window", exc_info=(kind, error, trace))
        details = "".join(traceback.format_exception(kind, error, trace))
        self._crashed.emit(error_line(f"{kind.__name__}: {error}"), details)

    def _on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            self._on_exception(args.exc_type, args.exc_value, args.exc_traceback)

    @Slot(str, str)
    def _say(self, line: str, details: str) -> None:
        self.noticed.emit(
            Notice(
                tr("Something went wrong in the window ({line}).").format(line=line),
                tr("This is a bug in Tandem. Your chats are safe; you can go on."),
                "error",
                tr("Copy details"),
                lambda: QGuiApplication.clipboard().setText(details),
            )
        )


def _on_qt_message(kind: QtMsgType, context: object, message: str) -> None:
    qt_log.log(LEVELS.get(kind, logging.WARNING), "%s", message)
