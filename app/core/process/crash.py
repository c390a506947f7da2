"""Logging, and banners that report uncaught exceptions while the window stays open."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

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
    """Excepthook for all threads between `install` and `uninstall`."""

    noticed = Signal(object)  # Notice

    _crashed = Signal(str, str)  # one-line summary, full traceback

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
        log.error("uncaught exception", exc_info=(kind, error, trace))
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
                tr("This is a bug in Tandem. Your chats are safe; you can continue."),
                "error",
                tr("Copy details"),
                lambda: QGuiApplication.clipboard().setText(details),
            )
        )


def _on_qt_message(kind: QtMsgType, context: object, message: str) -> None:
    qt_log.log(LEVELS.get(kind, logging.WARNING), "%s", message)


MAX_BYTES: Final = 1 << 20  # size at which the log is rotated; one old file is kept
FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


OWN: Final = ("app", "engine", "qt")
"""Loggers that log from INFO on; all others start at WARNING, as some log URLs and contents."""


class _BoundedFile(logging.FileHandler):
    """Rotating file handler; `logging.handlers` would import pickle and sockets at start-up."""

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        try:
            if self.stream is not None and self.stream.tell() >= MAX_BYTES:
                self.close()
                Path(self.baseFilename).replace(f"{self.baseFilename}.1")
        except OSError:  # on Windows if another program is reading it; the next record retries
            return

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop records that cannot be written; code that needs the disk reports errors itself."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class LogFile:
    """The log file, which is written between `start` and `stop`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._added: list[logging.Handler] = []
        self._levels: dict[str, int] = {}

    def start(self) -> None:
        """Start logging, or do nothing if the folder cannot be created."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handler = _BoundedFile(self.path, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            log.info("cannot create a log file: %s", error)
            return
        handler.setFormatter(logging.Formatter(FORMAT))
        root = logging.getLogger()
        if not root.handlers and logging.lastResort is not None:
            self._added.append(logging.lastResort)  # keep warnings on the terminal
        self._added.append(handler)
        for added in self._added:
            root.addHandler(added)
        for name in OWN:
            self._levels[name] = logging.getLogger(name).level
            logging.getLogger(name).setLevel(logging.INFO)

    def stop(self) -> None:
        for handler in self._added:
            logging.getLogger().removeHandler(handler)
            if isinstance(handler, _BoundedFile):
                handler.close()
        self._added.clear()
        for name, level in self._levels.items():
            logging.getLogger(name).setLevel(level)
        self._levels.clear()


def read_log(path: Path, most_bytes: int = MAX_BYTES) -> list[str]:
    """Return the last lines of the log, including the rotated file if needed."""
    parts: list[bytes] = []
    room = most_bytes
    for file in (path, path.with_name(f"{path.name}.1")):
        try:
            data = file.read_bytes()[-room:] if room else b""
        except OSError:
            continue
        parts.insert(0, data)
        room -= len(data)
    return b"".join(parts).decode("utf-8", errors="replace").splitlines()
