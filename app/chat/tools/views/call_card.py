"""The card of a call: the tool and its arguments, what a person may do, and the result, folded."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import Signal, Slot
from PySide6.QtWidgets import QFrame, QHBoxLayout, QPushButton, QVBoxLayout, QWidget

from app.chat.tools.tool_use import CallState, CallStep, ToolUse
from app.chat.tools.views.call_details import CallDetails
from app.core.translation import tr, tr_later, tr_n
from app.core.units import decimal_size
from app.widgets.buttons import ElidedButton, button
from app.widgets.text import label
from engine import one_line

STATES: Final[dict[CallState, str]] = {
    "writing": tr_later("cut off"),
    "cut": tr_later("cut off"),
    "waiting": tr_later("waits for you"),
    "running": tr_later("running…"),
    "done": tr_later("done"),
    "failed": tr_later("failed"),
    "refused": tr_later("refused"),
    "stopped": tr_later("stopped"),
}
"""Names of the states of a call whose answer has ended."""

OFFERED: Final[dict[CallState, tuple[CallStep, ...]]] = {
    "waiting": (CallStep.RUN, CallStep.REFUSE),
    "running": (CallStep.STOP,),
}
"""Steps that a card offers, by the state of its call."""


class CallCard(QFrame):
    """View of one call; nothing of it runs before a person presses the button."""

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
        """Whether a person is asked about the call."""
        return self.call.state == "waiting"

    def take_focus(self) -> None:
        """Give the focus to the button that runs the call."""
        self._steps[CallStep.RUN].setFocus()

    def show_call(self, call: ToolUse, *, is_growing: bool) -> None:
        """Show a call as it is now: open while somebody has to see it, else folded.

        Args:
            is_growing: whether its answer is still being written.
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
        texts = {CallStep.RUN: tr("Run"), CallStep.REFUSE: tr("Refuse"), CallStep.STOP: tr("Stop")}
        names = {
            CallStep.RUN: tr("Run {tool}"),
            CallStep.REFUSE: tr("Refuse {tool}"),
            CallStep.STOP: tr("Stop {tool}"),
        }
        role = "primary" if step is CallStep.RUN else ""
        made = button(texts[step], role, names[step].format(tool=one_line(self.call.title, 60)))
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
