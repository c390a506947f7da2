"""The card for a tool call: tool, arguments, buttons, and the collapsed result."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Final

from PySide6.QtCore import Signal, Slot
from PySide6.QtWidgets import (
    QApplication,
    QFrame,
    QHBoxLayout,
    QPlainTextEdit,
    QPushButton,
    QVBoxLayout,
    QWidget,
)

from app.chat.markdown import TextLine, TextSpan
from app.chat.tool_use import CallState, CallStep, ToolUse, read_arguments
from app.chat.views.prose_view import ProseView
from app.core.translation import tr, tr_later, tr_n
from app.core.units import decimal_size
from app.widgets.buttons import ElidedButton, button
from app.widgets.layout import scaled
from app.widgets.text import label
from engine import one_line, printable

MAX_NAMED: Final = 24
"""Maximum number of arguments shown individually; if there are more, they are shown as JSON."""

MAX_WHOLE: Final = 4000
"""Maximum length of a text shown at full height, in characters; longer texts scroll."""

MAX_HEIGHT: Final = 240
"""Height in pixels of a scrolling text."""


class CallDetails(QWidget):
    """The arguments and result of a call.

    Each value has its own view, so that its text cannot imitate another argument.
    """

    def __init__(self, call: ToolUse, parent: QWidget) -> None:
        super().__init__(parent)
        column = QVBoxLayout(self)
        column.setContentsMargins(8, 0, 0, 4)
        column.setSpacing(2)
        for name, text in _parts(call):
            heading = label(one_line(name, 200), "muted")
            heading.setWordWrap(True)
            column.addWidget(heading)
            if text:
                column.addWidget(_text_view(text, name, self))


def _parts(call: ToolUse) -> Iterator[tuple[str, str]]:
    arguments = read_arguments(call.arguments)
    if arguments is None or len(arguments) > MAX_NAMED:
        text = call.arguments if arguments is None else _as_text(arguments)
        yield tr("Arguments"), text
    elif not arguments:
        yield tr("No arguments"), ""
    else:
        for name, value in arguments.items():
            yield name, _as_text(value)
    if call.result:
        yield tr("Result"), call.result.rstrip()


def _as_text(value: object) -> str:
    if isinstance(value, str):
        return value or '""'
    return json.dumps(value, ensure_ascii=False, indent=2)


def _text_view(text: str, name: str, parent: QWidget) -> QWidget:
    if len(text) <= MAX_WHOLE:
        prose = ProseView(parent)
        prose.setAccessibleName(one_line(name, 200))
        prose.write([TextLine((TextSpan(text),))])
        return prose
    edit = QPlainTextEdit(parent, readOnly=True)
    edit.setAccessibleName(one_line(name, 200))
    edit.setPlainText(printable(text))
    scaled(edit, edit.setFixedHeight, MAX_HEIGHT)
    return edit


STATES: Final[dict[CallState, str]] = {
    "writing": tr_later("cut off"),
    "cut": tr_later("cut off"),
    "waiting": tr_later("waiting for approval"),
    "running": tr_later("running…"),
    "done": tr_later("done"),
    "failed": tr_later("failed"),
    "refused": tr_later("refused"),
    "stopped": tr_later("stopped"),
}
"""Display names of call states, once the answer has finished."""

OFFERED: Final[dict[CallState, tuple[CallStep, ...]]] = {
    "waiting": (CallStep.RUN, CallStep.REFUSE),
    "running": (CallStep.STOP,),
}
"""Buttons on a card, by the state of its call."""


class CallCard(QFrame):
    """View of a call, which runs only after approval."""

    chosen = Signal(object)  # CallStep

    def __init__(self, call: ToolUse, parent: QWidget) -> None:
        super().__init__(parent)
        self.setProperty("role", "call")
        self.call = call
        self._is_growing = True
        self._toggle = ElidedButton()
        self._toggle.setProperty("role", "quiet")
        self._toggle.setCheckable(True)
        self._toggle.toggled.connect(self._unfold)
        self._state = label(role="muted")
        self._details: CallDetails | None = None
        head = QHBoxLayout()
        head.addWidget(self._toggle)
        head.addStretch(1)
        head.addWidget(self._state)
        self._steps = {step: self._make_button(step) for step in CallStep}
        row = QHBoxLayout()
        row.setContentsMargins(8, 0, 0, 0)
        for made in self._steps.values():
            row.addWidget(made)
        row.addStretch(1)
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(6, 4, 12, 8)
        self._column.setSpacing(4)
        self._column.addLayout(head)
        self._column.addLayout(row)

    @property
    def is_waiting(self) -> bool:
        """Whether the call is awaiting approval."""
        return self.call.state == "waiting"

    def take_focus(self) -> None:
        """Focus the button that runs the call."""
        self._steps[CallStep.RUN].setFocus()

    def show_call(self, call: ToolUse, *, is_growing: bool) -> None:
        """Show a call's current state, expanded while it is waiting or running, else collapsed.

        Args:
            is_growing: whether the call's answer is running.
        """
        is_other = call.state != self.call.state
        self.call, self._is_growing = call, is_growing
        for step, made in self._steps.items():
            made.setVisible(step in OFFERED.get(call.state, ()))
        self._toggle.setEnabled(call.state != "writing")
        if is_other:
            self._drop_details()
        if is_other or self._details is None:
            self._toggle.setChecked(call.is_open)
            self._unfold()
        self._show_texts()

    def _make_button(self, step: CallStep) -> QPushButton:
        text, name = {
            CallStep.RUN: (tr("Run"), tr("Run {tool}")),
            CallStep.REFUSE: (tr("Refuse"), tr("Refuse {tool}")),
            CallStep.STOP: (tr("Stop"), tr("Stop {tool}")),
        }[step]
        role = "primary" if step is CallStep.RUN else ""
        made = button(text, role, name.format(tool=one_line(self.call.title, 60)))
        made.clicked.connect(lambda: self.chosen.emit(step))
        made.hide()
        return made

    def _show_texts(self) -> None:
        call = self.call
        arrow = "▾" if self._toggle.isChecked() else "▸"
        title = " · ".join(filter(None, (one_line(call.title), one_line(call.server))))
        state = tr(STATES[call.state])
        if call.state == "writing" and self._is_growing:
            n = len(call.arguments)
            state = tr_n("being written · {n} character", "being written · {n} characters", n)
        elif call.state == "done":
            state = f"{state} · {decimal_size(len(call.result.encode(errors='replace')))}"
        self._toggle.set_full_text(f"{arrow} {title}")
        self._toggle.setAccessibleName(f"{title}, {state}")
        self._state.setText(state)
        self.setAccessibleName(tr("Tool call: {what}").format(what=f"{title}, {state}"))

    @Slot()
    def _unfold(self) -> None:
        is_open = self._toggle.isChecked()
        if is_open and self._details is None:
            self._details = CallDetails(self.call, self)
            self._column.insertWidget(1, self._details)
        if self._details is not None:
            self._details.setVisible(is_open)
        self._show_texts()

    def _drop_details(self) -> None:
        if self._details is not None:
            self._column.removeWidget(self._details)
            self._details.hide()
            self._details.deleteLater()
            self._details = None


class CallList(QWidget):
    """The cards for an answer's calls."""

    chosen = Signal(object, str)  # CallStep, id of a call

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.cards: list[CallCard] = []
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(6)

    def show_calls(self, calls: Sequence[ToolUse], *, is_growing: bool) -> None:
        """Show the current calls; if the focused button vanishes, focus the next waiting call."""
        focused = QApplication.focusWidget()
        had_focus = focused is not None and self.isAncestorOf(focused)
        kept = {card.call.id: card for card in self.cards}
        ids = {call.id for call in calls}
        for number, card in kept.items():
            if number not in ids:
                self._column.removeWidget(card)
                card.hide()
                card.deleteLater()
        self.cards = [kept.get(call.id) or self._make(call) for call in calls]
        for card, call in zip(self.cards, calls, strict=True):
            card.show_call(call, is_growing=is_growing)
        waiting = next((card for card in self.cards if card.is_waiting), None)
        if had_focus and waiting is not None and focused is not None and not focused.isVisible():
            waiting.take_focus()

    def _make(self, call: ToolUse) -> CallCard:
        card = CallCard(call, self)
        card.chosen.connect(lambda step: self.chosen.emit(step, card.call.id))
        self._column.addWidget(card)
        card.show()
        return card
