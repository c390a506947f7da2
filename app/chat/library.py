"""A window's chats: all summaries, and the full chats that have been opened.

A thread writes chats, so a slow disk never blocks the window. Changes are written immediately, and
growing text after a short delay. If a write fails, the chat stays in memory for a retry.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from PySide6.QtCore import QObject, QTimer, Signal, Slot

from app.chat.conversation import ChatSummary, Conversation, DamagedChat
from app.chat.store import UNREADABLE, ChatConflict, ChatStore, ChatStoreError, DeletedRows, Survey
from app.core.background import KeyedJobs
from app.core.notice import Notice
from app.core.translation import tr, tr_n

log = logging.getLogger(__name__)

SOON_MS = 400  # delay before growing text is written, so that a crash loses less than 1 s of it
RETRY_MS = 5000
FLUSH_S = 30.0  # timeout for the last writes

BATCH: Final = 8
"""Number of old chats imported at a time; writes wait for each batch."""


@dataclass(slots=True)
class Deletion:
    """A deleted chat, with the data needed to restore it.

    Attributes:
        chat: the full chat; None if it had not been opened.
        rows: its rows in the store, filled in by the thread.
    """

    summary: ChatSummary
    chat: Conversation | None
    rows: DeletedRows = field(default_factory=dict)


class ChatLibrary(QObject):
    """The chats in a store, as one window sees them.

    Attributes:
        unread: ids of old chats still to be imported.
        damaged: unreadable files.
    """

    changed = Signal()
    all_read = Signal()  # the last old chat has been imported
    written = Signal()  # chats have been written or deleted
    noticed = Signal(object)  # Notice

    def __init__(self, store: ChatStore, parent: QObject) -> None:
        super().__init__(parent)
        self.store = store
        self._whole: dict[str, Conversation] = {}
        self._summaries: dict[str, ChatSummary] = {}
        self._deletions: dict[str, Deletion] = {}
        self._gone: set[str] = set()  # ids of deleted chats that a thread may still be reading
        self._n_damaged_unreported = self._n_awaited = 0
        self._is_reading = self._is_flushing = False
        self.unread: set[str] = set()
        self.damaged: list[DamagedChat] = []
        self._waiting: list[Conversation] = []
        self._unsaved: list[Conversation] = []
        self._soon = QTimer(self, singleShot=True, interval=SOON_MS)
        self._soon.timeout.connect(self._save_waiting)
        self._retry = QTimer(self, interval=RETRY_MS)
        self._retry.timeout.connect(self._save_unsaved)
        self._jobs = KeyedJobs("tandem-save", self)

    @property
    def summaries(self) -> list[ChatSummary]:
        """Current summaries of all chats."""
        whole = [ChatSummary.of(chat) for chat in self._whole.values()]
        return whole + [s for s in self._summaries.values() if s.id not in self._whole]

    def __contains__(self, chat_id: str) -> bool:
        return chat_id in self._whole or chat_id in self._summaries

    def start(self) -> None:
        """Read the summaries."""
        survey = self.store.survey()
        self.unread = survey.unread
        self._take(survey)

    def go_on(self) -> None:
        """Import the remaining old chats, and clean up after killed windows."""
        self._jobs.run("tidy", self.store.tidy, _log)
        self._read_next()

    def look_again(self) -> None:
        """Add chats that other windows have written."""
        with suppress(*UNREADABLE):
            self._take(Survey(self.store.summaries()))

    def opened(self, chat_id: str) -> Conversation | None:
        """Return a chat if it has been opened, else None."""
        return self._whole.get(chat_id)

    def find(self, chat_id: str) -> Conversation | None:
        """Return a chat, reading it from disk if necessary; None if it is missing or unreadable."""
        if chat_id in self.unread:
            self.unread.discard(chat_id)
            self._take(self.store.bring_in([chat_id]))
        whole = self._whole.get(chat_id)
        if whole is None and chat_id in self._summaries:
            try:
                whole = self.store.read(chat_id)
            except UNREADABLE as error:
                log.info("chat %s cannot be opened: %s", chat_id, error)
                text = tr("This chat cannot be opened: its file is damaged or missing.")
                self.noticed.emit(Notice(text, kind="error"))
                return None
            self._whole[chat_id] = whole
        return whole

    def _read_next(self) -> None:
        self._is_reading = bool(self.unread)
        if self._is_flushing or not self.unread:
            return
        batch, found = sorted(self.unread)[:BATCH], Survey()

        def work() -> None:
            survey = self.store.bring_in(batch)
            found.summaries, found.damaged = survey.summaries, survey.damaged

        def then(error: Exception | None) -> None:
            _log(error)
            self.unread.difference_update(batch)
            self._take(found)
            self.written.emit()
            self._read_next()
            if not self.unread:
                self.all_read.emit()

        self._jobs.run("import", work, then)

    def _take(self, survey: Survey) -> None:
        for summary in survey.summaries:
            if summary.id not in self._gone:
                self._summaries[summary.id] = summary
        known = {file.path for file in self.damaged}
        damaged = [file for file in survey.damaged if file.path not in known]
        self.damaged += damaged
        self._n_damaged_unreported += len(damaged)
        self._report_damaged()
        self.changed.emit()

    def _report_damaged(self) -> None:
        n = self._n_damaged_unreported
        if self.unread or not n:
            return
        self._n_damaged_unreported = 0
        text = tr_n(
            "{n} chat could not be read. Its file will stay unchanged.",
            "{n} chats could not be read. Their files will stay unchanged.",
            n,
        )
        hint = tr("Import a damaged file to recover its intact messages. Folder: {folder}")
        folder = self.damaged[-1].path.parent
        self.noticed.emit(Notice(text, hint.format(folder=folder)))

    @property
    def is_written(self) -> bool:
        """Whether no write is pending; failed writes do not count."""
        return not self._waiting and not self._jobs.is_busy

    def when_written(self, then: Callable[[], None]) -> None:
        """Call `then` after all pending writes have been attempted."""
        self._soon.stop()
        self._save_waiting()
        self._n_awaited += 1  # a later job with the same key would replace this one
        self._jobs.run(f"after-{self._n_awaited}", lambda: None, lambda _: then())

    def save(self, chat: Conversation) -> None:
        """Write a new or known chat as soon as the thread is free."""
        self._enlist(chat)
        self._waiting = [other for other in self._waiting if other is not chat]
        self._write(chat)

    def save_soon(self, chat: Conversation) -> None:
        """Write a chat's changes within half a second."""
        self._enlist(chat)
        if not any(other is chat for other in self._waiting):
            self._waiting.append(chat)
        if not self._soon.isActive():
            self._soon.start()

    def flush(self) -> None:
        """Wait until everything is written, but at most `FLUSH_S`."""
        self._soon.stop()
        self._save_waiting()
        self._save_unsaved()
        self._is_flushing = True  # postpone importing old chats
        if not self._jobs.finish(FLUSH_S):
            log.warning("the disk took more than %.0f s, so chats may be lost", FLUSH_S)
        self._is_flushing = False
        if self._is_reading:
            self._read_next()

    def close(self) -> None:
        """Write all changes, and stop the thread."""
        self.unread.clear()  # the next start imports them
        self.flush()
        self._jobs.run("tidy", self.store.tidy, _log)
        self._jobs.close(FLUSH_S)
        self._soon.stop()
        self._retry.stop()
        self.store.database.close()

    def _enlist(self, chat: Conversation) -> None:
        if self._whole.get(chat.id) is not chat:
            self._whole[chat.id] = chat
            self._gone.discard(chat.id)
            self.changed.emit()

    def _write(self, chat: Conversation) -> None:
        copy = chat.copy()
        self._jobs.run(
            copy.id, lambda: self.store.save(copy), lambda error: self._on_written(chat, error)
        )

    @Slot()
    def _save_waiting(self) -> None:
        chats, self._waiting = self._waiting, []
        for chat in chats:
            self._write(chat)

    @Slot()
    def _save_unsaved(self) -> None:
        for chat in list(self._unsaved):
            self.save(chat)

    def _on_written(self, chat: Conversation, error: Exception | None) -> None:
        if self.store.database.set_aside:
            self._take(Survey(damaged=self.store.set_aside()))
        if error is None:
            self._forget_unsaved(chat)
            self.written.emit()
        elif isinstance(error, ChatConflict):
            chat.renew_id()
            kept = tr("Both versions are kept; this one is now a new chat.")
            self.noticed.emit(Notice(f"{error} {kept}"))
            self._whole = {one.id: one for one in self._whole.values()}
            self.save(chat)
            self.changed.emit()
        else:
            self._keep_unsaved(chat, error)

    def _keep_unsaved(self, chat: Conversation, error: Exception) -> None:
        if not isinstance(error, ChatStoreError):
            log.error("a chat could not be saved", exc_info=error)
        if not self._unsaved:
            self.noticed.emit(Notice(str(error), kind="error"))
        if not any(other is chat for other in self._unsaved):
            self._unsaved.append(chat)
        self._retry.start()

    def _forget_unsaved(self, chat: Conversation) -> None:
        if any(other is chat for other in self._unsaved):
            self._unsaved = [other for other in self._unsaved if other is not chat]
            if not self._unsaved:
                self._retry.stop()
                self.noticed.emit(Notice(tr("All chats are now saved.")))

    def delete(self, chat_ids: Iterable[str]) -> list[Deletion]:
        """Delete chats; until the next deletion, `bring_back` can restore them from the result."""
        self._deletions.clear()
        for chat_id in chat_ids:
            whole = self._whole.pop(chat_id, None)
            summary = self._summaries.pop(chat_id, None)
            if whole is not None:
                summary = ChatSummary.of(whole)
            if summary is not None:
                self._waiting = [chat for chat in self._waiting if chat.id != chat_id]
                self._unsaved = [chat for chat in self._unsaved if chat.id != chat_id]
                self._deletions[chat_id] = deletion = Deletion(summary, whole)
                self._gone.add(chat_id)
                self._delete(deletion)
        return list(self._deletions.values())

    def bring_back(self, deletions: Iterable[Deletion]) -> None:
        """Undo deletions."""
        for deletion in deletions:
            self._enlist_again(deletion)
            if deletion.chat is not None:
                self.save(deletion.chat)
            else:
                self._restore(deletion)
        self.changed.emit()

    def _delete(self, deletion: Deletion) -> None:
        chat_id = deletion.summary.id

        def work() -> None:
            deletion.rows = self.store.delete(chat_id)

        def then(error: Exception | None) -> None:
            if error is None:
                self.written.emit()
                return
            if (found := self._deletions.get(chat_id)) is not None:
                self._enlist_again(found)
                self.changed.emit()
            self.noticed.emit(Notice(str(error), kind="error"))

        self._jobs.run(chat_id, work, then)

    def _restore(self, deletion: Deletion) -> None:
        def then(error: Exception | None) -> None:
            self.written.emit()
            if error is not None:
                self.noticed.emit(Notice(str(error), kind="error"))

        # with the chat's id as key, this would replace the job that fills `rows`
        key = f"restore {deletion.summary.id}"
        self._jobs.run(key, lambda: self.store.restore(deletion.rows), then)

    def _enlist_again(self, deletion: Deletion) -> None:
        chat_id = deletion.summary.id
        self._gone.discard(chat_id)
        if deletion.chat is not None:
            self._whole[chat_id] = deletion.chat
        else:
            self._summaries[chat_id] = deletion.summary


def _log(error: Exception | None) -> None:
    if error is not None:
        log.error("the chats' folder could not be cleaned up", exc_info=error)
