"""All chats of the folder: most are known by their summaries, whole ones once they are opened."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal, Slot

from app.chat.conversation import Conversation, DamagedChat
from app.chat.listing.summary import ChatSummary
from app.chat.saving import ChatSaver, DeletedChat
from app.chat.search.known import IndexedChat
from app.chat.store import UNREADABLE, ChatStore
from app.core.notice import Notice
from app.core.translation import tr, tr_n

if TYPE_CHECKING:
    from app.chat.pictures.folder import PictureFolder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Deletion:
    """A chat that was deleted, with what brings it back.

    Attributes:
        chat: the whole chat; None if it was not opened.
    """

    summary: ChatSummary
    chat: Conversation | None
    files: DeletedChat


class ChatLibrary(QObject):
    """The chats of a store, in one window.

    Args:
        known: returns chats as they were read some time, by their ids.

    Attributes:
        unread: ids of chats of which not even the summaries are known yet.
        damaged: files that cannot be read.
    """

    changed = Signal()
    written = Signal(str)  # id of a chat whose files have changed, or are gone
    noticed = Signal(object)  # Notice

    def __init__(
        self, store: ChatStore, known: Callable[[], Mapping[str, IndexedChat]], parent: QObject
    ) -> None:
        super().__init__(parent)
        self._store, self._known = store, known
        self._saver = ChatSaver(store, self)
        self._saver.noticed.connect(self.noticed)
        self._saver.written.connect(self.written)
        self._saver.conflicted.connect(self._rekey)
        self._saver.not_deleted.connect(self._on_not_deleted)
        self._whole: dict[str, Conversation] = {}
        self._summaries: dict[str, ChatSummary] = {}
        self._deletions: dict[str, Deletion] = {}
        self._gone: set[str] = set()  # ids of deleted chats, which a thread may still be reading
        self._n_damaged_untold = 0
        self.unread: set[str] = set()
        self.damaged: list[DamagedChat] = []

    @property
    def summaries(self) -> list[ChatSummary]:
        """Summaries of all chats as they are now."""
        whole = [ChatSummary.of(chat) for chat in self._whole.values()]
        return whole + [s for s in self._summaries.values() if s.id not in self._whole]

    def __contains__(self, chat_id: str) -> bool:
        return chat_id in self._whole or chat_id in self._summaries

    def start(self) -> None:
        """Look at what there is, without reading what is known."""
        survey = self._store.survey(self._known())
        self._whole = {chat.id: chat for chat in survey.chats}
        self._summaries = {summary.id: summary for summary in survey.summaries}
        self.unread, self.damaged = survey.unread, list(self._store.damaged)
        self._n_damaged_untold = len(self.damaged)
        self._tell_damaged()

    def opened(self, chat_id: str) -> Conversation | None:
        """Return a chat if it is whole already."""
        return self._whole.get(chat_id)

    def find(self, chat_id: str) -> Conversation | None:
        """Return a chat, read from the disk if need be; None if there is none that can be read."""
        whole = self._whole.get(chat_id)
        if whole is None and (chat_id in self._summaries or chat_id in self.unread):
            try:
                whole = self._store.read(chat_id)
            except UNREADABLE as error:
                log.info("chat %s cannot be opened: %s", chat_id, error)
                text = tr("This chat cannot be opened: its file is damaged or gone.")
                self.noticed.emit(Notice(text, kind="error"))
                return None
            self._whole[chat_id] = whole
            self.unread.discard(chat_id)
        return whole

    @property
    def pictures(self) -> PictureFolder:
        """The pictures of all chats."""
        return self._store.pictures

    @property
    def is_written(self) -> bool:
        """Whether all chats are on the disk, but those that could not be written."""
        return self._saver.is_idle

    def when_written(self, then: Callable[[], None]) -> None:
        """Call `then` once all that waits by now was written, as far as that is possible."""
        self._saver.when_written(then)

    def save(self, chat: Conversation) -> None:
        """Write a chat, a new one as well, as soon as the thread is free."""
        self._enlist(chat)
        self._saver.save(chat)

    def save_soon(self, chat: Conversation) -> None:
        """Write what has changed in a chat within half a second."""
        self._enlist(chat)
        self._saver.save_soon(chat)

    def delete(self, chat_ids: Iterable[str]) -> list[Deletion]:
        """Delete chats; return what `bring_back` needs until others are deleted."""
        self._deletions.clear()
        for chat_id in chat_ids:
            whole = self._whole.pop(chat_id, None)
            summary = self._summaries.pop(chat_id, None)
            if whole is not None:
                summary = ChatSummary.of(whole)
            if summary is not None:
                files = self._saver.delete(chat_id)
                self._deletions[chat_id] = Deletion(summary, whole, files)
                self._gone.add(chat_id)
        return list(self._deletions.values())

    def bring_back(self, deletions: Iterable[Deletion]) -> None:
        """Undo deletions."""
        for deletion in deletions:
            self._enlist_again(deletion)
            if deletion.chat is not None:
                self._saver.save(deletion.chat)
            else:
                self._saver.restore(deletion.files)
        self.changed.emit()

    @Slot(object, object)
    def take_read(self, summaries: Iterable[ChatSummary], damaged: Iterable[DamagedChat]) -> None:
        """Note what a thread has read."""
        for summary in summaries:
            self.unread.discard(summary.id)
            if summary.id not in self._gone:
                self._summaries[summary.id] = summary
        known = {file.path for file in self.damaged}
        for file in damaged:
            self.unread.discard(file.path.stem)
            if file.path not in known and file.path.stem not in self._whole:
                self._summaries.pop(file.path.stem, None)
                self.damaged.append(file)
                self._n_damaged_untold += 1
        self._tell_damaged()
        self.changed.emit()

    def tidy(self) -> None:
        """Merge the journals of windows that were killed, on a thread."""
        self._saver.tidy()

    def flush(self) -> None:
        """Wait until all that is to be saved is on the disk."""
        self._saver.flush()

    def close(self) -> None:
        """Write what is not written, and end the thread."""
        self._saver.close()

    def _enlist(self, chat: Conversation) -> None:
        if self._whole.get(chat.id) is not chat:
            self._whole[chat.id] = chat
            self._gone.discard(chat.id)
            self.changed.emit()

    def _enlist_again(self, deletion: Deletion) -> None:
        chat_id = deletion.summary.id
        self._gone.discard(chat_id)
        if deletion.chat is not None:
            self._whole[chat_id] = deletion.chat
        else:
            self._summaries[chat_id] = deletion.summary

    @Slot(object)
    def _rekey(self, chat: Conversation) -> None:
        """Note that a chat has another id now, as another window has written the old one."""
        self._whole = {one.id: one for one in self._whole.values()}
        self.changed.emit()

    @Slot(str, object)
    def _on_not_deleted(self, chat_id: str, error: Exception) -> None:
        if (deletion := self._deletions.get(chat_id)) is not None:
            self._enlist_again(deletion)
            self.changed.emit()
        self.noticed.emit(Notice(str(error), kind="error"))

    def _tell_damaged(self) -> None:
        """Say how many files cannot be read, once all were tried."""
        n = self._n_damaged_untold
        if self.unread or not n:
            return
        self._n_damaged_untold = 0
        text = tr_n(
            "{n} chat could not be read. Its file will stay unchanged.",
            "{n} chats could not be read. Their files will stay unchanged.",
            n,
        )
        hint = tr("Import a damaged file to get its whole messages back: it is in {folder}.")
        folder = self.damaged[-1].path.parent
        self.noticed.emit(Notice(text, hint.format(folder=folder)))
