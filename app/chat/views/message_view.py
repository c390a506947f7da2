"""The views of a turn: a person's bubble, or an answer with its thought, text and footer."""

from __future__ import annotations

from PySide6.QtCore import QEvent, Qt, Signal, Slot
from PySide6.QtGui import QEnterEvent, QKeyEvent, QTextCursor
from PySide6.QtWidgets import (
    QApplication,
    QFrame,
    QHBoxLayout,
    QPlainTextEdit,
    QSizePolicy,
    QVBoxLayout,
    QWidget,
)

from app.chat.markdown import TextLine, TextSpan
from app.chat.message import AnswerStats, Message, split_thought
from app.chat.views.growing_edit import GrowingEdit
from app.chat.views.message_body import MessageBody
from app.chat.views.prose_view import ProseView
from app.theme import theme
from app.widgets.buttons import HoverButton, button
from app.widgets.text import ElidedLabel, label
from engine import error_line, printable

REASONS = {
    "stop": "end of turn",
    "length": "max tokens",
    "context": "context full",
    "cancelled": "stopped",
    "failed": "interrupted",
}
CAN_GO_ON = ("length", "context", "cancelled", "failed")
"""Reasons of an end after which an answer can be continued."""
INTERRUPTED = "This answer was interrupted."


def footer_text(stats: AnswerStats) -> str:
    """Return a footer like "61.8 tok/s · 412 tokens · 0.31 s to first token · end of turn"."""
    tokens = "1 token" if stats.n_tokens == 1 else f"{stats.n_tokens} tokens"
    parts = [f"{stats.tokens_per_s:.1f} tok/s"] if stats.tokens_per_s > 0 else []
    if stats.n_tokens:
        parts += [tokens, f"{stats.first_token_s:.2f} s to first token"]
    return " · ".join([*parts, REASONS.get(stats.reason, stats.reason)])


class MessageView(QWidget):
    """Base of the views of a turn; `message` is the chat's own object."""

    def __init__(self, message: Message, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.message = message
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Maximum)
        self._hovered: list[HoverButton] = []

    def add_hover_button(self, made: HoverButton) -> HoverButton:
        self._hovered.append(made)
        return made

    @property
    def copied_text(self) -> str:
        """The text that the copy button copies."""
        return self.message.content

    @Slot()
    def copy(self) -> None:
        QApplication.clipboard().setText(self.copied_text)

    def enterEvent(self, event: QEnterEvent) -> None:
        super().enterEvent(event)
        for made in self._hovered:
            made.set_shown(True)

    def leaveEvent(self, event: QEvent) -> None:
        super().leaveEvent(event)
        for made in self._hovered:
            made.set_shown(False)


class UserView(MessageView):
    """View of a person's turn: a bubble on the right that can turn into an editor."""

    resent = Signal(str)

    def __init__(self, message: Message, parent: QWidget | None = None) -> None:
        super().__init__(message, parent)
        self.setAccessibleName("Your message")
        self._text = ProseView(self)
        self._text.setAccessibleName("Your message")
        self._text.write([TextLine((TextSpan(message.content),))])
        self._bubble = QFrame(self)
        self._bubble.setProperty("role", "userBubble")
        inner = QVBoxLayout(self._bubble)
        inner.setContentsMargins(14, 11, 14, 7)
        inner.addWidget(self._text)

        copy = self.add_hover_button(HoverButton("copy", "Copy message", self))
        copy.clicked.connect(self.copy)
        edit = self.add_hover_button(HoverButton("edit", "Edit and send again", self))
        edit.clicked.connect(self.start_editing)
        self._row = QHBoxLayout()
        self._row.setSpacing(2)
        self._row.addStretch(1)
        self._row.addWidget(copy, 0, Qt.AlignmentFlag.AlignBottom)
        self._row.addWidget(edit, 0, Qt.AlignmentFlag.AlignBottom)
        self._row.addSpacing(4)
        self._row.addWidget(self._bubble)
        self._outer = QVBoxLayout(self)
        self._outer.setContentsMargins(0, 0, 0, 0)
        self._outer.addLayout(self._row)
        self._editor: _Editor | None = None

    def fit_width(self, width: int) -> None:
        """Make the bubble as wide as its text, at most four fifths of the column."""
        document = self._text.document().clone(self)
        document.setTextWidth(-1)
        wanted = int(document.idealWidth()) + 30
        document.deleteLater()
        self._bubble.setFixedWidth(max(48, min(wanted, int(width * 0.8))))

    @Slot()
    def start_editing(self) -> None:
        if self._editor is not None:
            return
        self._editor = _Editor(self.message.content, self)
        self._editor.accepted.connect(self._resend)
        self._editor.cancelled.connect(self.stop_editing)
        self._set_row_visible(False)
        self._outer.addWidget(self._editor)
        self._editor.edit.setFocus()

    @Slot()
    def stop_editing(self) -> None:
        if self._editor is not None:
            self._outer.removeWidget(self._editor)
            self._editor.hide()
            self._editor.deleteLater()
            self._editor = None
            self._set_row_visible(True)

    @Slot(str)
    def _resend(self, text: str) -> None:
        self.stop_editing()
        self.resent.emit(text)

    def _set_row_visible(self, visible: bool) -> None:
        for widget in (self._bubble, *self._hovered):
            widget.setVisible(visible)


class _Editor(QFrame):
    """Editor of a turn: Enter sends it again, Esc cancels."""

    accepted = Signal(str)
    cancelled = Signal()

    def __init__(self, text: str, parent: QWidget) -> None:
        super().__init__(parent)
        self.setProperty("role", "composer")
        self.edit = GrowingEdit(self)
        self.edit.setAccessibleName("Edit your message")
        self.edit.setPlainText(text)
        self.edit.moveCursor(QTextCursor.MoveOperation.End)
        self.edit.submitted.connect(self._accept)
        self.edit.focus_changed.connect(self.update)
        self.setFocusProxy(self.edit)  # the frame shows the focus
        cancel = button("Cancel", "quiet", "Cancel editing")
        cancel.clicked.connect(self.cancelled)
        send = button("Send again", "primary")
        send.clicked.connect(self._accept)
        row = QHBoxLayout()
        row.addStretch()
        row.addWidget(cancel)
        row.addWidget(send)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(14, 10, 10, 10)
        layout.addWidget(self.edit)
        layout.addLayout(row)

    @Slot()
    def _accept(self) -> None:
        self.accepted.emit(self.edit.toPlainText())

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() == Qt.Key.Key_Escape:
            self.cancelled.emit()
        else:
            super().keyPressEvent(event)


class AnswerView(MessageView):
    """View of an answer that may still be growing."""

    regenerate_requested = Signal()
    continue_requested = Signal()

    def __init__(self, message: Message, parent: QWidget | None = None) -> None:
        super().__init__(message, parent)
        self.setAccessibleName("Answer")
        self._answer = ""
        self._thought = _ThoughtView(self)
        self.body = MessageBody(self)
        self._problem = label(role="danger")
        self._problem.setWordWrap(True)
        self._status = ElidedLabel(parent=self)
        self._status.setProperty("role", "muted")
        copy = button("Copy", "quiet", "Copy answer")
        copy.clicked.connect(self.copy)
        self._again = button("Regenerate", "quiet", "Regenerate answer")
        self._again.clicked.connect(self.regenerate_requested)
        self._go_on = button("Continue", "quiet", "Continue answer")
        self._go_on.clicked.connect(self.continue_requested)
        self._is_last = False
        self._actions = QWidget(self)
        actions = QHBoxLayout(self._actions)
        actions.setContentsMargins(0, 0, 0, 0)
        actions.setSpacing(0)
        actions.addWidget(copy)
        actions.addWidget(self._go_on)
        actions.addWidget(self._again)
        footer = QHBoxLayout()
        footer.addWidget(self._status, 1)
        footer.addWidget(self._actions)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(8)
        for widget in (self._thought, self.body, self._problem):
            layout.addWidget(widget)
        layout.addLayout(footer)
        self._actions.hide()
        self._problem.hide()
        self._show()

    @property
    def copied_text(self) -> str:
        return split_thought(self.message.content).answer

    def grow(self) -> None:
        """Show the text added to the message."""
        self._show()

    def set_status(self, text: str) -> None:
        """Show the engine's present step below the answer."""
        self._status.set_full_text(text)

    def close_answer(self) -> None:
        """Show the footer of the answer, which is complete."""
        self._show()
        self.body.flush()
        message = self.message
        self._status.set_full_text(footer_text(message.stats) if message.stats else "")
        problem = message.problem or (INTERRUPTED if message.stats is None else "")
        self._problem.setText(error_line(problem))
        self._problem.setVisible(bool(problem))
        self._again.setText("Retry" if message.is_cut_off else "Regenerate")
        self._show_actions()
        self._actions.show()
        self._thought.close_thought(message.thought_s)

    def set_last(self, is_last: bool) -> None:
        """Offer to continue or replace the last answer only."""
        self._is_last = is_last
        self._show_actions()

    def _show_actions(self) -> None:
        stats = self.message.stats
        reason = stats.reason if stats else "failed"
        self._again.setVisible(self._is_last)
        can_go_on = bool(self.message.content) and reason in CAN_GO_ON
        self._go_on.setVisible(self._is_last and can_go_on)

    def _show(self) -> None:
        parts = split_thought(self.message.content)
        self._thought.set_thought(parts.thought, is_open=parts.is_open)
        if parts.answer.startswith(self._answer):
            if grown := parts.answer[len(self._answer) :]:
                self.body.append(grown)
        else:
            self.body.set_text(parts.answer)
        self._answer = parts.answer
        if parts.thought is not None and not parts.is_open:
            self._thought.close_thought(self.message.thought_s)


class _ThoughtView(QFrame):
    """View of the model's thought, folded at first."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._toggle = button("", "quiet")
        self._toggle.setCheckable(True)
        self._toggle.toggled.connect(self._unfold)
        self._text = QPlainTextEdit(self, readOnly=True)
        self._text.setAccessibleName("Thought")
        self._text.setMaximumHeight(240)
        self._text.hide()
        self._thought = ""
        self._title = ""
        self.setObjectName("thought")
        self.setStyleSheet(f"#thought {{ border: none; border-left: 2px solid {theme().line}; }}")
        layout = QVBoxLayout(self)
        layout.setContentsMargins(6, 0, 0, 0)
        layout.setSpacing(4)
        layout.addWidget(self._toggle, 0, Qt.AlignmentFlag.AlignLeft)
        layout.addWidget(self._text)
        self.hide()

    def set_thought(self, thought: str | None, *, is_open: bool) -> None:
        self.setVisible(thought is not None and (is_open or bool(thought)))
        if thought is None or thought == self._thought:
            return
        self._thought = thought
        if is_open:
            self._set_title("Thinking…")
        if self._text.isVisible():
            self._text.setPlainText(printable(thought))

    def close_thought(self, seconds: float | None) -> None:
        self._set_title("Thought" if seconds is None else f"Thought for {seconds:.1f} s")

    @Slot(bool)
    def _unfold(self, unfolded: bool) -> None:
        if unfolded:
            self._text.setPlainText(printable(self._thought))
        self._text.setVisible(unfolded)
        self._set_title(self._title)

    def _set_title(self, title: str) -> None:
        arrow = "▾" if self._toggle.isChecked() else "▸"
        if self._toggle.text() != (text := f"{arrow} {title}"):
            self._title = title
            self._toggle.setText(text)
            self._toggle.setAccessibleName(title)
