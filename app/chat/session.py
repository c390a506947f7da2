"""The session of the chats: all chats, the open one, and the answer that is being written.

Knows the engine client and the store, no widget. One answer is written at a time; it goes on when
another chat is opened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

from PySide6.QtCore import QObject, Signal, Slot

from app.chat.answering import AnswerWriter, CutAnswer
from app.chat.attachments.attachment import Attachment
from app.chat.conversation import Conversation
from app.chat.listing.library import ChatLibrary
from app.chat.message import Message
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
    leaving = Signal()  # before another chat is opened
    opened = Signal(object)  # Conversation
    path_changed = Signal()  # other messages of the open chat are shown now
    message_changed = Signal(int)  # id of a message of the open chat that has another text
    shown_at = Signal(int)  # id of a message of the open chat that somebody looks for
    answer_text = Signal(str)  # text added to the open chat's last message
    answer_closed = Signal(int)  # id of a message of the open chat
    busy_changed = Signal(bool)
    answered = Signal(object)  # Conversation whose answer has ended
    draft_restored = Signal(str)
    prompt_changed = Signal()  # system prompt of the open chat
    answering = Signal(str)  # id of the chat, before the engine starts to answer
    deleted = Signal(str)
    noticed = Signal(object)  # Notice
    model_wanted = Signal(bool)  # a message waits for a model; whether one is being loaded

    def __init__(
        self,
        library: ChatLibrary,
        client: EngineClient,
        sampling: Callable[[Conversation], SamplingParams],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._client = client
        self.library = library
        library.noticed.connect(self.noticed)
        library.changed.connect(self.chats_changed)
        self._writer = AnswerWriter(client, sampling, self)
        self._writer.beginning.connect(self.answering)
        self._writer.begun.connect(lambda: self.busy_changed.emit(True))
        self._writer.grown.connect(self._on_grown)
        self._writer.closed.connect(self._on_closed)
        self._writer.filled.connect(self._offer_shift)
        self._writer.noticed.connect(self.noticed)
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
    def cut_answer(self) -> CutAnswer | None:
        """The last answer that a failure has cut off, while it can go on."""
        cut = self._writer.cut
        if cut is None or self.is_busy or self.library.opened(cut.chat.id) is not cut.chat:
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
        """Look for the chats and open the one with `last_id`, or a new one."""
        self.library.start()
        last = self.library.find(last_id) if last_id else None
        self._open(last or Conversation(system_prompt=system_prompt))
        self.chats_changed.emit()

    def new_chat(self, system_prompt: str) -> None:
        """Open an empty chat, unless the open one is empty."""
        if not self.current.is_empty or self.current.draft or self.current.draft_files:
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

    def take(self, *chats: Conversation) -> None:
        """Keep chats that come from elsewhere, and open the last one."""
        for chat in chats:
            self.library.save(chat)
        if chats:
            self._open(chats[-1])
            self.chats_changed.emit()

    @Slot(str, str)
    def rename(self, chat_id: str, title: str) -> None:
        """Give a chat the title that a person has chosen."""
        chat = self.find(chat_id)
        if chat is not None and title.strip():
            self.entitle(chat, title.strip())

    @Slot(object, str)
    def entitle(self, chat: Conversation, title: str) -> None:
        """Give a chat a title that is not changed any more by itself."""
        chat.title, chat.has_own_title = title, True
        self.library.save(chat)
        self.chats_changed.emit()

    def delete(self, chat_ids: Collection[str], system_prompt: str) -> None:
        """Delete chats; a notice offers to undo it."""
        if self.answering_id in chat_ids:
            self._writer.cut_off()
        deletions = self.library.delete(chat_ids)
        if not deletions:
            return
        for deletion in deletions:
            self.deleted.emit(deletion.summary.id)
        ids = [deletion.summary.id for deletion in deletions]
        opened = self.current.id if self.current.id in ids else ids[0] if len(ids) == 1 else ""
        if self.current.id in ids:
            self._show(Conversation(system_prompt=system_prompt))
        self.chats_changed.emit()
        text = tr_n("{n} chat was deleted.", "{n} chats were deleted.", len(ids))
        if len(ids) == 1:
            title = deletions[0].summary.title or tr("New chat")
            text = tr("“{title}” was deleted.").format(title=title)

        def undo() -> None:
            self.library.bring_back(deletions)
            if opened:
                self.open_chat(opened)

        self.noticed.emit(Notice(text, action=tr("Undo"), on_action=undo))

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

    def set_draft_files(self, paths: tuple[str, ...]) -> None:
        """Note the files that shall go with the open chat's next message."""
        if paths != self.current.draft_files:
            self.current.draft_files = paths
            self._save_soon(self.current)

    def set_thinking(self, thinks: bool) -> None:
        """Set whether models shall think before they answer in the open chat."""
        self.current.thinks = thinks
        self._save_soon(self.current)

    def set_effort(self, effort: str) -> None:
        """Set how much models shall think in the open chat; "" as their templates have it."""
        self.current.effort = effort
        self._save_soon(self.current)

    def save_all(self) -> None:
        """Save the answer under way, and the open chat unless it is and always was empty."""
        if self._writer.chat is not None:
            self._save(self._writer.chat)
        if self._is_worth_saving(self.current):
            self._save(self.current)

    # answers

    def send(self, text: str, files: tuple[Attachment, ...] = ()) -> bool:
        """Send a message; return False, and say why, if that is not possible now."""
        if not (text.strip() or files) or not self._may_answer(is_message=True):
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
        old = self.current.tree[message_id]
        if not (text.strip() or old.attachments) or not self._may_answer():
            return False
        self._writer.cut_off()
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
        self.library.close()

    def flush(self) -> None:
        """Wait until all that is to be saved is on the disk."""
        self.library.flush()

    def find(self, chat_id: str) -> Conversation | None:
        """Return the chat with an id, if there is one."""
        return self.library.find(chat_id)

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
            self.leaving.emit()
            self.save_all()
        self._show(chat)

    def _show(self, chat: Conversation) -> None:
        self.current = chat
        self.opened.emit(chat)
        self.draft_restored.emit(chat.draft)

    def _may_answer(self, *, is_message: bool = False) -> bool:
        is_loading = self._client.state is EngineState.LOADING
        client = self._client
        is_ready = client.model is not None and not is_loading and not client.is_unloading
        if is_message and not is_ready:
            self.model_wanted.emit(is_loading)
            return False
        if not is_ready:  # stopping the answer would stop the loading
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
        self.answered.emit(chat)
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
        has_draft = bool(chat.draft.strip() or chat.draft_files)
        return not chat.is_empty or has_draft or chat.id in self.library

    def _save(self, chat: Conversation) -> None:
        self.library.save(chat)

    def _save_soon(self, chat: Conversation) -> None:
        if self._is_worth_saving(chat):
            self.library.save_soon(chat)

    def _notice(self, text: str, kind: str = "info") -> None:
        self.noticed.emit(Notice(text, kind="error" if kind == "error" else "info"))
