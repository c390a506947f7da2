"""When chats are written: a step at once, growing text soon, and again after a failure.

One thread writes them all, so that no disk ever holds up the window.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from PySide6.QtCore import QObject, QTimer, Signal, Slot

from app.chat.conversation import Conversation
from app.chat.store import ChatConflict, ChatStore, ChatStoreError, DeletedFiles
from app.core.background import KeyedJobs
from app.core.notice import Notice
from app.core.translation import tr

log = logging.getLogger(__name__)

SOON_MS = 400  # text waits this long for more; with it and the write, no text is older than 1 s
RETRY_MS = 5000
FLUSH_S = 30.0  # how long a disk may take at the end


@dataclass(slots=True)
class DeletedChat:
    """A chat that was deleted, with what its files have held, once the thread has come to it."""

    chat_id: str
    files: DeletedFiles = field(default_factory=dict)


class ChatSaver(QObject):
    """The writing of chats to their store, on a thread of its own.

    What cannot be written stays in memory: one notice says so, and the saver tries again until all
    is written.
    """

    noticed = Signal(object)  # Notice
    conflicted = Signal(object)  # Conversation that got a new id, as another window had changed it
    written = Signal(str)  # id of a chat whose files have changed, or are gone
    not_deleted = Signal(str, object)  # id of a chat, Exception

    def __init__(self, store: ChatStore, parent: QObject) -> None:
        super().__init__(parent)
        self._store = store
        self._waiting: list[Conversation] = []
        self._unsaved: list[Conversation] = []
        self._soon = QTimer(self, singleShot=True, interval=SOON_MS)
        self._soon.timeout.connect(self._save_waiting)
        self._retry = QTimer(self, interval=RETRY_MS)
        self._retry.timeout.connect(self._save_unsaved)
        self._jobs = KeyedJobs("tandem-save", self)
        self._being_written: set[str] = set()  # ids
        self._n_awaited = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits to be written, but what could not be."""
        return not self._waiting and not self._jobs.is_busy

    def when_written(self, then: Callable[[], None]) -> None:
        """Call `then` once all that waits by now was written, as far as that is possible."""
        self._soon.stop()
        self._save_waiting()
        chat_ids = set(self._being_written)

        def tell() -> None:
            for chat_id in chat_ids & self._being_written:  # which are written once more
                self.written.emit(chat_id)
            then()

        self._n_awaited += 1  # a key of its own: a later job with the same would take its place
        self._jobs.run(f"after-{self._n_awaited}", lambda: None, lambda _: tell())

    def save(self, chat: Conversation) -> None:
        """Write a chat as it is now, as soon as the thread is free."""
        self._waiting = [other for other in self._waiting if other is not chat]
        self._write(chat, may_append=False)

    def save_soon(self, chat: Conversation) -> None:
        """Write what has changed in a chat within half a second."""
        if not any(other is chat for other in self._waiting):
            self._waiting.append(chat)
        if not self._soon.isActive():
            self._soon.start()

    def delete(self, chat_id: str) -> DeletedChat:
        """Delete a chat's files; `not_deleted` tells if they cannot be removed.

        What is not written of it is forgotten. `restore` brings the files back.
        """
        self._waiting = [chat for chat in self._waiting if chat.id != chat_id]
        self._unsaved = [chat for chat in self._unsaved if chat.id != chat_id]
        deleted = DeletedChat(chat_id)
        self._being_written.discard(chat_id)

        def work() -> None:
            deleted.files = self._store.delete(chat_id)

        self._jobs.run(chat_id, work, lambda error: self._on_deleted(chat_id, error))
        return deleted

    def restore(self, deleted: DeletedChat) -> None:
        """Write the files of a chat that was deleted."""
        self._jobs.run(
            f"restore {deleted.chat_id}",
            lambda: self._store.restore(deleted.files),
            lambda error: self._on_restored(deleted.chat_id, error),
        )

    def tidy(self) -> None:
        """Merge the journals of windows that were killed, and sweep what else they left."""
        self._jobs.run("", self._store.tidy, _log)

    def flush(self) -> None:
        """Wait until all is written, as far as that is possible."""
        self._soon.stop()
        self._save_waiting()
        self._save_unsaved()
        if not self._jobs.finish(FLUSH_S):
            log.warning("the disk took more than %.0f s: chats may be lost", FLUSH_S)

    def close(self) -> None:
        """Write what is not written, leave one file for each chat, and end the thread."""
        self.flush()
        self.tidy()
        self._jobs.close(FLUSH_S)
        self._soon.stop()
        self._retry.stop()

    def _write(self, chat: Conversation, *, may_append: bool) -> None:
        copy = chat.copy()
        self._being_written.add(copy.id)
        self._jobs.run(
            copy.id,
            lambda: self._store.save(copy, may_append=may_append),
            lambda error: self._on_written(chat, copy.id, error),
        )

    def _on_deleted(self, chat_id: str, error: Exception | None) -> None:
        if error is None:
            self.written.emit(chat_id)
        else:
            self.not_deleted.emit(chat_id, error)

    def _on_restored(self, chat_id: str, error: Exception | None) -> None:
        self.written.emit(chat_id)
        if error is not None:
            self.noticed.emit(Notice(str(error), kind="error"))

    def _on_written(self, chat: Conversation, chat_id: str, error: Exception | None) -> None:
        self._being_written.discard(chat_id)
        if error is None:
            self._forget(chat)
            self.written.emit(chat.id)
        elif isinstance(error, ChatConflict):
            chat.renew_id()
            kept = tr("Both versions are kept; this one is a new chat now.")
            text = f"{error} {kept}"
            self.noticed.emit(Notice(text))
            self.save(chat)
            self.conflicted.emit(chat)
        else:
            self._keep(chat, error)

    @Slot()
    def _save_waiting(self) -> None:
        chats, self._waiting = self._waiting, []
        for chat in chats:
            self._write(chat, may_append=True)

    @Slot()
    def _save_unsaved(self) -> None:
        for chat in list(self._unsaved):
            self.save(chat)

    def _keep(self, chat: Conversation, error: Exception) -> None:
        """Try again later; say so unless a chat is waiting already."""
        if not isinstance(error, ChatStoreError):
            log.error("a chat could not be saved", exc_info=error)
        if not self._unsaved:
            self.noticed.emit(Notice(str(error), kind="error"))
        if not any(other is chat for other in self._unsaved):
            self._unsaved.append(chat)
        self._retry.start()

    def _forget(self, chat: Conversation) -> None:
        """Note that a chat is written; say so if it is the last one that could not be."""
        if any(other is chat for other in self._unsaved):
            self._unsaved = [other for other in self._unsaved if other is not chat]
            if not self._unsaved:
                self._retry.stop()
                self.noticed.emit(Notice(tr("All chats are saved again.")))


def _log(error: Exception | None) -> None:
    if error is not None:
        log.error("the folder of the chats could not be tidied", exc_info=error)
