"""Presenter for the chats: connects the chat session with its views."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from PySide6.QtCore import QObject, Signal, Slot

from app.chat.attachments.draft_files import AttachmentPresenter
from app.chat.context import ContextPresenter
from app.chat.conversation import Conversation
from app.chat.images.album import ImageAlbum
from app.chat.images.draft import DraftImages
from app.chat.message import ChatImage, with_answer
from app.chat.session import ChatSession
from app.chat.tool_use import CallStep
from app.chat.tree import Removed
from app.chat.views.chat_view import ChatView
from app.chat.views.composer import Composer
from app.chat.views.message_parts import MessageStep
from app.core.engine_client import AnswerStage, EngineClient, RunningAnswer
from app.core.notice import Notice, of_chat
from app.core.settings import Settings, SettingsStore
from app.core.translation import tr, tr_n
from app.core.units import decimal
from app.widgets.theme import theme_signals


class ChatPresenter(QObject):
    """Connects a `ChatSession` with its views.

    Args:
        keep: applies settings and saves them.
        flush_prompt: stores a system prompt that is being typed.
        wake: reloads a model that was unloaded when idle; called before messages are sent.
    """

    noticed = Signal(object)  # Notice
    opened = Signal(bool)  # whether the chat now shown has messages

    def __init__(
        self,
        session: ChatSession,
        client: EngineClient,
        view: ChatView,
        composer: Composer,
        settings: SettingsStore,
        keep: Callable[[Settings], None],
        flush_prompt: Callable[[], None],
        wake: Callable[[], None],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._session, self._client = session, client
        self._view, self._composer = view, composer
        self._settings, self._keep = settings, keep
        self._flush_prompt, self._wake = flush_prompt, wake
        self._wire_chats()
        self._wire_answer()
        self._wire_composer()
        self._wire_steps()
        self.album = ImageAlbum(session, client, self)
        self.pictures = DraftImages(session, client, self.album, self)
        self._view.set_album(self.album)
        self.album.enlarged.connect(self._enlarge)
        self.album.noticed.connect(self.noticed)
        self.pictures.noticed.connect(self._notify_draft)
        self.files = AttachmentPresenter(session, client, composer, self.pictures, self)
        self.files.noticed.connect(self._notify_draft)
        self._context = ContextPresenter(
            session, client, composer, self.files.draft_text, lambda: self.pictures.n_tokens, self
        )
        self._context.noticed.connect(self.noticed)
        self.files.changed.connect(self._context.counter.look)
        self.pictures.changed.connect(self._context.counter.count_images)

    def start(self) -> None:
        """Show the chats, and open the last one."""
        current = self._settings.current
        self._session.start(current.last_chat, current.system_prompt)

    def flush(self) -> None:
        """Store typed text now, before another chat opens or the window closes."""
        self._composer.flush_draft()
        self._flush_prompt()

    @Slot()
    def new_chat(self) -> None:
        self.flush()
        self._session.new_chat(self._settings.current.system_prompt)
        self._composer.setFocus()

    @Slot(str)
    def open_chat(self, chat_id: str) -> None:
        self.flush()
        self._session.open_chat(chat_id)

    @Slot(object)
    def delete_chats(self, chat_ids: Collection[str]) -> None:
        self.flush()
        self._session.delete(chat_ids, self._settings.current.system_prompt)

    @Slot(str)
    def send(self, text: str) -> None:
        """Send a message; text that cannot be sent now stays in the composer."""
        self._flush_prompt()
        self._wake()
        if text and not self._composer.text:  # a prompt from the start page may have to wait
            self._composer.set_text(text)
            self._session.set_draft(text)
        files, pictures = self.files.ready_files(), self.pictures.ready()
        if files is None or pictures is None or not self._context.may_send(text):
            return
        if self._session.send(text, files, pictures):
            self._composer.set_text("")
            self.pictures.clear()
            self.files.clear()

    @Slot(int, str)
    def edit(self, message_id: int, text: str) -> None:
        """Send an edited question; if that fails, add it to the draft."""
        self.flush()
        if not self._session.edit(message_id, text):
            draft = "\n\n".join(
                part for part in (self._session.current.draft, text) if part.strip()
            )
            self._session.set_draft(draft)
            self._composer.set_text(draft)

    @Slot(object)
    def _notify_draft(self, notice: Notice) -> None:
        self.noticed.emit(of_chat(notice, self._session.current.id))

    @Slot(object, int)
    def _enlarge(self, pictures: Sequence[ChatImage], at: int) -> None:
        from app.chat.views.image_viewer import ImageViewer  # late: rarely needed

        ImageViewer(pictures, at, self.album, self._view).open()

    def _wire_chats(self) -> None:
        self._session.leaving.connect(self.flush)
        self._session.opened.connect(self._on_opened)
        self._session.noticed.connect(self.noticed)
        theme_signals().changed.connect(self._refresh)
        self._view.screen_changed.connect(self._refresh)

    def _wire_answer(self) -> None:
        session, view, client = self._session, self._view, self._client
        view.resend_requested.connect(self.edit)
        view.continue_requested.connect(session.go_on)
        session.answer_text.connect(view.grow)
        session.answer_text.connect(self._show_status)  # the first text replaces "Waiting…"
        session.answer_closed.connect(view.close_answer)
        session.answers_changed.connect(self._show_status)
        client.prefill.connect(lambda _done, _total, answer: self._on_progress(answer))
        client.paced.connect(self._on_progress)
        client.shifted.connect(self._on_shifted)

    def _wire_composer(self) -> None:
        session, composer = self._session, self._composer
        session.draft_restored.connect(composer.set_text)
        composer.sent.connect(self.send)
        composer.stop_requested.connect(session.stop)
        composer.draft_changed.connect(session.set_draft)

    def _wire_steps(self) -> None:
        session, view = self._session, self._view
        steps = BranchSteps(session, self)
        steps.noticed.connect(self.noticed)
        self._steps = {
            MessageStep.REGENERATE: session.regenerate,
            MessageStep.FORK: steps.fork,
            MessageStep.DELETE: steps.delete_message,
            MessageStep.DELETE_BRANCH: steps.delete_branch,
        }
        view.step_chosen.connect(lambda step, message_id: self._steps[step](message_id))
        view.version_chosen.connect(session.choose)
        view.answer_edited.connect(steps.edit_answer)
        session.path_changed.connect(self._on_path)
        session.message_changed.connect(lambda number: view.rebuild(number, session.growing))
        session.shown_at.connect(view.show_message)
        view.call_chosen.connect(self._take_call_step)
        session.calls_changed.connect(view.show_calls)
        session.calls_wait.connect(self._on_calls_wait)

    @Slot(object, int, str)
    def _take_call_step(self, step: CallStep, message_id: int, call_id: str) -> None:
        chat, calls = self._session.current, self._session.calls
        steps = {
            CallStep.RUN: calls.run,
            CallStep.REFUSE: calls.refuse,
            CallStep.STOP: calls.stop_call,
        }
        if (message := chat.tree.get(message_id)) is not None:
            steps[step](chat, message, call_id)

    @Slot(object)
    def _on_calls_wait(self, chat: Conversation) -> None:
        if chat is not self._session.current:
            text = tr("“{title}”: a tool call is waiting for approval.")
            self.noticed.emit(
                Notice(
                    text.format(title=chat.shown_title),
                    action=tr("Show"),
                    on_action=lambda: self._session.open_chat(chat.id),
                )
            )

    @Slot(object)
    def _on_opened(self, chat: Conversation) -> None:
        self.opened.emit(not chat.is_empty)
        self._refresh()
        self._keep(replace(self._settings.current, last_chat=chat.id))

    @Slot()
    def _on_path(self) -> None:
        self.opened.emit(not self._session.current.is_empty)  # the view may still be hidden
        self._show_status()
        self._view.show_path(self._session.growing)
        self._view.set_status("…")

    @Slot()
    def _refresh(self) -> None:
        self._view.show_chat(self._session.current, self._session.growing)
        self._show_status()

    @Slot(object)
    def _on_progress(self, answer: RunningAnswer) -> None:
        here = self._session.answer_here
        if here is not None and here.running is answer:
            self._show_status()

    @Slot()
    def _show_status(self) -> None:
        if (here := self._session.answer_here) is not None:
            self._view.set_status(status_text(here.running))

    @Slot(int, object)
    def _on_shifted(self, n_dropped: int, answer: RunningAnswer) -> None:
        text = tr("The context was full, so the oldest {n} tokens were dropped.").format(
            n=n_dropped
        )
        chat = next((one.chat for one in self._session.answers if one.running is answer), None)
        if chat is not None and chat is not self._session.current:
            text = f"“{chat.shown_title}”: {text}"
        self.noticed.emit(Notice(text))


class BranchSteps(QObject):
    """Changes to the open chat's messages; a notice offers to undo each one, except a fork."""

    noticed = Signal(object)  # Notice

    def __init__(self, session: ChatSession, parent: QObject) -> None:
        super().__init__(parent)
        self._session = session

    @Slot(int, str)
    def edit_answer(self, message_id: int, text: str) -> None:
        """Edit an answer in place; keep later messages."""
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
        self._offer_undo(tr("The answer was replaced with your text."), undo)

    @Slot(int)
    def delete_message(self, message_id: int) -> None:
        """Delete one message; keep later ones."""
        chat = self._session.current
        if message_id in chat.tree:
            self._session.end_answer([chat.tree[message_id]])
            removed = chat.tree.remove(message_id)
            self._after_removal(chat, removed, tr("The message was deleted."))

    @Slot(int)
    def delete_branch(self, message_id: int) -> None:
        """Delete a message and everything after it, in all versions."""
        chat = self._session.current
        if message_id in chat.tree:
            self._session.end_answer(chat.tree.branch(message_id))
            removed = chat.tree.remove_branch(message_id)
            n = len(removed.nodes)
            self._after_removal(
                chat, removed, tr_n("{n} message was deleted.", "{n} messages were deleted.", n)
            )

    @Slot(int)
    def fork(self, message_id: int) -> None:
        """Open a new chat with the messages up to and including this one."""
        chat = self._session.current
        if message_id in chat.tree:
            made = chat.fork(message_id)
            made.title = tr("{title} (fork)").format(title=chat.shown_title)
            self._session.take(made)

    def _after_removal(self, chat: Conversation, removed: Removed, sentence: str) -> None:
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


def status_text(answer: RunningAnswer) -> str:
    """Return the status text below a running answer."""
    if answer.stage is AnswerStage.WAITING:
        return tr("Waiting…")
    if answer.stage is AnswerStage.READING and answer.n_read < answer.n_prompt:
        reading = tr("Reading the prompt · {done} of {total} tokens")
        return reading.format(done=answer.n_read, total=answer.n_prompt)
    return decimal(f"{answer.tokens_per_s:.1f} tok/s") if answer.tokens_per_s else "…"
