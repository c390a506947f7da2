"""Editors for settings, one for each kind of value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PySide6.QtCore import QSignalBlocker, QTimer, Signal, Slot
from PySide6.QtWidgets import (
    QCheckBox,
    QComboBox,
    QDoubleSpinBox,
    QFileDialog,
    QHBoxLayout,
    QLineEdit,
    QListWidget,
    QPlainTextEdit,
    QSpinBox,
    QVBoxLayout,
    QWidget,
)

from app.core.settings import ShownSetting
from app.core.translation import tr
from app.widgets.buttons import button
from app.widgets.controls import ignore_wheel
from app.widgets.text import list_item

TYPED_MS = 400
"""Milliseconds after the last key press at which a text is reported."""


class SettingEditor(QWidget):
    """Editor for a setting.

    Attributes:
        field: widget that takes the focus.
        is_wide: whether the editor needs its own line.
    """

    changed = Signal(object)
    is_wide = False

    def __init__(self, field: QWidget) -> None:
        super().__init__()
        self.field = field
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.addWidget(field)

    def show_value(self, value: Any) -> None:
        """Show a value without emitting a signal."""
        raise NotImplementedError

    def flush(self) -> None:
        """Report typed text now."""


class SwitchEditor(SettingEditor):
    """Checkbox for a boolean setting."""

    def __init__(self) -> None:
        self._box = QCheckBox()
        super().__init__(self._box)
        self._box.toggled.connect(self.changed.emit)

    def show_value(self, value: Any) -> None:
        with QSignalBlocker(self._box):
            self._box.setChecked(value)


class ChoiceEditor(SettingEditor):
    """Combo box for a setting's choices."""

    def __init__(self, shown: ShownSetting) -> None:
        self._box = QComboBox()
        super().__init__(self._box)
        ignore_wheel(self._box, always=True)
        for value, text in shown.choices.items():
            self._box.addItem(tr(text), value)
        self._box.activated.connect(lambda index: self.changed.emit(self._box.itemData(index)))

    def show_value(self, value: Any) -> None:
        self._box.setCurrentIndex(self._box.findData(value))


class NumberEditor(SettingEditor):
    """Spin box for a number."""

    def __init__(self, shown: ShownSetting, *, is_whole: bool) -> None:
        self._box = QSpinBox() if is_whole else QDoubleSpinBox()
        super().__init__(self._box)
        self._box.setRange(shown.least, shown.most)
        self._box.setSingleStep(shown.step)
        self._box.setKeyboardTracking(False)
        if shown.unit:
            self._box.setSuffix(f" {tr(shown.unit)}")
        ignore_wheel(self._box, always=True)
        self._box.valueChanged.connect(self.changed.emit)

    def show_value(self, value: Any) -> None:
        with QSignalBlocker(self._box):
            self._box.setValue(value)


class LineEditor(SettingEditor):
    """Field for a single-line text."""

    is_wide = True

    def __init__(self, shown: ShownSetting) -> None:
        self._line = QLineEdit()
        super().__init__(self._line)
        self._line.setPlaceholderText(tr(shown.hint))
        self._line.editingFinished.connect(self.flush)
        self._value = ""

    def show_value(self, value: Any) -> None:
        self._value = value
        if value != self._line.text():
            self._line.setText(value)

    @Slot()
    def flush(self) -> None:
        if self._line.text() != self._value:
            self._value = self._line.text()
            self.changed.emit(self._value)


class LongTextEditor(SettingEditor):
    """Field for a multi-line text, which is reported with a delay."""

    is_wide = True

    def __init__(self, shown: ShownSetting) -> None:
        self._text = QPlainTextEdit()
        super().__init__(self._text)
        self._text.setPlaceholderText(tr(shown.hint))
        self._text.setTabChangesFocus(True)
        self._text.setFixedHeight(6 * self._text.fontMetrics().height())
        self._typed = QTimer(self, singleShot=True, interval=TYPED_MS)
        self._typed.timeout.connect(self.flush)
        self._text.textChanged.connect(self._on_typed)
        self._is_typed = False

    def show_value(self, value: Any) -> None:
        if value != self._text.toPlainText() and not self._is_typed:
            with QSignalBlocker(self._text):
                self._text.setPlainText(value)

    @Slot()
    def flush(self) -> None:
        self._typed.stop()
        if self._is_typed:
            self._is_typed = False
            self.changed.emit(self._text.toPlainText())

    @Slot()
    def _on_typed(self) -> None:
        self._is_typed = True
        self._typed.start()


class FoldersEditor(SettingEditor):
    """List of folders, with buttons to add and remove folders."""

    is_wide = True

    def __init__(self) -> None:
        self._list = QListWidget()
        super().__init__(self._list)
        self._list.setProperty("role", "field")
        self._list.setFixedHeight(5 * self._list.fontMetrics().height())
        self._folders: tuple[str, ...] = ()
        self.add = button(tr("Add folder…"))
        self.add.clicked.connect(self._ask)
        self.remove = button(tr("Remove"), "quiet", tr("Remove the selected folder"))
        self.remove.clicked.connect(self._remove)
        self._list.currentRowChanged.connect(lambda row: self.remove.setEnabled(row >= 0))
        self.remove.setEnabled(False)
        column = QVBoxLayout()
        column.addWidget(self.add)
        column.addWidget(self.remove)
        column.addStretch()
        layout = self.layout()
        assert isinstance(layout, QHBoxLayout)
        layout.addLayout(column)

    def show_value(self, value: Sequence[str]) -> None:
        if self._folders == tuple(value) and self._list.count() == len(value):
            return
        self._folders = tuple(value)
        self._list.clear()
        for folder in self._folders:
            self._list.addItem(list_item(folder, folder))

    @Slot()
    def _ask(self) -> None:
        folder = QFileDialog.getExistingDirectory(self, tr("Add a folder"))
        if folder and folder not in self._folders:
            self._report((*self._folders, folder))

    @Slot()
    def _remove(self) -> None:
        row = self._list.currentRow()
        if row >= 0:
            self._report((*self._folders[:row], *self._folders[row + 1 :]))

    def _report(self, folders: tuple[str, ...]) -> None:
        self.show_value(folders)
        self.changed.emit(folders)


def make_editor(shown: ShownSetting, default: object) -> SettingEditor:
    """Return an editor for a setting with this default."""
    if shown.choices:
        return ChoiceEditor(shown)
    if isinstance(default, bool):
        return SwitchEditor()
    if isinstance(default, int | float):
        return NumberEditor(shown, is_whole=isinstance(default, int))
    if isinstance(default, tuple):
        return FoldersEditor()
    return LongTextEditor(shown) if shown.is_long else LineEditor(shown)
