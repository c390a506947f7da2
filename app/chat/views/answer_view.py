"""The view of an answer: thought, text, tool calls, figures and buttons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from PySide6.QtCore import Qt, Signal, Slot
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QBoxLayout, QFrame, QHBoxLayout, QPlainTextEdit, QVBoxLayout, QWidget

from app.chat.message import AnswerStats, Message, split_thought
from app.chat.views.message_body import MessageBody
from app.chat.views.message_parts import MessageStep, TurnEditor, VersionSwitch
from app.chat.views.message_view import MessageView
from app.core.translation import tr, tr_later, tr_n, translated
from app.core.units import decimal, drafts_text
from app.widgets.buttons import IconButton, button
from app.widgets.text import ElidedLabel, label
from engine import error_line, printable

if TYPE_CHECKING:
    from app.chat.views.call_view import CallList


class ThoughtView(QFrame):
    """View of a model's thought, initially collapsed."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._toggle = button("", "quiet")
        self._toggle.setCheckable(True)
        self._toggle.toggled.connect(self._unfold)
        self._text = QPlainTextEdit(self, readOnly=True)
        self._text.setAccessibleName(tr("Thought"))
        self._text.setMaximumHeight(240)
        self._text.hide()
        self._thought = ""
        self._title = ""
        self.setProperty("role", "thought")
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
            self._set_title(tr("Thinking…"))
        if self._text.isVisible():
            self._text.setPlainText(printable(thought))

    def close_thought(self, seconds: float | None, n_tokens: int | None = None) -> None:
        """Show the duration and token count of the finished thought."""
        parts = []
        if seconds:
            parts.append(tr("Thought for {seconds} s").format(seconds=decimal(f"{seconds:.1f}")))
        if n_tokens:
            parts.append(tr_n("{n} token", "{n} tokens", n_tokens))
        self._set_title(" · ".join(parts) or tr("Thought"))

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


REASONS = {
    "stop": tr_later("end of turn"),
    "length": tr_later("max tokens"),
    "context": tr_later("context full"),
    "cancelled": tr_later("stopped"),
    "failed": tr_later("interrupted"),
}
CAN_GO_ON = ("length", "context", "cancelled", "failed")
"""Finish reasons after which an answer can be continued."""

INTERRUPTED = tr_later("This answer was interrupted.")


class FooterPart(NamedTuple):
    """A footer figure; if space is short, the one with the highest `place` is dropped first."""

    text: str
    place: int


def footer_of(message: Message) -> list[FooterPart]:
    """Return the footer parts for a finished answer."""
    parts = footer_parts(message.stats) if message.stats else []
    return [*parts, FooterPart(tr("edited"), 2)] if message.edited else parts


def footer_parts(stats: AnswerStats) -> list[FooterPart]:
    """Return parts like "61.8 tok/s", "412 tokens", "0.31 s to first token", "end of turn"."""
    parts = []
    if stats.tokens_per_s > 0:
        parts.append(FooterPart(decimal(f"{stats.tokens_per_s:.1f} tok/s"), 0))
    if stats.n_tokens:
        seconds = decimal(f"{stats.first_token_s:.2f}")
        first = tr("{seconds} s to first token").format(seconds=seconds)
        parts.append(FooterPart(tr_n("{n} token", "{n} tokens", stats.n_tokens), 2))
        parts.append(FooterPart(first, 4))
    if drafts := drafts_text(stats.n_accepted, stats.n_drafted, stats.draft_gain):
        parts.append(FooterPart(drafts, 3))
    reason = tr(REASONS.get(stats.reason, stats.reason))
    parts.append(FooterPart(reason, 5 if stats.reason == "stop" else 1))
    return parts


def joined(parts: Sequence[FooterPart]) -> str:
    """Return the parts as one line."""
    return " · ".join(part.text for part in parts)


def fitting_text(parts: Sequence[FooterPart], fits: Callable[[str], bool]) -> str:
    """Return the parts that fit, at least the most important one; "…" marks dropped ones."""
    kept = list(parts)
    text = joined(kept)
    while len(kept) > 1 and not fits(text):
        kept.remove(max(kept, key=lambda part: part.place))
        text = joined(kept) + " …"
    return text


def problem_of(message: Message) -> str:
    """Return a finished answer's error as a sentence, or ""."""
    return translated(message.problem) or (tr(INTERRUPTED) if message.stats is None else "")


def can_continue(message: Message) -> bool:
    """Return whether the model can continue an answer, or follow up on its call results."""
    reason = message.stats.reason if message.stats else "failed"
    has_begun = bool(message.content or message.calls) and not message.waits_for_calls
    return message.has_results or (has_begun and reason in CAN_GO_ON)


class FiguresLabel(ElidedLabel):
    """Label that drops less important figures if space is short; its tooltip has them all."""

    def __init__(self, parent: QWidget) -> None:
        self._parts: Sequence[FooterPart] = ()
        super().__init__(parent=parent)

    @property
    def least_width(self) -> int:
        """Width in pixels of the most important figure."""
        return self.fontMetrics().horizontalAdvance(fitting_text(self._parts, lambda _: False))

    def set_parts(self, parts: Sequence[FooterPart]) -> None:
        """Show figures."""
        self._parts = parts
        self.set_full_text(joined(parts))

    def set_line(self, text: str) -> None:
        """Show a line of text instead of figures."""
        self._parts = ()
        self.set_full_text(text)

    def shortened(self, text: str) -> str:
        if not self._parts:
            return super().shortened(text)
        measure = self.fontMetrics().horizontalAdvance
        return fitting_text(self._parts, lambda shown: measure(shown) <= self.width())


class AnswerFooter(QWidget):
    """Footer of an answer: figures or a status, and buttons once the answer is finished."""

    copy_requested = Signal()
    again_requested = Signal()
    continue_requested = Signal()
    menu_requested = Signal(QWidget)  # button below which to open the menu

    def __init__(self, versions: VersionSwitch, parent: QWidget) -> None:
        super().__init__(parent)
        self._versions = versions
        self.figures = FiguresLabel(self)
        self.figures.setProperty("role", "muted")
        self.copy = button(tr("Copy"), "quiet", tr("Copy answer"))
        self.again = button(tr("Regenerate"), "quiet", tr("Regenerate answer"))
        self.go_on = button(tr("Continue"), "quiet", tr("Continue answer"))
        for made, wanted in (
            (self.copy, self.copy_requested), (self.again, self.again_requested),
            (self.go_on, self.continue_requested),
        ):  # fmt: skip
            made.clicked.connect(lambda _=False, signal=wanted: signal.emit())
        more = IconButton("more", tr("More for this answer"), self, size=16)
        more.clicked.connect(lambda: self.menu_requested.emit(more))
        self.buttons = QWidget(self)
        actions = QHBoxLayout(self.buttons)
        actions.setContentsMargins(0, 0, 0, 0)
        actions.setSpacing(0)
        for each in (self.copy, self.go_on, self.again, more):
            actions.addWidget(each)
        self.buttons.setMinimumWidth(1)  # makes the buttons wrap instead of widening the window
        self.buttons.hide()
        rest = QHBoxLayout()
        rest.addWidget(versions)
        rest.addWidget(self.figures, 1)
        self._layout = QBoxLayout(QBoxLayout.Direction.LeftToRight, self)
        self._layout.setContentsMargins(0, 0, 0, 0)
        self._layout.addLayout(rest, 1)
        versions.stackUnder(self.figures)  # screen readers read it first
        self._layout.addWidget(self.buttons, 0, Qt.AlignmentFlag.AlignRight)

    def show_end(self, message: Message) -> None:
        """Show the figures and buttons of a finished answer."""
        self.figures.set_parts(footer_of(message))
        self.again.setText(tr("Retry") if message.is_cut_off else tr("Regenerate"))
        self.buttons.show()

    def show_actions(self, message: Message, *, is_last: bool, is_followed: bool) -> None:
        """Show the last answer's buttons; hide the footer if the next message continues it."""
        self.again.setVisible(is_last)
        self.go_on.setVisible(is_last and can_continue(message))
        for part in (self.figures, self.copy):
            part.setVisible(not is_followed)
        self._fit()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def _fit(self) -> None:
        needed = self.buttons.sizeHint().width() + self.figures.least_width
        needed += max(0, self._layout.spacing())
        if not self._versions.isHidden():
            needed += self._versions.sizeHint().width()
        direction = QBoxLayout.Direction
        is_narrow = needed > self.width()
        self._layout.setDirection(direction.TopToBottom if is_narrow else direction.LeftToRight)


class AnswerView(MessageView):
    """View of an answer, running or finished."""

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
            widget.raise_()  # screen readers use this order
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
        """Show the message's new text."""
        self._show()

    def set_status(self, text: str) -> None:
        """Show a status below the answer."""
        self.footer.figures.set_line(text)

    def close_answer(self) -> None:
        """Show the answer as finished, with its footer."""
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
        self._is_last = is_last
        self._show_actions()

    def set_followed(self, is_followed: bool) -> None:
        self._is_followed = is_followed
        self._show_actions()

    def show_calls(self) -> None:
        """Show the message's current calls."""
        if self._calls is None and self.message.calls:
            from app.chat.views.call_view import CallList  # late: most answers have no calls

            self._calls = CallList(self)
            self._calls.chosen.connect(self.call_chosen)
            self._column.insertWidget(self._column.indexOf(self.body) + 1, self._calls)
            self._calls.stackUnder(self._problem)  # screen readers use this order
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
