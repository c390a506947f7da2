"""The finder: searches chats and keeps what a search looks at up to date, on a thread."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Final

from PySide6.QtCore import QObject, QTimer, Signal, Slot

from app.chat.database import ChatDatabase
from app.chat.search.index import Hit, find_hits, index_some
from app.chat.search.words import parse_words
from app.core.background import KeyedJobs

log = logging.getLogger(__name__)

SETTLE_MS: Final = 2000
"""Time without a write, in milliseconds, after which what was written is indexed."""

N_BATCHES: Final = 8
"""Number of times that some messages are indexed before a search, which waits for no more."""


@dataclass(slots=True, eq=False)
class _Search:
    """A search and its hits."""

    typed: str
    number: int
    hits: list[Hit] = field(default_factory=list)


class ChatFinder(QObject):
    """Search over all chats of a database."""

    found = Signal(str, object)  # what was typed, list of Hit
    indexed = Signal()  # all that was written

    def __init__(self, database: ChatDatabase, parent: QObject) -> None:
        super().__init__(parent)
        self._database = database
        self._jobs = KeyedJobs("tandem-search", self)
        self._number = 0
        self._is_closed = self._is_indexed = False
        self._settle = QTimer(self, singleShot=True, interval=SETTLE_MS)
        self._settle.timeout.connect(self.start)

    @property
    def is_current(self) -> bool:
        """Whether all chats are indexed, but for what the next search indexes."""
        return self._is_indexed

    @Slot()
    def start(self) -> None:
        """Index what was written and is not indexed."""
        n_left = 0

        def work() -> None:
            nonlocal n_left
            n_left = self._database.write(index_some)

        def then(error: Exception | None) -> None:
            if error is not None:  # a full disk; the next write tries again
                log.info("the chats cannot be indexed: %s", error)
            elif n_left and not self._is_closed:
                self.start()
                return
            self._is_indexed = True
            self.indexed.emit()

        if self._database.path.exists():
            self._jobs.run("index", work, then)
        else:
            self._is_indexed = True

    @Slot()
    def note(self) -> None:
        """Note that chats were written or deleted; they are indexed when no more are."""
        if not self._is_closed:
            self._settle.start()

    def find(self, typed: str) -> None:
        """Search for what is typed; `found` reports the hits, unless another search follows."""
        if self._is_closed:
            return
        self._number += 1
        search = _Search(typed, self._number)
        self._jobs.run("find", lambda: self._find(search), lambda e: self._on_found(search, e))

    def drop(self) -> None:
        """Report no hits of any search so far."""
        self._number += 1

    def close(self) -> None:
        """End the thread; what is not indexed is at the next start."""
        self._is_closed = True
        self.drop()
        self._settle.stop()
        self._jobs.close()

    def _find(self, search: _Search) -> None:
        """Search, on the thread, also in what was written a moment ago."""
        words = parse_words(search.typed)
        if not words:
            return
        try:
            for _ in range(N_BATCHES if self._database.path.exists() else 0):
                if not self._database.write(index_some):
                    break
        except OSError as error:  # a full disk, or a folder that cannot be written
            log.info("the chats cannot be indexed: %s", error)
        search.hits = self._database.read(lambda file: find_hits(file, words))

    def _on_found(self, search: _Search, error: Exception | None) -> None:
        if error is not None:
            log.error("a search has failed", exc_info=error)
        if search.number == self._number:
            self.found.emit(search.typed, search.hits)
