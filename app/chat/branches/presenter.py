"""The presenter of versions and branches: connects steps and session with the conversation."""

from __future__ import annotations

from PySide6.QtCore import QObject, Signal, Slot

from app.chat.branches.steps import BranchSteps
from app.chat.branches.views.message_steps import MessageStep
from app.chat.session import ChatSession
from app.chat.views.chat_view import ChatView


class BranchPresenter(QObject):
    """Connection of the steps that a person takes with messages, and of what they change."""

    noticed = Signal(object)  # Notice
    changed = Signal()  # other messages are shown

    def __init__(self, session: ChatSession, view: ChatView, parent: QObject) -> None:
        super().__init__(parent)
        self._session, self._view = session, view
        steps = BranchSteps(session, self)
        steps.noticed.connect(self.noticed)
        self._steps = {
            MessageStep.REGENERATE: session.regenerate,
            MessageStep.FORK: steps.fork,
            MessageStep.DELETE: steps.delete_message,
            MessageStep.DELETE_BRANCH: steps.delete_branch,
        }
        view.step_chosen.connect(self._take_step)
        view.version_chosen.connect(session.choose)
        view.answer_edited.connect(steps.edit_answer)
        session.path_changed.connect(self._show_path)
        session.message_changed.connect(self._rebuild)
        session.shown_at.connect(view.show_message)

    @Slot(object, int)
    def _take_step(self, step: MessageStep, message_id: int) -> None:
        self._steps[step](message_id)

    @Slot()
    def _show_path(self) -> None:
        self.changed.emit()  # first, as the conversation may not be seen yet
        self._view.show_path(self._session.growing)
        self._view.set_status("…")

    @Slot(int)
    def _rebuild(self, message_id: int) -> None:
        self._view.rebuild(message_id, self._session.growing)
