"""What a person can do with the messages of a chat, besides asking: change, delete, fork."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QObject, Signal, Slot

from app.chat.branches.tree import Removed
from app.chat.conversation import Conversation
from app.chat.message import Message, with_answer
from app.chat.session import ChatSession
from app.core.notice import Notice
from app.core.translation import tr, tr_n


class BranchSteps(QObject):
    """Changes of the open chat's messages; all but a fork can be undone by a notice's button."""

    noticed = Signal(object)  # Notice

    def __init__(self, session: ChatSession, parent: QObject) -> None:
        super().__init__(parent)
        self._session = session

    @Slot(int, str)
    def edit_answer(self, message_id: int, text: str) -> None:
        """Change the text of an answer in its place, so that what follows stays."""
        chat = self._session.current
        message = chat.tree.get(message_id)
        if message is None or self._session.is_writing(message):
            return
        before, was_edited = message.content, message.edited
        after = with_answer(before, text.strip())
        if after == before or not text.strip():
            return

        def write(content: str, *, edited: bool) -> None:
            message.content, message.edited = content, edited
            self._session.keep(chat)
            if self._session.current is chat:
                self._session.message_changed.emit(message_id)

        def undo() -> None:
            is_kept = self._session.find(chat.id) is chat and chat.tree.get(message_id) is message
            if is_kept and message.content == after:
                write(before, edited=was_edited)

        write(after, edited=True)
        self._offer_undo(tr("The answer has your text now."), undo)

    @Slot(int)
    def delete_message(self, message_id: int) -> None:
        """Delete one message; what follows it stays."""
        chat = self._session.current
        if message_id in chat.tree:
            self._session.end_answer([chat.tree[message_id]])
            removed = chat.tree.remove(message_id)
            self._tell_removed(chat, removed, tr("The message was deleted."))

    @Slot(int)
    def delete_branch(self, message_id: int) -> None:
        """Delete a message and all that follows it, in every version."""
        chat = self._session.current
        if message_id in chat.tree:
            self._session.end_answer(chat.tree.branch(message_id))
            removed = chat.tree.remove_branch(message_id)
            n = len(removed.nodes)
            self._tell_removed(
                chat, removed, tr_n("{n} message was deleted.", "{n} messages were deleted.", n)
            )

    @Slot(int)
    def fork(self, message_id: int) -> None:
        """Open a new chat with the messages up to this one."""
        chat = self._session.current
        if message_id in chat.tree:
            made = chat.fork(message_id)
            made.title = tr("{title} (fork)").format(title=chat.shown_title)
            self._session.take(made)

    def _tell_removed(self, chat: Conversation, removed: Removed[Message], sentence: str) -> None:
        """Show and save a chat without what was removed, and offer to bring that back."""

        def undo() -> None:
            if self._session.find(chat.id) is chat:
                chat.tree.restore(removed)
                self._session.keep(chat)
                self._session.path_changed.emit()
                self._session.open_at(chat.id, removed.nodes[0].id)

        self._session.keep(chat)
        self._session.path_changed.emit()
        self._offer_undo(sentence, undo)

    def _offer_undo(self, sentence: str, undo: Callable[[], None]) -> None:
        self.noticed.emit(Notice(sentence, action=tr("Undo"), on_action=undo))
