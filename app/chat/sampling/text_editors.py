"""Editors for the sampler order and the system prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from PySide6.QtCore import QEvent, QObject, QSignalBlocker, Qt, QTimer, Signal, Slot
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import (
    QAbstractItemView,
    QHBoxLayout,
    QListWidget,
    QPlainTextEdit,
    QSizePolicy,
    QVBoxLayout,
    QWidget,
)

from app.core.translation import tr, tr_later
from app.widgets.buttons import IconButton, button
from app.widgets.layout import scaled
from app.widgets.shortcuts import is_pressed
from app.widgets.text import label, list_item, set_tip
from engine import SAMPLERS

TITLES: Final = {
    "penalties": tr_later("Penalties"), "dry": tr_later("DRY"),
    "top_n_sigma": tr_later("Top-n-sigma"), "top_k": tr_later("Top-k"),
    "typical_p": tr_later("Typical-p"), "top_p": tr_later("Top-p"), "min_p": tr_later("Min-p"),
    "xtc": tr_later("XTC"), "temperature": tr_later("Temperature"),
}  # fmt: skip

STEP: Final = Qt.ItemDataRole.UserRole


class OrderEditor(QWidget):
    """List of all samplers, with checkboxes; reordered by dragging, buttons or keys."""

    changed = Signal(object)  # tuple with the names of the enabled samplers, in order

    def __init__(self) -> None:
        super().__init__()
        self._list = QListWidget()
        self._is_filling = False
        self._list.setProperty("role", "field")
        self._list.setDragDropMode(QAbstractItemView.DragDropMode.InternalMove)
        self._list.setDefaultDropAction(Qt.DropAction.MoveAction)
        self._list.installEventFilter(self)
        self.up = IconButton("chevron-up", tr("Earlier (Alt+Up)"), size=16)
        self.down = IconButton("chevron-down", tr("Later (Alt+Down)"), size=16)
        self.setFocusProxy(self._list)
        self._build()
        self.show_steps(SAMPLERS)
        self._list.itemChanged.connect(self._report)
        self._list.model().rowsMoved.connect(self._report)
        self._list.currentRowChanged.connect(self._on_row)
        self.up.clicked.connect(lambda: self.move_current(-1))
        self.down.clicked.connect(lambda: self.move_current(1))

    @property
    def steps(self) -> tuple[str, ...]:
        """Names of the enabled samplers, in order."""
        items = [self._list.item(row) for row in range(self._list.count())]
        used = [item for item in items if item.checkState() is Qt.CheckState.Checked]
        return tuple(str(item.data(STEP)) for item in used)

    def setAccessibleName(self, name: str) -> None:  # noqa: N802 Qt
        super().setAccessibleName(name)
        self._list.setAccessibleName(name)

    def show_steps(self, steps: Sequence[str]) -> None:
        """Show these samplers as enabled, and the others below them."""
        if self._list.count() and tuple(steps) == self.steps:
            return
        self._is_filling = True
        self._list.clear()
        for name in (*steps, *(name for name in SAMPLERS if name not in steps)):
            item = list_item(tr(TITLES[name]))
            item.setData(STEP, name)
            item.setFlags(item.flags() & ~Qt.ItemFlag.ItemIsDropEnabled)
            item.setCheckState(Qt.CheckState.Checked if name in steps else Qt.CheckState.Unchecked)
            self._list.addItem(item)
        self._is_filling = False
        self._on_row(self._list.currentRow())

    @Slot(int)
    def move_current(self, by: int) -> None:
        """Move the current sampler up (-1) or down (1)."""
        row = self._list.currentRow()
        if row < 0 or not 0 <= row + by < self._list.count():
            return
        self._is_filling = True
        self._list.insertItem(row + by, self._list.takeItem(row))
        self._list.setCurrentRow(row + by)
        self._is_filling = False
        self._report()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if isinstance(event, QKeyEvent) and event.type() == QEvent.Type.KeyPress:
            for name, by in (("step-up", -1), ("step-down", 1)):
                if is_pressed(name, event):
                    self.move_current(by)
                    return True
        return False

    @Slot()
    def _report(self) -> None:
        if not self._is_filling:
            self.changed.emit(self.steps)

    @Slot(int)
    def _on_row(self, row: int) -> None:
        self.up.setEnabled(row > 0)
        self.down.setEnabled(0 <= row < self._list.count() - 1)

    def _build(self) -> None:
        self._list.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self._list.setSizeAdjustPolicy(QAbstractItemView.SizeAdjustPolicy.AdjustToContents)
        self._list.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        set_tip(self._list, tr("Drag a sampler, or move it with Alt+Up and Alt+Down."))
        column = QVBoxLayout()
        for widget in (self.up, self.down):
            column.addWidget(widget)
        column.addStretch()
        layout = QHBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self._list)
        layout.addLayout(column)


PROMPT_MS = 250
"""Milliseconds before typed text is reported."""


class PromptEditor(QWidget):
    """Text field for a system prompt, with a button that makes it the default for new chats."""

    changed = Signal(str)
    default_requested = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.edit = QPlainTextEdit()
        self.edit.setPlaceholderText(tr("You are a helpful assistant."))
        self.edit.setAccessibleName(tr("System prompt"))
        self.edit.setTabChangesFocus(True)
        scaled(self.edit, self.edit.setFixedHeight, 88)
        self._timer = QTimer(self, singleShot=True, interval=PROMPT_MS)
        self._timer.timeout.connect(self._report)
        self.edit.textChanged.connect(self._on_typed)
        self.keep = button(tr("Use for new chats"), "quiet")
        self.keep.clicked.connect(self._keep)
        row = QHBoxLayout()
        row.addStretch()
        row.addWidget(self.keep)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(8)
        layout.addWidget(label(tr("System prompt for this chat"), "heading"))
        layout.addWidget(self.edit)
        layout.addLayout(row)

    def set_text(self, text: str) -> None:
        """Show a prompt without emitting a signal."""
        self._timer.stop()
        if text != self.edit.toPlainText():
            with QSignalBlocker(self.edit):
                self.edit.setPlainText(text)

    def flush(self) -> None:
        """Report typed text now, before another chat opens or a message is sent."""
        if self._timer.isActive():
            self._timer.stop()
            self._report()

    @Slot()
    def _on_typed(self) -> None:
        if not self._timer.isActive():  # a restart on every key would postpone the report
            self._timer.start()

    @Slot()
    def _report(self) -> None:
        self.changed.emit(self.edit.toPlainText())

    @Slot()
    def _keep(self) -> None:
        self.flush()
        self.default_requested.emit(self.edit.toPlainText())
