"""The finder: searches chats and keeps their index up to date, on a thread of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from PySide6.QtCore import QObject, QTimer, Signal, Slot

from app.chat import chat_file
from app.chat.conversation import DamagedChat
from app.chat.listing.summary import ChatSummary
from app.chat.search.hits import Hit, read_hits
from app.chat.search.index import ChatIndex, IndexUnusableError
from app.chat.search.words import parse_words
from app.chat.stored import files_of, read_stored, stamps_key, stamps_or_none, why_unreadable
from app.core.background import KeyedJobs

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


@dataclass(slots=True, eq=False)
class _Reading:
    """Chats that are read, first only looked for, and what was found.

    Attributes:
        chat_ids: ids of the chats; those that are only looked for are added to them.
        is_index_lost: whether they could not be indexed, or compared with the index.
    """

    chat_ids: set[str]
    summaries: list[ChatSummary] = field(default_factory=list)
    damaged: list[DamagedChat] = field(default_factory=list)
    is_index_lost: bool = False


class ChatFinder(QObject):
    """Search over the chats of one folder.

    Args:
        path: file of the index.
    """

    found = Signal(str, object)  # what was typed, list of Hit
    read = Signal(object, object)  # lists of ChatSummary and DamagedChat: what has changed
    progressed = Signal(int)  # number of chats that are still to be read

    def __init__(self, folder: Path, path: Path, parent: QObject) -> None:
        super().__init__(parent)
        self._folder = folder
        self._index = ChatIndex(path)
        self._jobs = KeyedJobs("tandem-search", self)
        self._written: set[str] = set()  # waiting for a pause
        self._taken: set[str] = set()  # indexed by searches that have not ended
        self._waiting: set[str] = set()  # waiting for the thread
        self._n_tries = self._number = 0
        self._is_closed = self._is_reading = self._is_compared = False
        self._settle = QTimer(self, singleShot=True, interval=SETTLE_MS)
        self._settle.timeout.connect(self._read_written)

    @property
    def is_current(self) -> bool:
        """Whether all chats on the disk are indexed, but those that the next search indexes."""
        return self._is_compared and not self._is_reading and not self._waiting

    def start(self, wanted: Iterable[str] = ()) -> None:
        """Compare the index with the files of all chats, and read those that have changed.

        Args:
            wanted: ids of chats to be read even if they are in the index.
        """
        survey, self._is_compared = _Reading(set(wanted)), False
        self._jobs.run(
            "survey", lambda: self._survey(survey), lambda e: self._on_compared(survey, e)
        )

    @Slot(str)
    def note(self, chat_id: str) -> None:
        """Note that a chat was written or deleted; it is indexed when no more is written."""
        if not self._is_closed:
            self._written.add(chat_id)
            self._settle.start()

    def find(self, typed: str) -> None:
        """Search for what is typed; `found` reports the hits, unless another search follows."""
        if self._is_closed:
            return
        self._number += 1
        self._taken |= self._written  # with those of a search that this one takes the place of
        self._written = set()
        search = _Search(typed, self._number, set(self._taken))
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

    def _survey(self, survey: _Reading) -> None:
        """Add the chats that are not in the index as they are on the disk."""
        try:
            known = self._index.chats()
        except IndexUnusableError:
            survey.is_index_lost = True
            return
        files = {path.stem: path for path in files_of(self._folder, chat_file.SUFFIX)}
        survey.chat_ids.update(chat_id for chat_id in known if chat_id not in files)
        for chat_id, path in files.items():
            if chat_id not in known or known[chat_id].stamps != stamps_key(stamps_or_none(path)):
                survey.chat_ids.add(chat_id)

    def _read(self, reading: _Reading) -> None:
        """Read chats as they are on the disk now, and index them."""
        for chat_id in sorted(reading.chat_ids):
            path = self._folder / f"{chat_id}{chat_file.SUFFIX}"
            try:
                stored = read_stored(path)
            except (OSError, ValueError, RecursionError) as error:
                if not isinstance(error, FileNotFoundError):
                    reading.damaged.append(DamagedChat(path, why_unreadable(error)))
                self._change_index(reading, lambda: self._index.remove(chat_id))  # noqa: B023 now
                continue
            reading.summaries.append(ChatSummary.of(stored.chat))
            self._change_index(reading, lambda: self._index.put(stored.chat, stored.stamps))  # noqa: B023 now

    def _change_index(self, reading: _Reading, change: Callable[[], None]) -> None:
        if reading.is_index_lost or self._n_tries >= MOST_TRIES:
            return
        try:
            change()
        except IndexUnusableError:
            reading.is_index_lost = True

    def _find(self, search: _Search) -> None:
        words = parse_words(search.typed)
        if not words:
            return
        written = _Reading(search.written)
        self._read(written)
        try:
            search.hits = self._index.find(words)
        except IndexUnusableError:
            search.is_index_lost = True
            search.hits = read_hits(self._folder, words, lambda: self._number == search.number)

    # on the GUI thread

    def _on_found(self, search: _Search, error: Exception | None) -> None:
        if error is not None:
            log.error("a search has failed", exc_info=error)
        self._taken -= search.written
        if search.number == self._number:
            self.found.emit(search.typed, search.hits)
        if search.is_index_lost:
            self._make_anew()

    def _on_compared(self, survey: _Reading, error: Exception | None) -> None:
        self._is_compared = True
        self._add(survey, error)

    @Slot()
    def _read_written(self) -> None:
        written, self._written = self._written, set()
        self._add(_Reading(written), None)

    def _add(self, reading: _Reading, error: Exception | None) -> None:
        """Have chats read, batch by batch."""
        if error is not None:
            log.error("the chats could not be compared with their index", exc_info=error)
        self._waiting |= reading.chat_ids
        if reading.is_index_lost:
            self._make_anew()
        if not self._is_reading:
            self._read_next()

    def _read_next(self) -> None:
        self.progressed.emit(len(self._waiting))
        if not self._waiting or self._is_closed:
            return
        batch = _Reading({self._waiting.pop() for _ in range(min(BATCH, len(self._waiting)))})
        self._is_reading = True
        self._jobs.run("read", lambda: self._read(batch), lambda e: self._on_read(batch, e))

    def _on_read(self, batch: _Reading, error: Exception | None) -> None:
        self._is_reading = False
        if error is not None:
            log.error("chats could not be read for the search", exc_info=error)
        self.read.emit(batch.summaries, batch.damaged)
        if batch.is_index_lost:
            self._make_anew()
        self._read_next()

    def _make_anew(self) -> None:
        """Read all chats into a new index, but not for ever."""
        self._n_tries += 1
        if self._n_tries < MOST_TRIES and not self._is_closed:
            self.start()
