"""Options of a load that few people need: requests, batch, drafts, pictures, RoPE, template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from PySide6.QtCore import QSignalBlocker, Qt, QTimer, Signal, Slot
from PySide6.QtGui import QFontDatabase
from PySide6.QtWidgets import (
    QCheckBox,
    QDialog,
    QDoubleSpinBox,
    QGridLayout,
    QHBoxLayout,
    QPlainTextEdit,
    QSpinBox,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.core.translation import tr, tr_later
from app.core.units import MIB
from app.devices.split.settings import OWN_BLOCK, WINDOW_OPTIONS, SplitSettings
from app.devices.split.template_preview import TemplatePreview
from app.devices.split.views.choice_fields import (
    EncoderDeviceField,
    GgufField,
    choice_box,
    kv_type_entries,
)
from app.widgets.buttons import button
from app.widgets.controls import ignore_wheel, show_number
from app.widgets.layout import scaled
from app.widgets.text import label, set_tip
from app.widgets.theme import icon, set_role, theme, theme_signals
from engine import LoadOption, kv_types

SAME_HINT = tr_later("Keys and values have the type chosen as KV cache")

ROPE_NAMES = {
    "": tr_later("As the file says"), "none": tr_later("None"), "linear": tr_later("Linear"),
    "yarn": tr_later("YaRN"),
}  # fmt: skip
ROPE_HINTS = {
    "": tr_later("Positions are stretched as the model's file says"),
    "none": tr_later("Positions are not stretched, whatever the file says"),
    "linear": tr_later("All positions are stretched alike; costs some accuracy"),
    "yarn": tr_later("Only slow rotations are stretched, which is more exact"),
}

ORDER = (
    "parallel", "checkpoint_bytes", "kv_type", "n_batch", "fast_prompts", "n_draft", "draft_path",
    "draft_vocab", "mmproj", "mmproj_device", "rope_scaling", "rope_factor", "rope_base",
    "chat_template",
)  # fmt: skip
"""Fields from top to bottom, of values where it is the type of keys and values; others follow."""


class NumberField(QSpinBox):
    """Field of a whole number; below the smallest one stands what is meant by none."""

    chosen = Signal(object)  # int, or None for the engine's choice

    def __init__(self, option: LoadOption, default: int | None) -> None:
        super().__init__()
        self._option, self._default = option, default
        has_none = default is None and not option.may_be_zero
        low = 0 if option.may_be_zero else int(option.low) // option.unit - has_none
        high = min(one for one in (option.soft_high, option.high) if one is not None)
        self.setRange(low, int(high) // option.unit)
        self.setSingleStep(option.step)
        self.setKeyboardTracking(False)
        self.setSuffix(" MiB" if option.unit == MIB else tr(option.suffix))
        self.setSpecialValueText(tr(option.lowest))
        self.valueChanged.connect(self._report)

    def show_value(self, value: int | None) -> None:
        """Show a value without a signal."""
        show_number(self, self.minimum() if value is None else value // self._option.unit)

    def _report(self, n: int) -> None:
        low, unit = int(self._option.low), self._option.unit
        if n * unit >= low:
            self.chosen.emit(n * unit)
        else:
            self.chosen.emit(self._default if n == self.minimum() else low)


class FactorField(QDoubleSpinBox):
    """Field of a number of at least 1, or 0 for what the file says."""

    chosen = Signal(object)  # float

    def __init__(self, option: LoadOption) -> None:
        super().__init__()
        self.setDecimals(2 if option.step == 1 else 0)
        self.setMaximum(float(option.high or 0.0))
        self.setSingleStep(option.step)
        self.setKeyboardTracking(False)
        self.setSpecialValueText(tr(option.lowest))
        self.valueChanged.connect(lambda number: self.chosen.emit(0.0 if number < 1 else number))

    def show_value(self, value: float) -> None:
        """Show a value without a signal."""
        show_number(self, value)


class FlagField(QCheckBox):
    """Field of a flag."""

    chosen = Signal(bool)

    def __init__(self) -> None:
        super().__init__()
        self.toggled.connect(self.chosen)

    def show_value(self, value: bool) -> None:
        """Show a value without a signal."""
        with QSignalBlocker(self):
            self.setChecked(value)


class RareOptions(QWidget):
    """Fields that few people need, below a heading that opens and closes them.

    Attributes:
        head: button that opens and closes the fields.
        fields: widget of each setting, by its name; "kv_type" is the type of values.
    """

    changed = Signal(str, object)  # name and value of a setting
    type_v_changed = Signal()
    template_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.head = QToolButton()
        self.head.setProperty("role", "group")
        self.head.setText(tr("Requests, batch, pictures, RoPE, template"))
        self.head.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextBesideIcon)
        self.head.setCheckable(True)
        same = ("", tr_later("Same as keys"), SAME_HINT)
        self.type_v = choice_box([same, *kv_type_entries()])
        sources = [(tr("No model"), ""), (tr("MTP block"), OWN_BLOCK)]
        self.draft_model = GgufField(tr("Draft model"), sources)
        words = [(tr("auto"), "auto"), (tr("Off"), "off")]
        self.mmproj = GgufField(tr("Encoder of pictures (mmproj)"), words)
        self.encoder = EncoderDeviceField()
        kinds = [(kind, name, ROPE_HINTS[kind]) for kind, name in ROPE_NAMES.items()]
        self.rope = choice_box(kinds)
        self.template = button("")
        self.template.clicked.connect(self.template_requested)
        self.fields: dict[str, QWidget] = {
            "kv_type": self.type_v, "draft_path": self.draft_model, "mmproj": self.mmproj,
            "mmproj_device": self.encoder, "rope_scaling": self.rope,
            "chat_template": self.template,
        }  # fmt: skip
        rare = [name for name, option in WINDOW_OPTIONS.items() if option.place == "rare"]
        self.fields |= {name: _field(name) for name in rare if name not in self.fields}
        self._body = QWidget()
        self._build([*ORDER, *(name for name in rare if name not in ORDER)])
        self._connect()
        self._on_toggled(False)

    def _connect(self) -> None:
        self.type_v.currentIndexChanged.connect(lambda _: self.type_v_changed.emit())
        self.rope.currentIndexChanged.connect(
            lambda _: self.changed.emit("rope_scaling", self.rope.currentData())
        )
        for name, field in self.fields.items():
            if hasattr(field, "chosen"):
                field.chosen.connect(partial(self.changed.emit, name))
        self.head.toggled.connect(self._on_toggled)
        theme_signals().changed.connect(self._refresh)

    def set_settings(self, settings: SplitSettings) -> None:
        """Show settings, and all fields if one of them is set."""
        for name, field in self.fields.items():
            if isinstance(field, NumberField | FactorField | FlagField):
                field.show_value(getattr(settings, name))
        self.draft_model.set_value(settings.draft_path)
        self.mmproj.set_value(settings.mmproj)
        self.encoder.set_devices(settings.encoder_devices, settings.encoder_device)
        self.encoder.setEnabled(settings.mmproj != "off")
        k, v = kv_types(settings.kv_type)
        with QSignalBlocker(self.rope), QSignalBlocker(self.type_v):
            self.rope.setCurrentIndex(self.rope.findData(settings.rope_scaling))
            self.type_v.setCurrentIndex(self.type_v.findData("" if v == k else v))
        self.template.setText(tr("Own…") if settings.chat_template else tr("From the file…"))
        shown = replace(settings, mmproj_device=settings.encoder_device)
        names = [name for name in self.fields if name != "kv_type"]
        if v != k or any(getattr(shown, name) != DEFAULTS[name] for name in names):
            self.head.setChecked(True)

    @Slot(bool)
    def offer_block(self, is_there: bool) -> None:
        """Let the model's own block for guesses be chosen, or say why it cannot."""
        why = tr("This model's file has no MTP block, and none is beside it.")
        self.draft_model.refuse({} if is_there else {OWN_BLOCK: why})

    def _on_toggled(self, is_open: bool) -> None:
        self._body.setVisible(is_open)
        self._refresh()

    def _refresh(self) -> None:
        name = "chevron-up" if self.head.isChecked() else "chevron-down"
        self.head.setIcon(icon(name, theme().muted))

    def _build(self, names: Sequence[str]) -> None:
        grid = QGridLayout(self._body)
        grid.setContentsMargins(0, 0, 0, 0)
        grid.setHorizontalSpacing(10)
        grid.setVerticalSpacing(8)
        grid.setColumnStretch(0, 1)
        for row, name in enumerate(names):
            option, field = WINDOW_OPTIONS[name], self.fields[name]
            title, tip = tr(option.title), tr(option.tip)
            if name == "kv_type":
                title = tr("Values in KV cache")
                tip = tr("Number type of values where keys have another one")
            caption = label(title, "muted")
            caption.setBuddy(field)
            field.setAccessibleName(title)
            field.setAccessibleDescription(tip)
            scaled(field, field.setFixedWidth, 150)
            set_tip(field, tip)
            ignore_wheel(field)
            grid.addWidget(caption, row, 0)
            grid.addWidget(field, row, 1)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self.head)
        layout.addWidget(self._body)


def _field(name: str) -> NumberField | FactorField | FlagField:
    """Return the field of a setting that needs none of its own."""
    option = WINDOW_OPTIONS[name]
    if option.kind is bool:
        return FlagField()
    return FactorField(option) if option.kind is float else NumberField(option, DEFAULTS[name])


DEFAULTS: dict[str, Any] = {spec.name: spec.default for spec in fields(SplitSettings)}


TYPED_MS = 400
"""Milliseconds after the last key until a template is rendered."""


class TemplateDialog(QDialog):
    """Editor of a template's source above the prompt that it makes.

    Attributes:
        source: editor of the source.
        preview: the prompt, or why there is none.
        use: button that takes the template.
        reset: button that takes the file's template again.
    """

    typed = Signal(str)  # source, a moment after the last key
    chosen = Signal(str)  # source; "" for the file's

    def __init__(self, parent: QWidget, source: str) -> None:
        super().__init__(parent)
        self.setWindowTitle(tr("Chat template"))
        self.resize(720, 640)
        self._own, self._of_the_file = source, ""
        self.source, self.preview = QPlainTextEdit(), QPlainTextEdit()
        self.use = button(tr("Use this template"), "primary")
        self.reset = button(tr("Use the file's"))
        self._note = label(tr("The prompt of a short conversation"), "muted")
        self._timer = QTimer(self, singleShot=True, interval=TYPED_MS)
        self._timer.timeout.connect(self.flush)
        self._build()
        self.source.textChanged.connect(self._timer.start)
        self.use.clicked.connect(self._on_use)
        self.reset.clicked.connect(self._on_reset)

    @Slot()
    def flush(self) -> None:
        """Ask for the preview of what is typed now."""
        self._timer.stop()
        self.typed.emit(self.source.toPlainText())

    @Slot(object)
    def show_preview(self, made: TemplatePreview) -> None:
        """Show what a template makes; the first one also brings the file's source."""
        if not self.source.toPlainText():
            self._of_the_file = made.source
            with QSignalBlocker(self.source):
                self.source.setPlainText(made.source)
        self.preview.setPlainText(made.problem or made.text)
        self._note.setText((made.problem and tr("This template does not work:")) or self._caption())
        set_role(self._note, "warn" if made.problem else "muted")
        self.use.setEnabled(not made.problem)

    def _caption(self) -> str:
        return tr("The prompt of a short conversation")

    @Slot()
    def _on_use(self) -> None:
        text = self.source.toPlainText()
        self.chosen.emit("" if text == self._of_the_file else text)
        self.accept()

    @Slot()
    def _on_reset(self) -> None:
        self.chosen.emit("")
        self.accept()

    def _build(self) -> None:
        font = QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont)
        for edit, name in ((self.source, tr("Template source")), (self.preview, tr("Prompt"))):
            edit.setFont(font)
            edit.setAccessibleName(name)
            edit.setTabChangesFocus(True)
        self.preview.setReadOnly(True)
        self.source.setPlainText(self._own)
        cancel = button(tr("Cancel"))
        cancel.clicked.connect(self.reject)
        row = QHBoxLayout()
        row.addWidget(self.reset)
        row.addStretch()
        row.addWidget(cancel)
        row.addWidget(self.use)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(16, 16, 16, 16)
        layout.setSpacing(8)
        layout.addWidget(label(tr("Template (Jinja)"), "heading"))
        layout.addWidget(self.source, 3)
        layout.addWidget(self._note)
        layout.addWidget(self.preview, 2)
        layout.addLayout(row)
