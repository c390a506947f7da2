"""When chats are written: at once after a step, soon while text comes, again after a failure."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from PySide6.QtCore import QObject, QTimer, Signal, Slot

from app.background import LatestJob
from app.chat.conversation import Conversation
from app.chat.store import ChatConflict, ChatStore, ChatStoreError
from app.notice import Notice

SOON_MS = 400  # text waits this long for more; with it and the write, no text is older than 1 s
RETRY_MS = 5000


class ChatSaver(QObject):
    """The writing of chats to their store, on this thread or another, but never on both.

    What cannot be written stays in memory: one notice says so, and the saver tries again until all
    is written.
    """

    noticed = Signal(object)  # Notice
    conflicted = Signal(object)  # Conversation that got a new id, as another window had changed it

    def __init__(self, store: ChatStore, parent: QObject) -> None:
        super().__init__(parent)
        self._store = store
        self._waiting: list[Conversation] = []
        self._in_flight: list[Conversation] = []
        self._unsaved: list[Conversation] = []
        self._writing = threading.Lock()
        self._number = 0  # of the last write on this thread; copies from before it are stale
        self._soon = QTimer(self, singleShot=True, interval=SOON_MS)
        self._soon.timeout.connect(self._save_waiting)
        self._retry = QTimer(self, interval=RETRY_MS)
        self._retry.timeout.connect(self._save_unsaved)
        self._job = LatestJob("tandem-save", self)
        self._job.done.connect(self._on_done)

    def save(self, chat: Conversation) -> None:
        """Write a chat now."""
        self._settle()
        try:
            self._store.save(chat)
        except ChatConflict as conflict:
            chat.renew_id()
            text = f"{conflict} Both versions are kept; this one is a new chat now."
            self.noticed.emit(Notice(text))
            self.save(chat)
            self.conflicted.emit(chat)
        except ChatStoreError as error:
            self._keep(chat, error)
        else:
            self._forget(chat)

    def save_soon(self, chat: Conversation) -> None:
        """Write a chat within half a second, without holding up this thread."""
        if chat not in self._waiting:
            self._waiting.append(chat)
        if not self._soon.isActive():
            self._soon.start()

    def delete(self, chat: Conversation) -> None:
        """Delete a chat's file.

        Raises:
            ChatStoreError: it cannot be removed.
        """
        self._settle()
        self._store.delete(chat.id)
        self._waiting = [other for other in self._waiting if other is not chat]
        self._unsaved = [other for other in self._unsaved if other is not chat]

    def close(self) -> None:
        """Write what is not written, as far as that is possible, and end the thread."""
        self._settle()
        for chat in [*self._waiting, *self._unsaved]:
            self.save(chat)
        self._soon.stop()
        self._retry.stop()
        self._job.close()

    def _settle(self) -> None:
        """Wait for the other thread's write, and have it begin none with an older copy."""
        with self._writing:
            self._number += 1
        self._job.drop()
        unfinished, self._in_flight = self._in_flight, []
        for chat in unfinished:  # perhaps written; then the store writes nothing
            self.save_soon(chat)

    @Slot()
    def _save_waiting(self) -> None:
        if self._in_flight:  # the disk is slow
            self._soon.start()
            return
        self._in_flight, self._waiting = self._waiting, []
        copies, number = [chat.copy() for chat in self._in_flight], self._number
        self._job.run(lambda: self._write(copies, number))

    def _write(self, copies: Sequence[Conversation], number: int) -> bool:
        """Write copies of chats, on another thread; return whether that went well."""
        with self._writing:
            if number != self._number:
                return False
            try:
                for chat in copies:
                    self._store.save(chat)
            except ChatStoreError:
                return False
        return True

    @Slot(object)
    def _on_done(self, is_written: bool) -> None:
        chats, self._in_flight = self._in_flight, []
        for chat in chats:
            if is_written:
                self._forget(chat)
            else:
                self.save(chat)  # fails again, and says why

    @Slot()
    def _save_unsaved(self) -> None:
        for chat in list(self._unsaved):
            self.save(chat)

    def _keep(self, chat: Conversation, error: ChatStoreError) -> None:
        """Try again later; say so unless a chat is waiting already."""
        if not self._unsaved:
            self.noticed.emit(Notice(str(error), kind="error"))
        if chat not in self._unsaved:
            self._unsaved.append(chat)
        self._retry.start()

    def _forget(self, chat: Conversation) -> None:
        """Note that a chat is written; say so if it is the last one that could not be."""
        if chat in self._unsaved:
            self._unsaved.remove(chat)
            if not self._unsaved:
                self._retry.stop()
                self.noticed.emit(Notice("All chats are saved again."))
