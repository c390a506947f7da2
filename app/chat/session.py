"""The chat session: all chats, the open one, and the running answers.

It uses the engine client and the store, but no widgets. Each chat has at most one running answer,
which keeps running when another chat is opened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import QObject, Signal, Slot

from app.chat.answering import AnswerWriter, CutAnswer, WrittenAnswer
from app.chat.call_flow import CallFlow
from app.chat.conversation import Conversation, ImageFiles
from app.chat.images.files import reads_images
from app.chat.library import ChatLibrary
from app.chat.message import Attachment, ChatImage, Message
from app.core.engine_client import EngineClient, EngineState
from app.core.notice import Notice
from app.core.translation import tr, tr_n
from engine import ImageFile, SamplingParams

if TYPE_CHECKING:
    from app.tools.page.tool_session import ToolSession


class ChatSession(QObject):
    """All chats, the open one, and the running answers.

    Args:
        sampling: returns a chat's sampling parameters; called at the start of each answer.
    """

    chats_changed = Signal()
    leaving = Signal()  # before another chat opens
    opened = Signal(object)  # Conversation
    path_changed = Signal()  # the open chat now shows other messages
    message_changed = Signal(int)  # id of a message in the open chat whose text changed
    shown_at = Signal(int)  # id of a message in the open chat to scroll to
    answer_text = Signal(str)  # text added to the open chat's last message
    answer_closed = Signal(int)  # id of the answer, in the open chat
    busy_changed = Signal(bool)  # whether the open chat is being answered
    answers_changed = Signal()  # the set of running answers
    filled = Signal(object, str)  # Conversation with a full context, sentence about it
    answered = Signal(object)  # Conversation whose answer has finished
    draft_restored = Signal(str)
    calls_changed = Signal(int)  # id of a message in the open chat whose calls changed
    calls_wait = Signal(object)  # Conversation whose calls await approval
    answering = Signal(str)  # id of the chat, before the engine starts answering
    begun = Signal(object)  # WrittenAnswer
    deleted = Signal(str)
    noticed = Signal(object)  # Notice
    prompt_changed = Signal()  # the open chat's system prompt
    tools_changed = Signal()  # the tools available in the open chat
    model_wanted = Signal()  # to send the message in the composer

    def __init__(
        self, library: ChatLibrary, client: EngineClient,
        sampling: Callable[[Conversation], SamplingParams], tools: ToolSession, parent: QObject,
    ) -> None:  # fmt: skip
        super().__init__(parent)
        self._client, self.library = client, library
        library.noticed.connect(self.noticed)
        library.changed.connect(self.chats_changed)
        self.calls = CallFlow(tools, client, self._go_on_in, self._can_go_on_in, self)
        self._writer = AnswerWriter(client, sampling, self.calls.offered, self.image_files, self)
        self._writer.beginning.connect(self.answering)
        self._writer.begun.connect(self._on_begun)
        self._writer.begun.connect(self.begun)
        self._writer.changed.connect(self._on_answers)
        self._writer.grown.connect(self._on_grown)
        self._writer.closed.connect(self._on_closed)
        self._writer.filled.connect(self.filled)
        self._writer.closed.connect(self.calls.take_answer)
        for part in (self._writer, self.calls):
            part.noticed.connect(self.noticed)
        self.calls.changed.connect(self._on_calls)
        self.calls.running_changed.connect(self._emit_busy)
        self.calls.wanted.connect(self.calls_wait)
        self.current = Conversation()

    @property
    def is_busy(self) -> bool:
        """Whether any chat is being answered."""
        return bool(self.answers)

    @property
    def answers(self) -> list[WrittenAnswer]:
        """The running answers, oldest first."""
        return list(self._writer)

    @property
    def lost_answers(self) -> list[CutAnswer]:
        """The answers that were cut off by the loss of the model and can be continued."""
        cuts = [cut for cut in self._writer.cuts if cut.is_lost and cut.can_go_on]
        return [cut for cut in cuts if self.library.opened(cut.chat.id) is cut.chat]

    @property
    def answer_here(self) -> WrittenAnswer | None:
        """The running answer of the open chat, if it is on screen."""
        written, path = self._writer.of(self.current), self.current.messages
        return written if written is not None and path and path[-1] is written.message else None

    @property
    def growing(self) -> Message | None:
        """The message of `answer_here`."""
        return None if (written := self.answer_here) is None else written.message

    def start(self, last_id: str, system_prompt: str) -> None:
        """Read the chats and open the one with `last_id`, or a new one."""
        self.library.start()
        last = self.library.find(last_id) if last_id else None
        self._open(last or Conversation(system_prompt=system_prompt))
        self.chats_changed.emit()

    def new_chat(self, system_prompt: str) -> None:
        """Open a new chat, unless the open one is empty."""
        if not self.current.is_empty or self.current.has_draft:
            self._open(Conversation(system_prompt=system_prompt))
            self.chats_changed.emit()

    def open_chat(self, chat_id: str) -> None:
        chat = self.find(chat_id)
        if chat is not None and chat is not self.current:
            self._open(chat)

    def open_at(self, chat_id: str, message_id: int) -> None:
        """Open a chat at one of its messages, switching to that message's version."""
        self.open_chat(chat_id)
        if self.current.id == chat_id and message_id in self.current.tree:
            self.choose(message_id)
            self.shown_at.emit(message_id)

    def choose(self, message_id: int) -> None:
        """Show a version of a message, and the messages that follow that version."""
        before = list(self.current.messages)
        self.current.tree.choose(message_id)
        if before != self.current.messages:
            self.path_changed.emit()
            self._save_soon(self.current)

    def take(self, *chats: Conversation) -> None:
        """Add chats, for example imported ones, and open the last one."""
        for chat in chats:
            self.library.save(chat)
        if chats:
            self._open(chats[-1])
            self.chats_changed.emit()

    @Slot(str, str)
    def rename(self, chat_id: str, title: str) -> None:
        """Set a title that the user has chosen."""
        chat = self.find(chat_id)
        if chat is not None and title.strip():
            self.entitle(chat, title.strip())

    @Slot(object, str)
    def entitle(self, chat: Conversation, title: str) -> None:
        """Set a permanent title, unless the chat has been deleted."""
        if self.library.opened(chat.id) is chat:
            chat.title, chat.has_own_title = title, True
            self.library.save(chat)
            self.chats_changed.emit()

    def delete(self, chat_ids: Collection[str], system_prompt: str) -> None:
        """Delete chats; a notice offers to undo the deletion."""
        for one in (*self.answers, *self.calls.runner):
            if one.chat.id in chat_ids:
                self._writer.cut_off(one.chat)
                self.calls.stop(one.chat)
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

    def save_all(self) -> None:
        """Save all chats with running answers, and the open one unless it has always been empty."""
        for written in self.answers:
            self.library.save(written.chat)
        if self._is_worth_saving(self.current):
            self.library.save(self.current)

    def send(
        self, text: str, files: tuple[Attachment, ...] = (),
        pictures: tuple[ChatImage, ...] = (), chat: Conversation | None = None,
    ) -> bool:  # fmt: skip
        """Send a message in `chat` (default: the open one); return whether it was accepted."""
        chat = chat or self.current
        if not (text.strip() or files or pictures) or not self._may_answer(is_message=True):
            return False
        if self._is_busy_in(chat):  # only Stop may end an answer
            text = tr(
                "The answer is still being written. Wait for it to finish, or press Esc to stop"
                " it; your message stays here as a draft."
            )
            self.noticed.emit(Notice(text))
            return False
        chat.draft = ""
        self._ask(Message("user", text.strip(), attachments=files, pictures=pictures), chat=chat)
        return True

    def regenerate(self, message_id: int = 0) -> None:
        """Answer a question again; keep the previous answer as a version unless it is empty.

        Args:
            message_id: id of the answer or of the question; 0 for the last message.
        """
        chat = self.current
        if not chat.is_empty and self._may_answer():
            self._writer.answer_again(chat, chat.tree[message_id or chat.messages[-1].id])

    def edit(self, message_id: int, text: str) -> bool:
        """Send an edited question as a new branch; return whether it was accepted."""
        old = self.current.tree[message_id]
        if not (text.strip() or old.has_files) or not self._may_answer():
            return False
        self._ask(replace(old, content=text.strip()), old.parent)
        return True

    def go_on(self) -> None:
        """Continue the last answer where it stopped, or after its calls' results."""
        messages = self.current.messages
        if messages and messages[-1].is_answer and self._may_answer():
            self._writer.go_on(self.current)

    def resume(self) -> None:
        """Continue all `lost_answers` from their last tokens, and open one of their chats."""
        if not (cuts := self.lost_answers) or not self._may_answer():
            return
        if all(cut.chat is not self.current for cut in cuts):
            self.open_chat(cuts[-1].chat.id)
        for cut in cuts:
            if cut.chat is self.current:
                self.choose(cut.message.id)
            else:
                cut.chat.tree.choose(cut.message.id)
            self._writer.go_on(cut.chat)

    def stop(self) -> None:
        """Stop the answer and the calls in the open chat."""
        self.stop_answer(self.current.id)

    def stop_answer(self, chat_id: str) -> None:
        """Stop the answer and the calls in a chat."""
        if (chat := self.library.opened(chat_id)) is not None:
            self._writer.stop(chat)
            self.calls.stop(chat)

    def stop_all(self) -> None:
        """Stop all answers."""
        for written in self.answers:
            self._writer.stop(written.chat)

    def close(self) -> None:
        """Save everything; the engine may be running or stopped."""
        self.calls.close()
        self._writer.close()
        self.save_all()
        self.library.close()

    def flush(self) -> None:
        """Wait until everything has been saved."""
        self.library.flush()

    def find(self, chat_id: str) -> Conversation | None:
        """Return the chat with this id, or None."""
        return self.library.find(chat_id)

    def is_writing(self, message: Message) -> bool:
        """Return whether this message is a running answer."""
        return self._writer.at(message) is not None

    def end_answer(self, messages: Iterable[Message]) -> None:
        """Stop the running answer and calls among these messages."""
        found = list(messages)
        self.calls.stop(self.current, found)
        for message in found:
            if (written := self._writer.at(message)) is not None:
                self._writer.cut_off(written.chat)

    def keep(self, chat: Conversation) -> None:
        """Save a chat whose messages have changed."""
        chat.updated = time.time()
        self.library.save(chat)
        self.chats_changed.emit()

    def set_draft(self, text: str) -> None:
        self.current.draft = text
        self._save_soon(self.current)

    def set_system_prompt(self, text: str) -> None:
        self.current.system_prompt = text
        self.prompt_changed.emit()
        self._save_soon(self.current)

    def set_sampling(self, chosen: dict[str, Any] | None, chat: Conversation | None = None) -> None:
        """Set the sampling values for `chat` (default: the open one); None for the global ones."""
        chat = chat or self.current
        chat.sampling = chosen
        self._save_soon(chat)

    def set_draft_files(self, paths: tuple[str, ...]) -> None:
        """Set the open chat's draft files."""
        if paths != self.current.draft_files:
            self.current.draft_files = paths
            self._save_soon(self.current)

    def set_draft_pictures(
        self, pictures: tuple[ChatImage, ...], chat: Conversation | None = None
    ) -> None:
        """Set the draft images in `chat` (default: the open one)."""
        chat = chat or self.current
        chat.draft_pictures = pictures
        self._save_soon(chat)

    def set_thinking(self, thinks: bool) -> None:
        """Set whether models think before answering in the open chat."""
        self.current.thinks = thinks
        self._save_soon(self.current)

    def set_effort(self, effort: str) -> None:
        """Set the open chat's reasoning effort; "" for the template's default."""
        self.current.effort = effort
        self._save_soon(self.current)

    def set_tools(self, *, used: bool, servers_off: tuple[str, ...]) -> None:
        """Set whether models may call tools in the open chat, and which servers are disabled."""
        self.current.uses_tools, self.current.servers_off = used, servers_off
        self.tools_changed.emit()
        self._save_soon(self.current)

    def image_files(self, chat: Conversation) -> ImageFiles:
        """Return a lookup for a chat's image files; it finds none if the model has no vision."""
        folder, can_see = self.library.store.images, reads_images(self._client.model)

        def file_of(picture: ChatImage) -> ImageFile | None:
            path = folder.path(chat, picture)
            return ImageFile(str(path)) if can_see and path.is_file() else None

        return file_of

    def _open(self, chat: Conversation) -> None:
        if chat is not self.current:
            self.leaving.emit()
            self.save_all()
        self._show(chat)

    def _show(self, chat: Conversation) -> None:
        self.current = chat
        self.opened.emit(chat)
        self.draft_restored.emit(chat.draft)
        self._emit_busy()

    def _emit_busy(self) -> None:
        self.busy_changed.emit(self._is_busy_in(self.current))

    def _is_busy_in(self, chat: Conversation) -> bool:
        return self._writer.of(chat) is not None or self.calls.is_running(chat)

    def _can_go_on_in(self, chat: Conversation) -> bool:
        return self.library.opened(chat.id) is chat and self._writer.of(chat) is None

    def _go_on_in(self, chat: Conversation) -> None:
        if self._may_answer():
            self._writer.go_on(chat)

    def _may_answer(self, *, is_message: bool = False) -> bool:
        client, is_loading = self._client, self._client.state is EngineState.LOADING
        is_ready = client.model is not None and not is_loading and not client.is_unloading
        if is_message and not is_ready:
            self.model_wanted.emit()
        elif is_loading:
            self.noticed.emit(
                Notice(tr("The model is still loading."), tr("Try again when it is ready."))
            )
        elif not is_ready:
            self.noticed.emit(Notice(tr("No model is loaded yet."), tr("Open a model first.")))
        return is_ready

    def _ask(
        self, question: Message, parent: int | None = None, chat: Conversation | None = None
    ) -> None:
        chat = chat or self.current
        self._writer.cut_off(chat)
        self.calls.refuse_waiting(chat)
        chat.add(question, parent)
        self._writer.answer(chat, question.id)
        self.chats_changed.emit()

    @Slot(object)
    def _on_begun(self, written: WrittenAnswer) -> None:
        if written.chat is self.current and written.goes_on:
            self.message_changed.emit(written.message.id)
        elif written.chat is self.current:
            self.path_changed.emit()
        self.library.save(written.chat)

    @Slot(object, str)
    def _on_grown(self, written: WrittenAnswer, text: str) -> None:
        self._save_soon(written.chat)
        if self.growing is written.message:
            self.answer_text.emit(text)

    @Slot()
    def _on_answers(self) -> None:
        self._emit_busy()
        self.answers_changed.emit()

    @Slot(object, object)
    def _on_closed(self, chat: Conversation, message: Message) -> None:
        self.library.save(chat)
        self.answered.emit(chat)
        if chat is self.current:
            self.answer_closed.emit(message.id)

    @Slot(object, object)
    def _on_calls(self, chat: Conversation, message: Message) -> None:
        if self.library.opened(chat.id) is chat:
            self.library.save(chat)
        if chat is self.current:
            self.calls_changed.emit(message.id)

    def _is_worth_saving(self, chat: Conversation) -> bool:
        return not chat.is_empty or chat.has_draft or chat.id in self.library

    def _save_soon(self, chat: Conversation) -> None:
        if self._is_worth_saving(chat):
            self.library.save_soon(chat)
