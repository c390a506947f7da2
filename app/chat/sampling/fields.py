"""Editors for sampling fields, one for each kind of value."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import Field
from functools import partial
from typing import Any

from PySide6.QtCore import QSignalBlocker, Qt, Slot
from PySide6.QtWidgets import (
    QCheckBox,
    QComboBox,
    QDoubleSpinBox,
    QGridLayout,
    QLineEdit,
    QPlainTextEdit,
    QSpinBox,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.chat.sampling.text_editors import OrderEditor
from app.core.translation import tr, tr_n
from app.widgets.buttons import IconButton
from app.widgets.controls import ignore_wheel
from app.widgets.layout import scaled
from app.widgets.text import caption_text, label, set_tip
from app.widgets.theme import icon, set_role, theme, theme_signals

INT_MAX = 2**31 - 1

LINES = 3
"""Visible lines in an editor for several texts."""

Setter = Callable[[Any], None]
OnChange = Callable[[object], None]


def make_editor(meta: Mapping[str, Any], on_change: OnChange) -> tuple[QWidget, Setter]:
    """Return an editor for a field, and a function that shows a value in it."""
    if meta.get("choices"):
        return _choice_editor(meta, on_change)
    if meta["kind"] is bool:
        box = QCheckBox()
        box.toggled.connect(on_change)
        return box, box.setChecked
    if meta["kind"] is tuple:
        if not meta.get("has_lines"):
            return _texts_editor(on_change)
        edit, show = _plain_editor(LINES, _read_lines, _write_lines, on_change)
        edit.setPlaceholderText(tr("one per line"))
        return edit, show
    if meta["kind"] is dict:
        return _biases_editor(on_change)
    if meta["kind"] is str:
        if meta["is_long"]:
            return _plain_editor(2 * LINES, str, str, on_change)
        line = QLineEdit()
        line.textEdited.connect(on_change)
        return line, line.setText
    if meta["max"] > INT_MAX:
        return _large_number_editor(on_change)
    return _number_editor(meta, on_change)


def is_wide(meta: Mapping[str, Any]) -> bool:
    """Return whether a field's editor needs its own line."""
    return meta["kind"] in (tuple, dict) or (meta["kind"] is str and not meta.get("choices"))


def _choice_editor(meta: Mapping[str, Any], on_change: OnChange) -> tuple[QWidget, Setter]:
    choices = list(meta["choices"])
    box = QComboBox()
    ignore_wheel(box, always=True)
    box.addItems([tr(choice.capitalize()) for choice in choices])
    box.currentIndexChanged.connect(lambda index: on_change(choices[index]))
    return box, lambda value: box.setCurrentIndex(choices.index(value))


def _texts_editor(on_change: OnChange) -> tuple[QWidget, Setter]:
    line = QLineEdit()
    line.setPlaceholderText(tr("separate with ;"))
    line.textEdited.connect(
        lambda text: on_change(tuple(_unescaped(part) for part in text.split(";") if part))
    )
    return line, lambda value: line.setText(";".join(map(_escaped, value)))


def _plain_editor(
    n_lines: int, read: Callable[[str], Any], write: Callable[[Any], str], on_change: OnChange
) -> tuple[QPlainTextEdit, Setter]:
    edit = QPlainTextEdit()
    edit.setTabChangesFocus(True)
    edit.setLineWrapMode(QPlainTextEdit.LineWrapMode.NoWrap)
    edit.setFixedHeight((n_lines + 1) * edit.fontMetrics().lineSpacing() + 8)

    def show(value: Any) -> None:
        if read(edit.toPlainText()) != value:  # else the cursor would jump
            edit.setPlainText(write(value))

    edit.textChanged.connect(lambda: on_change(read(edit.toPlainText())))
    return edit, show


def _read_lines(text: str) -> tuple[str, ...]:
    return tuple(_unescaped(line) for line in text.split("\n") if line)


def _write_lines(texts: tuple[str, ...]) -> str:
    return "\n".join(map(_escaped, texts))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")


def _unescaped(text: str) -> str:
    signs = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}
    return re.sub(r"\\[nt\\]", lambda found: signs[found[0]], text)


def _biases_editor(on_change: OnChange) -> tuple[QWidget, Setter]:
    line = QLineEdit()
    line.setPlaceholderText(tr("token id=number; …"))

    def report(text: str) -> None:
        pairs = [part.partition("=")[::2] for part in text.split(";") if part.strip()]
        try:
            on_change(tuple((int(token), float(bias)) for token, bias in pairs))
        except ValueError:
            return  # not fully typed yet

    line.textEdited.connect(report)
    return line, lambda value: line.setText("; ".join(f"{token}={bias:g}" for token, bias in value))


def _large_number_editor(on_change: OnChange) -> tuple[QWidget, Setter]:
    line = QLineEdit()
    line.setPlaceholderText(tr("random"))

    def report(text: str) -> None:
        if not text.strip():
            on_change(None)
        elif text.strip().isascii() and text.strip().isdigit():
            on_change(int(text))

    line.textEdited.connect(report)
    return line, lambda value: line.setText("" if value is None else str(value))


def _number_editor(meta: Mapping[str, Any], on_change: OnChange) -> tuple[QWidget, Setter]:
    box: QSpinBox | QDoubleSpinBox
    if meta["kind"] is int:
        box = QSpinBox(minimum=int(meta["min"]), maximum=min(int(meta["max"]), INT_MAX))
        box.setSingleStep(int(meta["step"]))
    else:
        box = QDoubleSpinBox(minimum=meta["min"], maximum=meta["max"], decimals=2)
        box.setSingleStep(meta["step"])
    box.setKeyboardTracking(False)
    box.setSpecialValueText(tr(meta.get("lowest", "")))
    ignore_wheel(box, always=True)
    box.valueChanged.connect(on_change)
    return box, box.setValue


EDITOR_WIDTH = 124
"""Width in pixels of an editor next to its label."""


class FieldRow:
    """Label, editor and reset button for a field.

    Args:
        spec: a field of `SamplingParams`.
        on_change: called with the field's name and the new value.
        on_reset: called with the field's name.

    Attributes:
        note: warning that the field requires sampling on the CPU.
        problem: error message for an invalid value.
    """

    def __init__(
        self, spec: Field[Any], on_change: Callable[[str, object], None],
        on_reset: Callable[[str], None],
    ) -> None:  # fmt: skip
        meta = spec.metadata
        self._title, self._is_wide = tr(str(meta["title"])), is_wide(meta)
        self.label, self.note = label(self._title), label(tr("sampled on the CPU"), "warn")
        self.problem = label(role="warn")
        made = _order_editor if spec.name == "samplers" else partial(make_editor, meta)
        self.editor, self._set = made(lambda value: on_change(spec.name, value))
        self.reset = IconButton("reset", tr("Reset {title}").format(title=self._title), size=14)
        self.reset.clicked.connect(lambda: on_reset(spec.name))
        self._build(tr(str(meta["help"])))

    def add_to(self, grid: QGridLayout) -> None:
        """Append the row's widgets to a grid."""
        row, side = grid.rowCount(), Qt.AlignmentFlag.AlignVCenter
        grid.addWidget(self.label, row, 0, side)
        grid.addWidget(self.reset, row, 2, side)
        if self._is_wide:
            grid.addWidget(self.editor, row + 1, 0, 1, 3)
        else:
            grid.addWidget(self.editor, row, 1, side)
        grid.addWidget(self.note, row + 2, 0, 1, 3)
        grid.addWidget(self.problem, row + 3, 0, 1, 3)

    def show_value(self, value: object) -> None:
        """Show a value without calling `on_change`."""
        with QSignalBlocker(self.editor):
            self._set(value)

    def mark(self, *, is_changed: bool, is_on_host: bool) -> None:
        """Show a dot if the value is changed, and the note if `is_on_host`."""
        self.label.setText(f"● {self._title}" if is_changed else self._title)
        set_role(self.label, "" if is_changed else "muted")
        self.reset.setVisible(is_changed)
        self.note.setVisible(is_on_host)

    def show_problem(self, problem: str) -> None:
        """Show an error; "" hides it."""
        self.problem.setText(problem)
        self.problem.setVisible(bool(problem))

    def _build(self, tip: str) -> None:
        self.editor.setAccessibleName(self._title)
        self.editor.setAccessibleDescription(tip)
        set_tip(self.editor, tip)
        set_tip(self.label, tip)
        self.label.setBuddy(self.editor)
        self.label.setWordWrap(True)
        if not self._is_wide:
            scaled(self.editor, self.editor.setFixedWidth, EDITOR_WIDTH)
        set_role(self.label, "muted")
        keep = self.reset.sizePolicy()
        keep.setRetainSizeWhenHidden(True)
        self.reset.setSizePolicy(keep)
        self.reset.setVisible(False)
        self.note.setVisible(False)
        self.problem.setWordWrap(True)
        self.problem.setVisible(False)


def _order_editor(on_change: OnChange) -> tuple[QWidget, Setter]:
    order = OrderEditor()
    order.changed.connect(on_change)
    return order, order.show_steps


class FieldGroup(QWidget):
    """A collapsible group of fields; `rows` has them by name."""

    def __init__(self, title: str, rows: Mapping[str, FieldRow], *, is_open: bool) -> None:
        super().__init__()
        self._title, self._n_changed, self.rows = title, 0, rows
        self.head = QToolButton()
        self.head.setProperty("role", "group")
        self.head.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextBesideIcon)
        self.head.setCheckable(True)
        self._body = QWidget()
        grid = QGridLayout(self._body)
        grid.setContentsMargins(0, 2, 0, 6)
        grid.setHorizontalSpacing(8)
        grid.setVerticalSpacing(4)
        grid.setColumnStretch(0, 1)
        for row in rows.values():
            row.add_to(grid)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(2)
        layout.addWidget(self.head)
        layout.addWidget(self._body)
        self.head.toggled.connect(self._on_toggled)
        theme_signals().changed.connect(self._refresh)
        self.head.setChecked(is_open)
        self._on_toggled(is_open)

    def set_changed(self, n_changed: int) -> None:
        """Show in the heading how many fields are changed."""
        self._n_changed = n_changed
        self._refresh()

    @Slot(bool)
    def _on_toggled(self, is_open: bool) -> None:
        self._body.setVisible(is_open)
        self._refresh()

    @Slot()
    def _refresh(self) -> None:
        n = self._n_changed
        changed = f" · {tr_n('{n} changed', '{n} changed', n)}" if n else ""
        self.head.setText(caption_text(self._title + changed))
        self.head.setAccessibleName(self._title + changed)
        name = "chevron-up" if self.head.isChecked() else "chevron-down"
        self.head.setIcon(icon(name, theme().muted))
