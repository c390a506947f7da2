"""The session of the chats: all chats, the open one, and the answer that is being written.

Knows the engine client and the store, no widget. One answer is written at a time; it goes on when
another chat is opened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from PySide6.QtCore import QObject, Signal, Slot

from app.chat.answering import AnswerWriter, CutAnswer
from app.chat.attachments.attachment import Attachment
from app.chat.conversation import Conversation, DamagedChat
from app.chat.message import Message
from app.chat.saving import ChatSaver
from app.chat.store import ChatStore
from app.engine_client import EngineClient, EngineState
from app.notice import Notice
from app.translation import tr, tr_n
from engine import SamplingParams


class ChatSession(QObject):
    """All chats, the open one, and the running answer.

    Args:
        sampling: returns the sampling parameters of a chat; called at the start of each answer.
    """

    chats_changed = Signal()
    opened = Signal(object)  # Conversation
    path_changed = Signal()  # other messages of the open chat are shown now
    message_changed = Signal(int)  # id of a message of the open chat that has another text
    shown_at = Signal(int)  # id of a message of the open chat that somebody looks for
    answer_text = Signal(str)  # text added to the open chat's last message
    answer_closed = Signal(int)  # id of a message of the open chat
    busy_changed = Signal(bool)
    draft_restored = Signal(str)
    prompt_changed = Signal()  # system prompt of the open chat
    answering = Signal(str)  # id of the chat, before the engine starts to answer
    deleted = Signal(str)
    noticed = Signal(object)  # Notice

    def __init__(
        self,
        store: ChatStore,
        client: EngineClient,
        sampling: Callable[[Conversation], SamplingParams],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._store, self._client = store, client
        self._saver = ChatSaver(store, self)
        self._saver.noticed.connect(self.noticed)
        self._saver.conflicted.connect(self.chats_changed)
        self._saver.not_deleted.connect(self._on_not_deleted)
        self._writer = AnswerWriter(client, sampling, self)
        self._writer.beginning.connect(self.answering)
        self._writer.begun.connect(lambda: self.busy_changed.emit(True))
        self._writer.grown.connect(self._on_grown)
        self._writer.closed.connect(self._on_closed)
        self._writer.filled.connect(self._offer_shift)
        self._writer.noticed.connect(self.noticed)
        self.chats: list[Conversation] = []
        self.current = Conversation()

    @property
    def is_busy(self) -> bool:
        """Whether an answer is being written, in any chat."""
        return self._writer.chat is not None

    @property
    def answering_id(self) -> str:
        """Id of the chat that is being answered; "" for none."""
        return self._writer.chat.id if self._writer.chat is not None else ""

    @property
    def damaged(self) -> list[DamagedChat]:
        """The files of the chats' folder that could not be read."""
        return self._store.damaged

    @property
    def cut_answer(self) -> CutAnswer | None:
        """The last answer that a failure has cut off, while it can go on."""
        cut = self._writer.cut
        if cut is None or self.is_busy or self.find(cut.chat.id) is not cut.chat:
            return None
        tree, number = cut.chat.tree, cut.message.id
        return cut if tree.get(number) is cut.message and len(tree.branch(number)) == 1 else None

    @property
    def growing(self) -> Message | None:
        """The answer that is being written, if it is the last message shown in the open chat."""
        path = self.current.messages
        return path[-1] if path and path[-1] is self._writer.message else None

    @property
    def is_answering_here(self) -> bool:
        """Whether the open chat's last message is the answer that is being written."""
        return self.growing is not None

    # chats

    def start(self, last_id: str, system_prompt: str) -> None:
        """Read the chats and open the one with `last_id`, or a new one."""
        self.chats = self._store.load()
        if n := len(self.damaged):
            text = tr_n(
                "{n} chat could not be read. Its file will stay unchanged.",
                "{n} chats could not be read. Their files will stay unchanged.",
                n,
            )
            self._notice(text)
        last = next((chat for chat in self.chats if chat.id == last_id), None)
        self._open(last or Conversation(system_prompt=system_prompt))
        self.chats_changed.emit()

    def tidy(self) -> None:
        """Merge the journals of windows that were killed, on a thread."""
        self._saver.tidy()

    def new_chat(self, system_prompt: str) -> None:
        """Open an empty chat, unless the open one is empty."""
        if not self.current.is_empty or self.current.draft:
            self._open(Conversation(system_prompt=system_prompt))
            self.chats_changed.emit()

    def open_chat(self, chat_id: str) -> None:
        chat = self.find(chat_id)
        if chat is not None and chat is not self.current:
            self._open(chat)

    def open_at(self, chat_id: str, message_id: int) -> None:
        """Open a chat at one of its messages, in whichever version that is."""
        self.open_chat(chat_id)
        if self.current.id == chat_id and message_id in self.current.tree:
            self.choose(message_id)
            self.shown_at.emit(message_id)

    def choose(self, message_id: int) -> None:
        """Show another version of a message, and what has followed it."""
        before = list(self.current.messages)
        self.current.tree.choose(message_id)
        if before != self.current.messages:
            self.path_changed.emit()
            self._save_soon(self.current)

    def take(self, chat: Conversation) -> None:
        """Keep a chat that was deleted or comes from elsewhere, and open it."""
        self._save(chat)
        self._open(chat)
        self.chats_changed.emit()

    @Slot(object, object)
    def rename(self, chat_id: str, title: str) -> None:
        chat = self.find(chat_id)
        if chat is not None and title.strip():
            chat.title = title.strip()
            self._save(chat)
            self.chats_changed.emit()

    def delete(self, chat_id: str, system_prompt: str) -> None:
        """Delete a chat; a notice offers to undo it."""
        chat = self.find(chat_id)
        if chat is None:
            return
        if chat is self._writer.chat:
            self._writer.cut_off()
        self._saver.delete(chat)
        self.chats.remove(chat)
        self.deleted.emit(chat.id)
        if chat is self.current:
            self._show(Conversation(system_prompt=system_prompt))
        self.chats_changed.emit()
        self.noticed.emit(
            Notice(
                tr("“{chat}” was deleted.").format(chat=chat.shown_title),
                action=tr("Undo"),
                on_action=lambda: self.take(chat),
            )
        )

    def set_draft(self, text: str) -> None:
        self.current.draft = text
        self._save_soon(self.current)

    def set_system_prompt(self, text: str) -> None:
        self.current.system_prompt = text
        self.prompt_changed.emit()
        self._save_soon(self.current)

    def set_sampling(self, chosen: dict[str, Any] | None, chat: Conversation | None = None) -> None:
        """Give the open chat, or another one, values of sampling of its own; None takes them."""
        chat = chat or self.current
        chat.sampling = chosen
        self._save_soon(chat)

    def set_thinking(self, thinks: bool) -> None:
        """Set whether models shall think before they answer in the open chat."""
        self.current.thinks = thinks
        self._save_soon(self.current)

    def save_all(self) -> None:
        """Save the answer under way, and the open chat unless it is and always was empty."""
        if self._writer.chat is not None:
            self._save(self._writer.chat)
        if self._is_worth_saving(self.current):
            self._save(self.current)

    # answers

    def send(self, text: str, files: tuple[Attachment, ...] = ()) -> bool:
        """Send a message; return False, and say why in a notice, if that is not possible now."""
        if not (text.strip() or files) or not self._may_answer():
            return False
        if self._writer.chat is self.current:  # only what says so, like Stop, ends an answer
            self._notice(
                tr(
                    "The answer is still being written. Wait for it, or press Esc to stop it;"
                    " your message stays here as a draft."
                )
            )
            return False
        self.current.draft = ""
        self._ask(Message("user", text.strip(), attachments=files))
        return True

    def regenerate(self, message_id: int = 0) -> None:
        """Answer a question again; the answer so far stays as a version, if it has any text.

        Args:
            message_id: id of the answer, or of the question; 0 for the last one that is shown.
        """
        chat = self.current
        if chat.is_empty or not self._may_answer():
            return
        self._writer.cut_off()
        old = chat.tree[message_id or chat.messages[-1].id]
        row = [*chat.tree.above(old.id), old]
        question = next((message for message in reversed(row) if not message.is_answer), None)
        if question is None:
            self._notice(tr("There is no question above this answer."))
            return
        if old.is_answer and not old.content and len(chat.tree.branch(old.id)) == 1:
            chat.tree.remove(old.id)
        self._answer(question.id)

    def edit(self, message_id: int, text: str) -> bool:
        """Ask a question in other words, in a branch of its own; return False as `send` does."""
        if not text.strip() or not self._may_answer():
            return False
        self._writer.cut_off()
        old = self.current.tree[message_id]
        self._ask(replace(old, content=text.strip()), old.parent)
        return True

    def go_on(self) -> None:
        """Continue the last answer where it ended."""
        messages = self.current.messages
        if not messages or not messages[-1].is_answer or not self._may_answer():
            return
        if not messages[-1].content:
            self.regenerate()
            return
        self._writer.begin(self.current, continue_last=True)
        self.message_changed.emit(messages[-1].id)

    def resume(self) -> None:
        """Go on with the answer that a failure has cut off, from its last token."""
        if (cut := self.cut_answer) is not None:
            self.open_at(cut.chat.id, cut.message.id)
            self.go_on()

    def stop(self) -> None:
        self._writer.stop()

    def close(self) -> None:
        """Save everything, before or after the engine ends."""
        self._writer.close()
        self.save_all()
        self._saver.close()

    def flush(self) -> None:
        """Wait until all that is to be saved is on the disk."""
        self._saver.flush()

    def find(self, chat_id: str) -> Conversation | None:
        """Return the chat with an id, if there is one."""
        return next((chat for chat in self.chats if chat.id == chat_id), None)

    def is_writing(self, message: Message) -> bool:
        """Return whether the engine is writing this answer."""
        return message is self._writer.message

    def end_answer(self, messages: Iterable[Message]) -> None:
        """End the answer that is being written, if it is one of these."""
        if any(message is self._writer.message for message in messages):
            self._writer.cut_off()

    def keep(self, chat: Conversation) -> None:
        """Save a chat whose messages have changed."""
        chat.updated = time.time()
        self._save(chat)
        self.chats_changed.emit()

    # inside

    def _open(self, chat: Conversation) -> None:
        if chat is not self.current:
            self.save_all()
        self._show(chat)

    def _show(self, chat: Conversation) -> None:
        self.current = chat
        self.opened.emit(chat)
        self.draft_restored.emit(chat.draft)

    def _on_not_deleted(self, chat: Conversation, error: Exception) -> None:
        self._enlist(chat)
        self._notice(str(error), kind="error")

    def _may_answer(self) -> bool:
        is_loading = self._client.state is EngineState.LOADING
        if self._client.model is None or is_loading:  # stopping the answer would stop the loading
            if is_loading:
                why = tr("The model is still loading, so the message stays here as a draft.")
            else:
                why = tr("No model is loaded yet, so the message stays here as a draft.")
            self._notice(why)
            return False
        answering = self._writer.chat
        if answering is not None and answering is not self.current:
            title = answering.shown_title
            text = tr("“{chat}” is still being answered. Wait for it, or stop it there.")
            self._notice(text.format(chat=title))
            return False
        return True

    def _ask(self, question: Message, parent: int | None = None) -> None:
        self.current.add(question, parent)
        self._answer(question.id)
        self.chats_changed.emit()

    def _answer(self, question: int) -> None:
        """Have a question answered, in a version of its own."""
        self.current.add(Message("assistant", ""), question)
        self._writer.begin(self.current, continue_last=False)
        self.path_changed.emit()
        self._save(self.current)

    @Slot(str)
    def _on_grown(self, text: str) -> None:
        assert self._writer.chat is not None
        self._save_soon(self._writer.chat)
        if self.is_answering_here:
            self.answer_text.emit(text)

    @Slot(object, object)
    def _on_closed(self, chat: Conversation, message: Message) -> None:
        self._save(chat)
        self.busy_changed.emit(False)
        if chat is self.current:
            self.answer_closed.emit(message.id)

    @Slot(object, str)
    def _offer_shift(self, chat: Conversation, sentence: str) -> None:
        if chat is not self.current:
            sentence = f"“{chat.shown_title}”: {sentence}"

        def drop_and_go_on() -> None:
            chat.drops_oldest = True
            self.open_chat(chat.id)  # a person may look at another one by now
            if self.current is chat:
                self.go_on()

        self.noticed.emit(
            Notice(
                sentence,
                tr(
                    "From now on, the oldest messages of this chat can make room; the system prompt"
                    " stays."
                ),
                "warning",
                tr("Drop the oldest and go on"),
                drop_and_go_on,
            )
        )

    def _is_worth_saving(self, chat: Conversation) -> bool:
        return not chat.is_empty or bool(chat.draft.strip()) or chat in self.chats

    def _save(self, chat: Conversation) -> None:
        self._enlist(chat)
        self._saver.save(chat)

    def _save_soon(self, chat: Conversation) -> None:
        if self._is_worth_saving(chat):
            self._enlist(chat)
            self._saver.save_soon(chat)

    def _enlist(self, chat: Conversation) -> None:
        if chat not in self.chats:
            self.chats.insert(0, chat)
            self.chats_changed.emit()

    def _notice(self, text: str, kind: str = "info") -> None:
        self.noticed.emit(Notice(text, kind="error" if kind == "error" else "info"))
