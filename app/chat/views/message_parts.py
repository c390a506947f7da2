"""Parts of messages: menu, version switch, editor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from PySide6.QtCore import Signal, Slot
from PySide6.QtGui import QKeyEvent, QTextCursor
from PySide6.QtWidgets import QFrame, QHBoxLayout, QMenu, QVBoxLayout, QWidget

from app.chat.views.composer import GrowingEdit
from app.core.translation import tr
from app.widgets.buttons import IconButton, button
from app.widgets.shortcuts import is_pressed
from app.widgets.text import caption_text, label


class MessageStep(Enum):
    """An action in a message's menu; the view itself handles `EDIT`."""

    EDIT = "edit"
    REGENERATE = "regenerate"
    FORK = "fork"
    DELETE = "delete"
    DELETE_BRANCH = "delete branch"


def step_menu(parent: QWidget, *, is_answer: bool, on_step: Callable[[MessageStep], None]) -> QMenu:
    """Return a message's menu."""
    menu = QMenu(parent)
    texts = {MessageStep.EDIT: tr("Edit answer") if is_answer else tr("Edit and send again")}
    if is_answer:
        texts[MessageStep.REGENERATE] = tr("Regenerate")
    texts[MessageStep.FORK] = tr("New chat from here")
    for step, text in texts.items():
        menu.addAction(caption_text(text)).triggered.connect(lambda _, s=step: on_step(s))
    menu.addSeparator()
    for step, text in (
        (MessageStep.DELETE, tr("Delete message")),
        (MessageStep.DELETE_BRANCH, tr("Delete this and all that follow")),
    ):
        menu.addAction(caption_text(text)).triggered.connect(lambda _, s=step: on_step(s))
    return menu


class VersionSwitch(QWidget):
    """Two buttons with text like "1/2" between them; hidden if there is only one version."""

    chosen = Signal(int)  # id of another version

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._ids: Sequence[int] = ()
        self._place = 0
        self._older = IconButton("chevron-left", tr("Previous version (Alt+Left)"), self, size=16)
        self._newer = IconButton("chevron-right", tr("Next version (Alt+Right)"), self, size=16)
        self._count = label(role="muted")
        self._older.clicked.connect(lambda: self.go(-1))
        self._newer.clicked.connect(lambda: self.go(1))
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(1)
        for part in (self._older, self._count, self._newer):
            row.addWidget(part)
        self.hide()

    @property
    def text(self) -> str:
        """The text between the buttons, or ""."""
        return self._count.text() if len(self._ids) > 1 else ""

    def set_versions(self, ids: Sequence[int], shown: int) -> None:
        """Show the position of version `shown` among all versions `ids`."""
        if ids == self._ids and ids[self._place] == shown:
            return
        self._ids, self._place = ids, ids.index(shown)
        number, total = self._place + 1, len(ids)
        self._count.setText(f"{number}/{total}")
        words = tr("Version {number} of {total}").format(number=number, total=total)
        self._count.setAccessibleName(words)
        self._older.setEnabled(number > 1)
        self._newer.setEnabled(number < total)
        self.setVisible(total > 1)

    @property
    def focused_step(self) -> int:
        """Step of the focused button, -1 or 1; 0 if neither button has the focus."""
        return int(self._newer.hasFocus()) - int(self._older.hasFocus())

    def take_focus(self, step: int) -> None:
        """Focus the button for a step, or the other button if that one is disabled."""
        is_newer = self._newer.isEnabled() if step > 0 else not self._older.isEnabled()
        (self._newer if is_newer else self._older).setFocus()

    def go(self, step: int) -> None:
        """Request the version `step` places away, if there is one."""
        if 0 <= (place := self._place + step) < len(self._ids):
            self.chosen.emit(self._ids[place])


class TurnEditor(QFrame):
    """Editor for a message: Enter sends a question again, Ctrl+Enter saves an answer."""

    accepted = Signal(str)
    cancelled = Signal()

    def __init__(self, text: str, parent: QWidget, *, is_answer: bool = False) -> None:
        super().__init__(parent)
        self.setProperty("role", "composer")
        self.edit = GrowingEdit(self, has_lines=is_answer)
        name = tr("Edit the answer") if is_answer else tr("Edit your message")
        self.edit.setAccessibleName(name)
        self.edit.setPlainText(text)
        self.edit.moveCursor(QTextCursor.MoveOperation.End)
        self.edit.submitted.connect(self._accept)
        self.edit.focus_changed.connect(self.update)
        self.setFocusProxy(self.edit)  # the frame shows the focus
        cancel = button(tr("Cancel"), "quiet", tr("Cancel editing"))
        cancel.clicked.connect(self.cancelled)
        accept = button(tr("Save") if is_answer else tr("Send again"), "primary")
        accept.clicked.connect(self._accept)
        row = QHBoxLayout()
        row.addStretch()
        row.addWidget(cancel)
        row.addWidget(accept)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(14, 10, 10, 10)
        layout.addWidget(self.edit)
        layout.addLayout(row)

    @Slot()
    def _accept(self) -> None:
        self.accepted.emit(self.edit.toPlainText())

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if is_pressed("leave-edit", event):
            self.cancelled.emit()
        else:
            super().keyPressEvent(event)
