"""The log of the window, in a file of bounded size.

The engine's child writes to the window's log (`process.child`), so the file has both. No
chat's text is logged.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

MOST_BYTES: Final = 1 << 20
"""Size at which a file is set aside, in place of the one before, and a new one begun."""

FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


OWN: Final = ("app", "engine", "qt")
"""Loggers whose records are written from INFO on; those of libraries are from WARNING on, as some
of them log addresses and contents."""


class _BoundedFile(logging.FileHandler):
    """Handler that sets its file aside when it is full.

    The handler of `logging.handlers` would import pickle and sockets before the first picture.
    """

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        try:
            if self.stream is not None and self.stream.tell() >= MOST_BYTES:
                self.close()
                Path(self.baseFilename).replace(f"{self.baseFilename}.1")
        except OSError:  # Windows, where another program reads it: the next record tries again
            return

    def handleError(self, record: logging.LogRecord) -> None:
        """Leave a record out that the disk does not take; whoever needs the disk says so."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):  # as above: what was not written is tried again
            super().close()


class LogFile:
    """The file that records are written to, from `start` until `stop`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._added: list[logging.Handler] = []
        self._levels: dict[str, int] = {}

    def start(self) -> None:
        """Begin to write; where there is no such folder, nothing is written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handler = _BoundedFile(self.path, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            log.info("there is no log file: %s", error)
            return
        handler.setFormatter(logging.Formatter(FORMAT))
        root = logging.getLogger()
        if not root.handlers and logging.lastResort is not None:
            self._added.append(logging.lastResort)  # warnings go to the terminal as before
        self._added.append(handler)
        for added in self._added:
            root.addHandler(added)
        for name in OWN:
            self._levels[name] = logging.getLogger(name).level
            logging.getLogger(name).setLevel(logging.INFO)

    def stop(self) -> None:
        """Write no more."""
        for handler in self._added:
            logging.getLogger().removeHandler(handler)
            if isinstance(handler, _BoundedFile):
                handler.close()
        self._added.clear()
        for name, level in self._levels.items():
            logging.getLogger(name).setLevel(level)
        self._levels.clear()


def read_log(path: Path, most_bytes: int = MOST_BYTES) -> list[str]:
    """Return the last lines of the log, from the file before as well if this one is short."""
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
