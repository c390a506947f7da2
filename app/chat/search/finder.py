"""The finder: searches chats and keeps their index up to date, on a thread of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from PySide6.QtCore import QObject, QTimer, Signal, Slot

from app.background import KeyedJobs
from app.chat import chat_file
from app.chat.search.hits import Hit, read_hits
from app.chat.search.index import ChatIndex, IndexUnusableError, stamps_key
from app.chat.search.words import parse_words
from app.chat.stored import files_of, read_stored, stamps_of

log = logging.getLogger(__name__)

SETTLE_MS: Final = 2000
"""Time without a write, in milliseconds, after which the chats that were written are indexed."""

BATCH: Final = 8
"""Number of chats that are indexed in one go; a search waits for no more than these."""

MOST_TRIES: Final = 3
"""Number of times that the index is made anew in one session; after that, chats are read."""


@dataclass(slots=True, eq=False)
class _Search:
    """A search and its hits.

    Attributes:
        written: ids of chats that are indexed before.
        is_index_lost: whether all chats were read instead.
    """

    typed: str
    number: int
    written: set[str]
    hits: list[Hit] = field(default_factory=list)
    is_index_lost: bool = False


class ChatFinder(QObject):
    """Search over the chats of one folder.

    Args:
        path: file of the index.
    """

    found = Signal(str, object)  # what was typed, list of Hit
    progressed = Signal(int)  # number of chats that are still to be read into the index

    def __init__(self, folder: Path, path: Path, parent: QObject) -> None:
        super().__init__(parent)
        self._folder = folder
        self._index = ChatIndex(path)
        self._jobs = KeyedJobs("tandem-search", self)
        self._written: set[str] = set()  # waiting for a pause
        self._waiting: set[str] = set()  # waiting for the thread
        self._n_tries = self._number = 0
        self._is_closed = self._is_indexing = False
        self._settle = QTimer(self, singleShot=True, interval=SETTLE_MS)
        self._settle.timeout.connect(self._index_written)

    @property
    def n_waiting(self) -> int:
        """Number of chats that are still to be read into the index."""
        return len(self._waiting)

    @Slot()
    def start(self) -> None:
        """Compare the index with the files of all chats, and read what has changed."""
        changed: set[str] = set()
        self._jobs.run(
            "survey", lambda: changed.update(self._survey()), lambda e: self._add(changed, e)
        )

    @Slot(str)
    def note(self, chat_id: str) -> None:
        """Note that a chat was written or deleted; it is indexed when no more is written."""
        self._written.add(chat_id)
        self._settle.start()

    def find(self, typed: str) -> None:
        """Search for what is typed; `found` reports the hits, unless another search follows."""
        self._number += 1
        search = _Search(typed, self._number, self._written)
        self._written = set()
        self._jobs.run("find", lambda: self._find(search), lambda e: self._on_found(search, e))

    def drop(self) -> None:
        """Report no hits of any search so far."""
        self._number += 1

    def close(self) -> None:
        """End the thread; what is not indexed is noticed at the next start."""
        self._is_closed = True
        self.drop()
        self._settle.stop()
        self._jobs.close()
        self._index.close()

    # on the thread

    def _survey(self) -> set[str]:
        """Return the ids of the chats that are not in the index as they are on the disk."""
        known = self._index.chats()
        files = {path.stem: path for path in files_of(self._folder, chat_file.SUFFIX)}
        return {chat_id for chat_id in known if chat_id not in files} | {
            chat_id
            for chat_id, path in files.items()
            if chat_id not in known or known[chat_id].stamps != stamps_key(stamps_of(path))
        }

    def _put_all(self, chat_ids: Iterable[str]) -> None:
        for chat_id in chat_ids:
            self._put(chat_id)

    def _put(self, chat_id: str) -> None:
        """Index a chat as it is on the disk now."""
        path = self._folder / f"{chat_id}{chat_file.SUFFIX}"
        for _ in range(3):  # another window may write it meanwhile
            try:
                stored = read_stored(path)
            except (OSError, ValueError, RecursionError):
                self._index.remove(chat_id)
                return
            if stored.chat.id != chat_id:  # the list has it among the damaged ones
                return
            self._index.put(stored.chat, stored.stamps)
            if stamps_of(path) == stored.stamps:
                return

    def _find(self, search: _Search) -> None:
        words = parse_words(search.typed)
        if not words:
            return
        try:
            self._put_all(search.written)
            search.hits = self._index.find(words)
        except IndexUnusableError:
            search.is_index_lost = True
            search.hits = read_hits(self._folder, words, lambda: self._number == search.number)

    # on the GUI thread

    def _on_found(self, search: _Search, error: Exception | None) -> None:
        if error is not None:
            log.error("a search has failed", exc_info=error)
        if search.number == self._number:
            self.found.emit(search.typed, search.hits)
        if search.is_index_lost:
            self._make_anew()

    @Slot()
    def _index_written(self) -> None:
        written, self._written = self._written, set()
        self._add(written, None)

    def _add(self, chat_ids: set[str], error: Exception | None) -> None:
        """Have chats indexed, batch by batch."""
        if error is not None:
            self._on_failed(error)
            return
        self._waiting |= chat_ids
        if not self._is_indexing:
            self._index_next()

    def _index_next(self) -> None:
        self.progressed.emit(self.n_waiting)
        if not self._waiting or self._is_closed:
            return
        batch = [self._waiting.pop() for _ in range(min(BATCH, len(self._waiting)))]
        self._is_indexing = True
        self._jobs.run("index", lambda: self._put_all(batch), self._on_indexed)

    def _on_indexed(self, error: Exception | None) -> None:
        self._is_indexing = False
        if error is None:
            self._index_next()
        else:
            self._on_failed(error)

    def _on_failed(self, error: Exception) -> None:
        if not isinstance(error, IndexUnusableError):
            log.error("the chats could not be indexed", exc_info=error)
        self._make_anew()

    def _make_anew(self) -> None:
        """Read all chats into a new index, but not for ever."""
        self._waiting.clear()
        self._n_tries += 1
        if self._n_tries < MOST_TRIES and not self._is_closed:
            self.start()
