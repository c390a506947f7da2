"""The presenter of the chats: connects their session with their views."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from PySide6.QtCore import QObject, Signal, Slot

from app.chat.attachments.presenter import AttachmentPresenter
from app.chat.branches.presenter import BranchPresenter
from app.chat.context.counter import Draft
from app.chat.context.presenter import ContextPresenter
from app.chat.conversation import Conversation
from app.chat.pictures.album import PictureAlbum
from app.chat.pictures.draft import DraftPictures
from app.chat.pictures.picture import ChatPicture
from app.chat.running.running_chip import status_text
from app.chat.session import ChatSession
from app.chat.tools.presenter import CallPresenter
from app.chat.views.chat_view import ChatView
from app.chat.views.composer import Composer
from app.core.engine_client import EngineClient, RunningAnswer
from app.core.notice import Notice, of_chat
from app.core.settings import Settings, SettingsStore
from app.core.translation import tr
from app.widgets.theme import theme_signals


@dataclass(frozen=True, slots=True)
class ChatViews:
    """The widgets that show the chats.

    Attributes:
        conversation: messages of the open chat.
        composer: input line of the open chat.
    """

    conversation: ChatView
    composer: Composer


class ChatPresenter(QObject):
    """Connection of one `ChatSession` with its views.

    Args:
        keep: stores settings and has them written.
        flush_prompt: stores a system prompt that is being typed.
        wake: loads a model that was unloaded because nobody used it; called before messages are
            sent.
    """

    noticed = Signal(object)  # Notice
    opened = Signal(bool)  # whether the chat that is shown now has messages

    def __init__(
        self,
        session: ChatSession,
        client: EngineClient,
        views: ChatViews,
        settings: SettingsStore,
        keep: Callable[[Settings], None],
        flush_prompt: Callable[[], None],
        wake: Callable[[], None],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._session, self._client, self._views = session, client, views
        self._settings, self._keep = settings, keep
        self._flush_prompt, self._wake = flush_prompt, wake
        self._view = views.conversation
        self._wire_chats()
        self._wire_answer()
        self._wire_composer()
        self.album = PictureAlbum(session, client, self)
        self.pictures = DraftPictures(session, client, self.album, self)
        self._view.set_album(self.album)
        self.album.enlarged.connect(self._enlarge)
        self.album.noticed.connect(self.noticed)
        self.pictures.noticed.connect(self._notify_draft)
        self.files = AttachmentPresenter(session, client, views.composer, self.pictures, self)
        self.files.noticed.connect(self._notify_draft)
        draft = Draft(self.files.draft_text, lambda: self.pictures.n_tokens)
        self._context = ContextPresenter(session, client, views.composer, draft, self)
        self._context.noticed.connect(self.noticed)
        self.files.changed.connect(self._context.counter.look)
        self.pictures.changed.connect(self._context.counter.count_pictures)
        self._branches = BranchPresenter(session, self._view, self)
        self._branches.noticed.connect(self.noticed)
        self._branches.changed.connect(self._on_path)
        self._calls = CallPresenter(session, self._view, self)
        self._calls.noticed.connect(self.noticed)

    def start(self) -> None:
        """Show the chats, with the last one open."""
        current = self._settings.current
        self._session.start(current.last_chat, current.system_prompt)

    def flush(self) -> None:
        """Store typed text at once, before a chat is left or the window closes."""
        self._views.composer.flush_draft()
        self._flush_prompt()

    @Slot()
    def new_chat(self) -> None:
        self.flush()
        self._session.new_chat(self._settings.current.system_prompt)
        self._views.composer.setFocus()

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
        """Send a message; a text that cannot be sent now stays in the composer."""
        self._flush_prompt()
        self._wake()
        if text and not self._views.composer.text:  # a prompt of the start page may have to wait
            self._views.composer.set_text(text)
            self._session.set_draft(text)
        files, pictures = self.files.ready_files(), self.pictures.ready()
        if files is None or pictures is None or not self._context.may_send(text):
            return
        if self._session.send(text, files, pictures):
            self._views.composer.set_text("")
            self.pictures.clear()
            self.files.clear()

    @Slot(int, str)
    def edit(self, message_id: int, text: str) -> None:
        """Send a question in other words; add them to the draft if that fails."""
        self.flush()
        if not self._session.edit(message_id, text):
            draft = "\n\n".join(
                part for part in (self._session.current.draft, text) if part.strip()
            )
            self._session.set_draft(draft)
            self._views.composer.set_text(draft)

    @Slot(object)
    def _notify_draft(self, notice: Notice) -> None:
        self.noticed.emit(of_chat(notice, self._session.current.id))

    @Slot(object, int)
    def _enlarge(self, pictures: Sequence[ChatPicture], at: int) -> None:
        from app.chat.pictures.views.viewer import PictureViewer  # late: seldom wanted

        PictureViewer(pictures, at, self.album, self._view).open()

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
        session.answer_text.connect(self._show_status)  # the first text ends the waiting
        session.answer_closed.connect(view.close_answer)
        session.answers_changed.connect(self._show_status)
        client.prefill.connect(lambda _done, _total, answer: self._on_progress(answer))
        client.paced.connect(self._on_progress)
        client.shifted.connect(self._on_shifted)

    def _wire_composer(self) -> None:
        session, composer = self._session, self._views.composer
        session.draft_restored.connect(composer.set_text)
        composer.sent.connect(self.send)
        composer.stop_requested.connect(session.stop)
        composer.draft_changed.connect(session.set_draft)

    @Slot(object)
    def _on_opened(self, chat: Conversation) -> None:
        self.opened.emit(not chat.is_empty)
        self._refresh()
        self._keep(replace(self._settings.current, last_chat=chat.id))

    @Slot()
    def _on_path(self) -> None:
        """Show what depends on the messages that are shown."""
        self.opened.emit(not self._session.current.is_empty)
        self._show_status()

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
        """Show how far the answer is that is being written here."""
        if (here := self._session.answer_here) is not None:
            self._view.set_status(status_text(here.running))

    @Slot(int, object)
    def _on_shifted(self, n_dropped: int, answer: RunningAnswer) -> None:
        text = tr("The context was full: the oldest {n} tokens were dropped.").format(n=n_dropped)
        chat = next((one.chat for one in self._session.answers if one.running is answer), None)
        if chat is not None and chat is not self._session.current:
            text = f"“{chat.shown_title}”: {text}"
        self.noticed.emit(Notice(text))
