"""The view of an answer: its thought, its text, the calls in it, and its footer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QVBoxLayout, QWidget

from app.chat.branches.views.message_steps import MessageStep
from app.chat.message import Message, split_thought
from app.chat.views.answer_footer import AnswerFooter
from app.chat.views.answer_texts import problem_of
from app.chat.views.message_body import MessageBody
from app.chat.views.message_view import MessageView
from app.chat.views.thought_view import ThoughtView
from app.chat.views.turn_editor import TurnEditor
from app.core.translation import tr
from app.widgets.text import label
from engine import error_line

if TYPE_CHECKING:
    from app.chat.tools.views.call_list import CallList


class AnswerView(MessageView):
    """View of an answer that may still be growing."""

    continue_requested = Signal()
    call_chosen = Signal(object, str)  # CallStep, id of a call

    def __init__(
        self, message: Message, parent: QWidget | None = None, *, grows_up: bool = False
    ) -> None:
        super().__init__(message, parent, grows_up=grows_up)
        self.setAccessibleName(tr("Answer"))
        self._thought = ThoughtView(self)
        self.body = MessageBody(self)
        self._answer = split_thought(message.content).answer
        self.body.begin(self._answer, from_end=grows_up)
        self._problem = label(role="danger")
        self._problem.setWordWrap(True)
        self.footer = AnswerFooter(self.versions, self)
        self.footer.copy_requested.connect(self.copy)
        self.footer.again_requested.connect(lambda: self.step_chosen.emit(MessageStep.REGENERATE))
        self.footer.continue_requested.connect(self.continue_requested)
        self.footer.menu_requested.connect(self._show_menu)
        self._is_last = self._is_followed = False
        self._is_growing = True
        self._calls: CallList | None = None
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(8)
        for widget in (self._thought, self.body, self._problem, self.footer):
            layout.addWidget(widget)
            widget.raise_()  # for screen readers, which go by this order
        self._column = layout
        self._problem.hide()
        self._show()

    def make_next(self) -> bool:
        return self.body.make_next()

    @property
    def n_lines(self) -> int:
        return self.body.n_lines

    @property
    def copied_text(self) -> str:
        return split_thought(self.message.content).answer

    def grow(self) -> None:
        """Show the text added to the message."""
        self._show()

    def set_status(self, text: str) -> None:
        """Show the engine's present step below the answer."""
        self.footer.figures.set_line(text)

    def close_answer(self) -> None:
        """Show the footer of the answer, which is complete."""
        self._show()
        self.body.flush()
        self._is_growing = False
        self.show_calls()
        message = self.message
        self.footer.show_end(message)
        self._problem.setText(error_line(problem := problem_of(message)))
        self._problem.setVisible(bool(problem))
        self._show_actions()
        self._thought.close_thought(message.thought_s, message.thought_tokens)

    def set_last(self, is_last: bool) -> None:
        """Offer to continue or replace the last answer only."""
        self._is_last = is_last
        self._show_actions()

    def set_followed(self, is_followed: bool) -> None:
        """Show figures and buttons below the last part of an answer only."""
        self._is_followed = is_followed
        self._show_actions()

    def show_calls(self) -> None:
        """Show the calls of the message as they are now."""
        if self._calls is None and self.message.calls:
            from app.chat.tools.views.call_list import CallList  # late: most have no call

            self._calls = CallList(self)
            self._calls.chosen.connect(self.call_chosen)
            self._column.insertWidget(self._column.indexOf(self.body) + 1, self._calls)
            self._calls.stackUnder(self._problem)  # read before it, too
        if self._calls is not None:
            self._calls.show_calls(self.message.calls, is_growing=self._is_growing)
            self._show_actions()

    def _show_editor(self, editor: TurnEditor) -> None:
        self.body.hide()
        self.footer.buttons.hide()
        self._column.insertWidget(self._column.indexOf(self.body), editor)
        editor.stackUnder(self.body)

    def _hide_editor(self) -> None:
        self.body.show()
        self.footer.buttons.show()

    def _show_actions(self) -> None:
        self.footer.show_actions(self.message, is_last=self._is_last, is_followed=self._is_followed)

    def _show(self) -> None:
        parts = split_thought(self.message.content)
        self._thought.set_thought(parts.thought, is_open=parts.is_open)
        if parts.answer.startswith(self._answer):
            if grown := parts.answer[len(self._answer) :]:
                self.body.append(grown)
        else:
            self.body.set_text(parts.answer)
        self._answer = parts.answer
        self.show_calls()
        if parts.thought is not None and not parts.is_open:
            self._thought.close_thought(self.message.thought_s, self.message.thought_tokens)
