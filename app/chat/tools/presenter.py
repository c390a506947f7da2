"""The presenter of calls: connects their session with the cards in the conversation."""

from __future__ import annotations

from PySide6.QtCore import QObject, Signal, Slot

from app.chat.conversation import Conversation
from app.chat.session import ChatSession
from app.chat.tools.tool_use import CallStep
from app.chat.views.chat_view import ChatView
from app.core.notice import Notice
from app.core.translation import tr


class CallPresenter(QObject):
    """Connection of the open chat's calls with their cards."""

    noticed = Signal(object)  # Notice

    def __init__(self, session: ChatSession, view: ChatView, parent: QObject) -> None:
        super().__init__(parent)
        self._session = session
        view.call_chosen.connect(self._take_step)
        session.calls_changed.connect(view.show_calls)
        session.calls_wait.connect(self._on_wait)

    @Slot(object, int, str)
    def _take_step(self, step: CallStep, message_id: int, call_id: str) -> None:
        chat, calls = self._session.current, self._session.calls
        steps = {
            CallStep.RUN: calls.run,
            CallStep.REFUSE: calls.refuse,
            CallStep.STOP: calls.stop_call,
        }
        if (message := chat.tree.get(message_id)) is not None:
            steps[step](chat, message, call_id)

    @Slot(object)
    def _on_wait(self, chat: Conversation) -> None:
        """Say that a chat which is not seen has calls that wait."""
        if chat is not self._session.current:
            text = tr("“{title}”: the model asks whether a tool may run.")
            self.noticed.emit(
                Notice(
                    text.format(title=chat.shown_title),
                    action=tr("Show"),
                    on_action=lambda: self._session.open_chat(chat.id),
                )
            )
