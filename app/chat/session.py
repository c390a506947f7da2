"""The session of the chats: all chats, the open one, and the answer that is being written.

Knows the engine client and the store, no widget. One answer is written at a time; it goes on when
another chat is opened.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from PySide6.QtCore import QObject, Signal, Slot

from app.chat.conversation import Conversation, DamagedChat
from app.chat.message import THINK_CLOSE, AnswerStats, Message
from app.chat.saving import ChatSaver
from app.chat.store import ChatStore
from app.engine_client import EngineClient, EngineState, is_cancelled
from app.notice import Notice
from engine import ContextOverflow, EngineError, Finished, SamplingParams


@dataclass(frozen=True, slots=True)
class CutAnswer:
    """An answer that a failure has cut off.

    Attributes:
        ids: the tokens that it has had.
    """

    chat: Conversation
    message: Message
    ids: tuple[int, ...]


class ChatSession(QObject):
    """All chats, the open one, and the running answer.

    Args:
        sampling: returns the sampling parameters; called at the start of each answer.
    """

    chats_changed = Signal()
    opened = Signal(object)  # Conversation
    message_added = Signal(int)  # index in the open chat
    messages_cut = Signal(int)  # number of messages left in the open chat
    answer_text = Signal(str)  # text added to the open chat's last message
    answer_closed = Signal(int)  # index in the open chat
    busy_changed = Signal(bool)
    draft_restored = Signal(str)
    answering = Signal(str)  # id of the chat, before the engine starts to answer
    deleted = Signal(str)
    noticed = Signal(object)  # Notice

    def __init__(
        self,
        store: ChatStore,
        client: EngineClient,
        sampling: Callable[[], SamplingParams],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._store, self._client = store, client
        self._saver = ChatSaver(store, self)
        self._saver.noticed.connect(self.noticed)
        self._saver.conflicted.connect(self.chats_changed)
        self._saver.not_deleted.connect(self._on_not_deleted)
        self._sampling = sampling
        self.chats: list[Conversation] = []
        self.current = Conversation()
        self._answering: Conversation | None = None
        self._cut_answer: CutAnswer | None = None
        self._first_text_at: float | None = None
        client.text.connect(self._on_text)
        client.finished.connect(self._on_finished)
        client.failed.connect(self._on_failed)

    @property
    def is_busy(self) -> bool:
        """Whether an answer is being written, in any chat."""
        return self._answering is not None

    @property
    def damaged(self) -> list[DamagedChat]:
        """The files of the chats' folder that could not be read."""
        return self._store.damaged

    @property
    def cut_answer(self) -> CutAnswer | None:
        """The last answer that a failure has cut off, while it can go on."""
        cut = self._cut_answer
        if cut is None or self._answering is not None or self.find(cut.chat.id) is not cut.chat:
            return None
        return cut if cut.chat.messages and cut.chat.messages[-1] is cut.message else None

    @property
    def is_answering_here(self) -> bool:
        return self._answering is self.current

    # chats

    def start(self, last_id: str, system_prompt: str) -> None:
        """Read the chats and open the one with `last_id`, or a new one."""
        self.chats = self._store.load()
        if n := len(self.damaged):
            chats, files = ("1 chat", "Its file") if n == 1 else (f"{n} chats", "Their files")
            self._notice(f"{chats} could not be read. {files} will stay unchanged.")
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
        if chat is self._answering:
            self._client.cancel()
            self._close_answer(self._so_far("cancelled"))
        self._saver.delete(chat)
        self.chats.remove(chat)
        self.deleted.emit(chat.id)
        if chat is self.current:
            self._show(Conversation(system_prompt=system_prompt))
        self.chats_changed.emit()
        self.noticed.emit(
            Notice(
                f"“{chat.shown_title}” was deleted.",
                action="Undo",
                on_action=lambda: self.take(chat),
            )
        )

    def set_draft(self, text: str) -> None:
        self.current.draft = text
        self._save_soon(self.current)

    def set_system_prompt(self, text: str) -> None:
        self.current.system_prompt = text
        self._save_soon(self.current)

    def save_all(self) -> None:
        """Save the answer under way, and the open chat unless it is and always was empty."""
        if self._answering is not None:
            self._save(self._answering)
        if self._is_worth_saving(self.current):
            self._save(self.current)

    # answers

    def send(self, text: str) -> bool:
        """Send a message; return False, and say why in a notice, if that is not possible now."""
        if not text.strip() or not self._may_answer():
            return False
        if self.is_answering_here:  # only what says so, like Stop or Regenerate, ends an answer
            self._notice(
                "The answer is still being written. Wait for it, or press Esc to stop it;"
                " your message stays here as a draft."
            )
            return False
        self.current.draft = ""
        self._ask(text)
        return True

    def regenerate(self) -> None:
        """Replace the last answer by a new one."""
        n_kept = len(self.current.messages)
        while n_kept and self.current.messages[n_kept - 1].role == "assistant":
            n_kept -= 1
        if n_kept and self._may_answer():
            self._cut(n_kept)
            self._answer()

    def edit(self, index: int, text: str) -> bool:
        """Replace a message and all that followed it; return False as `send` does."""
        if not text.strip() or not self._may_answer():
            return False
        self._cut(index)
        self._ask(text)
        return True

    def go_on(self) -> None:
        """Continue the last answer where it ended."""
        messages = self.current.messages
        if not messages or messages[-1].role != "assistant" or not self._may_answer():
            return
        if not messages[-1].content:
            self.regenerate()
            return
        self.opened.emit(self.current)
        self._begin(continue_last=True)

    def resume(self) -> None:
        """Go on with the answer that a failure has cut off, from its last token."""
        if (cut := self.cut_answer) is not None:
            self.open_chat(cut.chat.id)
            self.go_on()

    def stop(self) -> None:
        if self._answering is not None:
            self._client.cancel()

    def close(self) -> None:
        """Save everything, before or after the engine ends."""
        if self._answering is not None:
            self._close_answer(self._so_far("cancelled"))
        self.save_all()
        self._saver.close()

    def flush(self) -> None:
        """Wait until all that is to be saved is on the disk."""
        self._saver.flush()

    # inside

    def find(self, chat_id: str) -> Conversation | None:
        """Return the chat with an id, if there is one."""
        return next((chat for chat in self.chats if chat.id == chat_id), None)

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
            why = "The model is still loading" if is_loading else "No model is loaded yet"
            self._notice(f"{why}, so the message stays here as a draft.")
            return False
        if self._answering is not None and self._answering is not self.current:
            title = self._answering.shown_title
            self._notice(f"“{title}” is still being answered. Wait for it, or stop it there.")
            return False
        return True

    def _ask(self, text: str) -> None:
        self._add(Message("user", text.strip()))
        self._answer()

    def _add(self, message: Message) -> None:
        self.current.add(message)
        self.message_added.emit(len(self.current.messages) - 1)
        self._save(self.current)
        self.chats_changed.emit()

    def _cut(self, n_messages: int) -> None:
        if self._answering is not None:
            self._client.cancel()
            self._close_answer(self._so_far("cancelled"))
        self.current.truncate(n_messages)
        self.messages_cut.emit(n_messages)

    def _answer(self) -> None:
        self.current.add(Message("assistant", ""))
        self._begin(continue_last=False)
        self.message_added.emit(len(self.current.messages) - 1)

    def _begin(self, *, continue_last: bool) -> None:
        cut = self.cut_answer
        begun = cut.ids if continue_last and cut and cut.chat is self.current else ()
        self._answering, self._first_text_at, self._cut_answer = self.current, None, None
        sampling = self._sampling()
        if self.current.drops_oldest:
            sampling = replace(sampling, on_overflow="shift")
        prompt = self.current.prompt(continue_last=continue_last)
        self.current.messages[-1].problem = ""
        self.answering.emit(self.current.id)
        self._client.generate(prompt, sampling, continue_last=continue_last, begun=begun)
        self.busy_changed.emit(True)

    @Slot(str)
    def _on_text(self, text: str) -> None:
        if self._answering is None:
            return
        if self._first_text_at is None:
            self._first_text_at = time.perf_counter()
        message = self._answering.messages[-1]
        message.content += text
        recent = message.content[-len(text) - len(THINK_CLOSE) :]
        if message.thought_s is None and THINK_CLOSE in recent:
            message.thought_s = time.perf_counter() - self._first_text_at
        self._save_soon(self._answering)
        if self.is_answering_here:
            self.answer_text.emit(text)

    @Slot(object)
    def _on_finished(self, finished: Finished) -> None:
        chat, is_here = self._answering, self.is_answering_here
        self._close_answer(AnswerStats.of(finished))
        is_full = finished.reason == "context"
        if is_full and chat is not None and is_here and not chat.drops_oldest:
            self._offer_shift(chat, "The context is full, so the answer ends here.")

    @Slot(object)
    def _on_failed(self, error: EngineError) -> None:
        if (chat := self._answering) is None:
            return
        if is_cancelled(error):
            self._close_answer(self._so_far("cancelled"))
            return
        chat.messages[-1].problem = error.message
        self._cut_answer = CutAnswer(chat, chat.messages[-1], self._client.answer_ids)
        self._close_answer(self._so_far("failed"))
        if isinstance(error, ContextOverflow) and not chat.drops_oldest:
            self._offer_shift(chat, error.message)
        else:
            self.noticed.emit(Notice.of(error))

    def _offer_shift(self, chat: Conversation, sentence: str) -> None:
        def drop_and_go_on() -> None:
            chat.drops_oldest = True
            self.open_chat(chat.id)  # a person may look at another one by now
            if self.current is chat:
                self.go_on()

        self.noticed.emit(
            Notice(
                sentence,
                "From now on, the oldest messages of this chat can make room; the system prompt"
                " stays.",
                "warning",
                "Drop the oldest and go on",
                drop_and_go_on,
            )
        )

    def _so_far(self, reason: str) -> AnswerStats:
        """Return the figures of the answer that is cut off for a reason."""
        meter = self._client.answer_meter
        return AnswerStats(reason, meter.n_tokens, meter.tokens_per_s, meter.first_token_s, 0)

    def _close_answer(self, stats: AnswerStats) -> None:
        """Save the answer, complete or not, and end it."""
        chat, self._answering = self._answering, None
        if chat is None:
            return
        chat.messages[-1].stats = stats
        chat.updated = time.time()
        self._save(chat)
        self.busy_changed.emit(False)
        if chat is self.current:
            self.answer_closed.emit(len(chat.messages) - 1)

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
