"""The view of a model's thought in front of its answer."""

from __future__ import annotations

from PySide6.QtCore import Qt, Slot
from PySide6.QtWidgets import QFrame, QPlainTextEdit, QVBoxLayout, QWidget

from app.core.translation import tr, tr_n
from app.core.units import decimal
from app.widgets.buttons import button
from engine import printable


class ThoughtView(QFrame):
    """View of the model's thought, folded at first."""

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
        """Show how long the thought has taken, which is complete."""
        parts = (
            [tr("Thought for {seconds} s").format(seconds=decimal(f"{seconds:.1f}"))]
            if seconds
            else []
        )
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
