"""The panel beside the chat: system prompt and sampling.

The sampling fields come from the metadata of `SamplingParams`, so that a new one appears here
by being declared there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import Field, fields, replace
from typing import Any

from PySide6.QtCore import Qt, QTimer, Signal, Slot
from PySide6.QtWidgets import (
    QCheckBox,
    QComboBox,
    QDoubleSpinBox,
    QFrame,
    QGridLayout,
    QHBoxLayout,
    QLineEdit,
    QPlainTextEdit,
    QScrollArea,
    QSpinBox,
    QVBoxLayout,
    QWidget,
)

from app.settings import changed_sampling
from app.theme import set_role
from app.widgets.buttons import button
from app.widgets.controls import ignore_wheel, keep_margin
from app.widgets.text import label, set_tip
from engine import EngineError, SamplingParams

PROMPT_MS = 250
INT_MAX = 2**31 - 1


class SamplingPanel(QScrollArea):
    """Panel that edits a `SamplingParams` and a system prompt."""

    sampling_changed = Signal(object)  # SamplingParams
    prompt_changed = Signal(str)
    prompt_default_requested = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setWidgetResizable(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setAccessibleName("Sampling")
        self._params = self._default = SamplingParams()
        self._chosen: dict[str, Any] = {}
        self._rows: dict[str, _Row] = {}
        content = QWidget()
        content.setProperty("role", "panel")
        content.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        layout = QVBoxLayout(content)
        layout.setContentsMargins(16, 12, 16, 16)
        layout.setSpacing(8)
        layout.addWidget(label("System prompt of this chat", "heading"))
        layout.addWidget(self._make_prompt())
        layout.addLayout(self._make_prompt_row())
        layout.addSpacing(8)
        layout.addLayout(self._make_sampling_head())
        layout.addLayout(self._make_fields())
        layout.addStretch()
        self.setWidget(content)
        keep_margin(self, layout)
        self._mark_changed()

    @property
    def params(self) -> SamplingParams:
        return self._params

    @property
    def chosen(self) -> dict[str, Any]:
        """The fields that a person has set, with their values."""
        return dict(self._chosen)

    def set_default(self, default: SamplingParams) -> None:
        """Use other defaults, such as those of a model; what a person has set stays."""
        self._default = default
        self._show(replace(default, **self._chosen))

    def set_params(self, params: SamplingParams) -> None:
        """Show values that a person has chosen, without a signal."""
        self._chosen = changed_sampling(params, self._default)
        self._show(params)

    def _show(self, params: SamplingParams) -> None:
        self._params = params
        for name, row in self._rows.items():
            row.show_value(getattr(params, name))
        self._mark_changed()

    def set_prompt(self, text: str) -> None:
        self._prompt_timer.stop()
        if text != self._prompt.toPlainText():
            self._prompt.blockSignals(True)
            self._prompt.setPlainText(text)
            self._prompt.blockSignals(False)

    @Slot()
    def reset(self) -> None:
        """Set all sampling fields to their defaults."""
        self.set_params(self._default)
        self.sampling_changed.emit(self._params)

    def flush_prompt(self) -> None:
        """Report the prompt now, before a chat is opened or a message sent."""
        if self._prompt_timer.isActive():
            self._prompt_timer.stop()
            self._report_prompt()

    def _make_prompt(self) -> QPlainTextEdit:
        self._prompt = QPlainTextEdit()
        self._prompt.setPlaceholderText("You are a helpful assistant.")
        self._prompt.setAccessibleName("System prompt")
        self._prompt.setTabChangesFocus(True)
        self._prompt.setFixedHeight(88)
        self._prompt_timer = QTimer(self, singleShot=True, interval=PROMPT_MS)
        self._prompt_timer.timeout.connect(self._report_prompt)
        self._prompt.textChanged.connect(self._on_prompt_typed)
        return self._prompt

    @Slot()
    def _on_prompt_typed(self) -> None:
        if not self._prompt_timer.isActive():  # typing on and on must not put it off
            self._prompt_timer.start()

    def _make_prompt_row(self) -> QHBoxLayout:
        keep = button("Use for new chats", "quiet")
        keep.clicked.connect(self._keep_prompt)
        row = QHBoxLayout()
        row.addStretch()
        row.addWidget(keep)
        return row

    def _make_sampling_head(self) -> QHBoxLayout:
        self._reset = button("Reset", "quiet", "Reset sampling")
        self._reset.clicked.connect(self.reset)
        row = QHBoxLayout()
        row.addWidget(label("Sampling", "heading"))
        row.addStretch()
        row.addWidget(self._reset)
        return row

    def _make_fields(self) -> QGridLayout:
        grid = QGridLayout()
        grid.setHorizontalSpacing(12)
        grid.setVerticalSpacing(6)
        grid.setColumnStretch(0, 1)
        for number, spec in enumerate(fields(SamplingParams)):
            row = _Row(spec, self._on_field)
            self._rows[spec.name] = row
            grid.addWidget(row.label, number, 0)
            grid.addWidget(row.editor, number, 1)
        return grid

    def _on_field(self, name: str, value: object) -> None:
        try:
            self._params = replace(self._params, **{name: value})  # type: ignore[arg-type]
        except EngineError:
            return  # not a value yet, such as a half-typed seed
        self._chosen[name] = getattr(self._params, name)
        if self._chosen[name] == getattr(self._default, name):
            del self._chosen[name]
        self._mark_changed()
        self.sampling_changed.emit(self._params)

    def _mark_changed(self) -> None:
        changed = changed_sampling(self._params, self._default)
        for name, row in self._rows.items():
            row.mark(is_changed=name in changed)
        self._reset.setEnabled(bool(changed))

    @Slot()
    def _report_prompt(self) -> None:
        self.prompt_changed.emit(self._prompt.toPlainText())

    @Slot()
    def _keep_prompt(self) -> None:
        self.flush_prompt()
        self.prompt_default_requested.emit(self._prompt.toPlainText())


class _Row:
    """Label and editor of one field."""

    def __init__(self, spec: Field[Any], on_change: Callable[[str, object], None]) -> None:
        meta = spec.metadata
        self._title = str(meta["title"])
        self.label = label(self._title)
        self.editor, self._set = _editor(meta, lambda value: on_change(spec.name, value))
        set_tip(self.editor, meta["help"])
        set_tip(self.label, meta["help"])
        self.editor.setAccessibleName(self._title)
        self.editor.setAccessibleDescription(meta["help"])
        self.editor.setMinimumWidth(110)
        self.label.setBuddy(self.editor)
        self.show_value(spec.default)

    def show_value(self, value: object) -> None:
        self.editor.blockSignals(True)
        self._set(value)
        self.editor.blockSignals(False)

    def mark(self, *, is_changed: bool) -> None:
        """Show whether the value differs from the default: with a dot and in the text colour."""
        self.label.setText(f"● {self._title}" if is_changed else self._title)
        set_role(self.label, "" if is_changed else "muted")


Setter = Callable[[Any], None]
OnChange = Callable[[object], None]


def _editor(meta: Mapping[str, Any], on_change: OnChange) -> tuple[QWidget, Setter]:
    """Return the editor for a field, and the function that shows a value in it."""
    if meta.get("choices"):
        return _choice_editor(meta, on_change)
    if meta["kind"] is bool:
        box = QCheckBox()
        box.toggled.connect(on_change)
        return box, box.setChecked
    if meta["kind"] is tuple:
        return _texts_editor(on_change)
    if meta["kind"] is dict:
        return _biases_editor(on_change)
    if meta["max"] > INT_MAX:
        return _large_number_editor(on_change)
    return _number_editor(meta, on_change)


def _choice_editor(meta: Mapping[str, Any], on_change: OnChange) -> tuple[QWidget, Setter]:
    choices = list(meta["choices"])
    box = QComboBox()
    ignore_wheel(box, always=True)
    box.addItems([choice.capitalize() for choice in choices])
    box.currentIndexChanged.connect(lambda index: on_change(choices[index]))
    return box, lambda value: box.setCurrentIndex(choices.index(value))


def _texts_editor(on_change: OnChange) -> tuple[QWidget, Setter]:
    """Return an editor for texts, in which line breaks and tabs stand as \\n and \\t."""
    line = QLineEdit()
    line.setPlaceholderText("separate with ;")
    line.textEdited.connect(
        lambda text: on_change(tuple(_unescaped(part) for part in text.split(";") if part))
    )
    return line, lambda value: line.setText(";".join(map(_escaped, value)))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")


def _unescaped(text: str) -> str:
    signs = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}
    return re.sub(r"\\[nt\\]", lambda found: signs[found[0]], text)


def _biases_editor(on_change: OnChange) -> tuple[QWidget, Setter]:
    """Return an editor for numbers by token id, such as "42=-inf; 7=2.5"."""
    line = QLineEdit()
    line.setPlaceholderText("id=number; …")

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
    line.setPlaceholderText("random")

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
    box.setSpecialValueText(meta.get("lowest", ""))
    ignore_wheel(box, always=True)
    box.valueChanged.connect(on_change)
    return box, box.setValue
