"""Editors of the fields of sampling: one for each kind of value."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from PySide6.QtWidgets import (
    QCheckBox,
    QComboBox,
    QDoubleSpinBox,
    QLineEdit,
    QPlainTextEdit,
    QSpinBox,
    QWidget,
)

from app.core.translation import tr
from app.widgets.controls import ignore_wheel

INT_MAX = 2**31 - 1

LINES = 3
"""Lines of text that a field for several texts shows."""

Setter = Callable[[Any], None]
OnChange = Callable[[object], None]


def make_editor(meta: Mapping[str, Any], on_change: OnChange) -> tuple[QWidget, Setter]:
    """Return the editor for a field, and the function that shows a value in it."""
    if meta.get("choices"):
        return _choice_editor(meta, on_change)
    if meta["kind"] is bool:
        box = QCheckBox()
        box.toggled.connect(on_change)
        return box, box.setChecked
    if meta["kind"] is tuple:
        return _lines_editor(on_change) if meta.get("has_lines") else _texts_editor(on_change)
    if meta["kind"] is dict:
        return _biases_editor(on_change)
    if meta["kind"] is str:
        return _long_editor(on_change) if meta["is_long"] else _text_editor(on_change)
    if meta["max"] > INT_MAX:
        return _large_number_editor(on_change)
    return _number_editor(meta, on_change)


def is_wide(meta: Mapping[str, Any]) -> bool:
    """Return whether an editor wants a line of its own."""
    return meta["kind"] in (tuple, dict) or (meta["kind"] is str and not meta.get("choices"))


def _choice_editor(meta: Mapping[str, Any], on_change: OnChange) -> tuple[QWidget, Setter]:
    choices = list(meta["choices"])
    box = QComboBox()
    ignore_wheel(box, always=True)
    box.addItems([tr(choice.capitalize()) for choice in choices])
    box.currentIndexChanged.connect(lambda index: on_change(choices[index]))
    return box, lambda value: box.setCurrentIndex(choices.index(value))


def _texts_editor(on_change: OnChange) -> tuple[QWidget, Setter]:
    """Return an editor for texts, in which line breaks and tabs stand as \\n and \\t."""
    line = QLineEdit()
    line.setPlaceholderText(tr("separate with ;"))
    line.textEdited.connect(
        lambda text: on_change(tuple(_unescaped(part) for part in text.split(";") if part))
    )
    return line, lambda value: line.setText(";".join(map(_escaped, value)))


def _lines_editor(on_change: OnChange) -> tuple[QWidget, Setter]:
    """Return an editor for texts, one in each line."""
    edit = QPlainTextEdit()
    edit.setPlaceholderText(tr("one per line"))
    edit.setTabChangesFocus(True)
    edit.setLineWrapMode(QPlainTextEdit.LineWrapMode.NoWrap)
    edit.setFixedHeight((LINES + 1) * edit.fontMetrics().lineSpacing() + 8)

    def texts() -> tuple[str, ...]:
        return tuple(_unescaped(line) for line in edit.toPlainText().split("\n") if line)

    def show(value: tuple[str, ...]) -> None:
        if texts() != value:  # a line that is being typed stays as it is
            edit.setPlainText("\n".join(map(_escaped, value)))

    edit.textChanged.connect(lambda: on_change(texts()))
    return edit, show


def _text_editor(on_change: OnChange) -> tuple[QWidget, Setter]:
    line = QLineEdit()
    line.textEdited.connect(on_change)
    return line, line.setText


def _long_editor(on_change: OnChange) -> tuple[QWidget, Setter]:
    """Return an editor for a text of several lines."""
    edit = QPlainTextEdit()
    edit.setTabChangesFocus(True)
    edit.setLineWrapMode(QPlainTextEdit.LineWrapMode.NoWrap)
    edit.setFixedHeight((2 * LINES + 1) * edit.fontMetrics().lineSpacing() + 8)

    def show(value: str) -> None:
        if edit.toPlainText() != value:  # else the cursor would jump
            edit.setPlainText(value)

    edit.textChanged.connect(lambda: on_change(edit.toPlainText()))
    return edit, show


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")


def _unescaped(text: str) -> str:
    signs = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}
    return re.sub(r"\\[nt\\]", lambda found: signs[found[0]], text)


def _biases_editor(on_change: OnChange) -> tuple[QWidget, Setter]:
    """Return an editor for numbers by token id, such as "42=-inf; 7=2.5"."""
    line = QLineEdit()
    line.setPlaceholderText(tr("token id=number; …"))

    def report(text: str) -> None:
        pairs = [part.partition("=")[::2] for part in text.split(";") if part.strip()]
        try:
            on_change(tuple((int(token), float(bias)) for token, bias in pairs))
        except ValueError:
            return  # half typed

    line.textEdited.connect(report)
    return line, lambda value: line.setText("; ".join(f"{token}={bias:g}" for token, bias in value))


def _large_number_editor(on_change: OnChange) -> tuple[QWidget, Setter]:
    """Return an editor for numbers too large for a spin box; an empty one is None."""
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
