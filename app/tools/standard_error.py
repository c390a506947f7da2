"""What a program writes to its standard error: into the log, and its last line for people."""

from __future__ import annotations

import logging
import os
import threading
from types import TracebackType
from typing import Final, TextIO

from engine import one_line

log = logging.getLogger(__name__)

MOST_LINE: Final = 4096
"""Bytes of a line that are looked at; what comes behind counts as another line."""

MOST_LOGGED: Final = 500
"""Number of lines of one run of a program that go to the log."""

LAST_S: Final = 0.5
"""Seconds in which the last lines of a program that has ended must have come."""


class StandardError:
    """A pipe for a program's standard error, read by a thread while it is open.

    Args:
        name: name of the server, for the log.

    Attributes:
        file: the end that the program writes to.
        last_line: last line that was not empty; "" for none.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.last_line = ""
        reading, writing = os.pipe()
        self.file: TextIO = open(writing, "w", encoding="utf-8")  # noqa: SIM115 closed in __exit__
        self._thread = threading.Thread(
            target=self._read, args=(reading,), name="tandem-tool-stderr", daemon=True
        )

    def __enter__(self) -> StandardError:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.file.close()
        self._thread.join(LAST_S)  # a program that it has left behind may hold the pipe longer

    def _read(self, reading: int) -> None:
        n_lines = 0
        with open(reading, "rb") as pipe:
            while data := pipe.readline(MOST_LINE):
                line = one_line(data.decode(errors="replace"), 1000)
                if not line:
                    continue
                self.last_line = line
                n_lines += 1
                if n_lines <= MOST_LOGGED:
                    log.debug("%s: %s", self._name, line)
