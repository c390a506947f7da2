"""Load options other than shares: context, KV cache, requests, draft tokens, images, RoPE."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from math import log2
from pathlib import Path
from typing import Any

from PySide6.QtCore import QRectF, QSignalBlocker, Qt, Signal, Slot
from PySide6.QtGui import QColor, QPainter, QPaintEvent, QStandardItemModel
from PySide6.QtWidgets import (
    QCheckBox,
    QComboBox,
    QDoubleSpinBox,
    QFileDialog,
    QGridLayout,
    QSlider,
    QSpinBox,
    QStyle,
    QStyleOptionComboBox,
    QStylePainter,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.core.translation import tr, tr_later
from app.core.units import MIB, context_text, tokens_text
from app.devices.split.figures import rank_labels
from app.devices.split.settings import GGUF_SUFFIX, OWN_BLOCK, WINDOW_OPTIONS, SplitSettings
from app.widgets.buttons import button
from app.widgets.controls import ignore_wheel, show_number
from app.widgets.layout import NO_MARGINS, fill, scaled
from app.widgets.text import ElidedLabel, label, plain_tip, set_tip
from app.widgets.theme import icon, px, set_role, theme, theme_signals
from engine import KV_TYPES, PEER_MODES, KVTypes, LoadOption, kv_types

TEXT_MARGIN = 4  # pixels around the text in a box

KV_HINTS = {
    "f32": tr_later("Exact, twice as large as F16"), "f16": tr_later("Half of F32"),
    "bf16": tr_later("Half of F32, less exact"), "q8_0": tr_later("About half of F16"),
    "q4_0": tr_later("About a quarter of F16"),
}  # fmt: skip


def choice_box(entries: Sequence[tuple[str, str, str]]) -> QComboBox:
    """Return a combo box with the given (value, text, tooltip) entries."""
    box = QComboBox()
    for value, text, tip in entries:
        box.addItem(tr(text), value)
        box.setItemData(box.count() - 1, plain_tip(tr(tip)), Qt.ItemDataRole.ToolTipRole)
    return box


def kv_type_entries() -> list[tuple[str, str, str]]:
    """Return the combo box entries for the type of keys or of values."""
    return [(kind, kind.upper(), KV_HINTS.get(kind, "")) for kind in KV_TYPES]


class GgufField(QComboBox):
    """Combo box to choose a GGUF file.

    Args:
        title: title of the file dialog.
        words: (text, value) for each choice other than a file; the first is the default.
    """

    chosen = Signal(str)  # a word's value, or a path

    def __init__(
        self, title: str, words: Sequence[tuple[str, str]], parent: QWidget | None = None
    ) -> None:
        super().__init__(parent)
        self._title, self._words = title, words
        self._value = ""
        self._refused: Mapping[str, str] = {}
        self.set_value(words[0][1])
        self.activated.connect(self._on_activated)

    def set_value(self, value: str) -> None:
        """Select a word's value, or a path."""
        self._value = value
        values = [known for _, known in self._words]
        with QSignalBlocker(self):
            self.clear()
            for text, known in self._words:
                self.addItem(text, known)
            if value not in values:
                values.append(value)
                self.addItem(Path(value).name, value)
                self.setItemData(self.count() - 1, plain_tip(value), Qt.ItemDataRole.ToolTipRole)
            self._disable()
            self.addItem(tr("Choose…"))
            self.setCurrentIndex(values.index(value))

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Disable the words with these values, each with a reason, and enable the others."""
        self._refused = reasons
        self.set_value(self._value)

    def _disable(self) -> None:
        items = self.model()
        assert isinstance(items, QStandardItemModel)
        for value, why in self._refused.items():
            at = self.findData(value)
            items.item(at).setEnabled(False)
            self.setItemData(at, plain_tip(why), Qt.ItemDataRole.ToolTipRole)

    def paintEvent(self, event: QPaintEvent) -> None:
        """Draw the box with the name elided, where Qt would clip it."""
        option = QStyleOptionComboBox()
        self.initStyleOption(option)
        style, painter = self.style(), QStylePainter(self)
        part = QStyle.SubControl.SC_ComboBoxEditField
        room = style.subControlRect(QStyle.ComplexControl.CC_ComboBox, option, part, self).width()
        end, name = Qt.TextElideMode.ElideRight, option.currentText
        option.currentText = option.fontMetrics.elidedText(name, end, room - px(TEXT_MARGIN))
        painter.drawComplexControl(QStyle.ComplexControl.CC_ComboBox, option)
        painter.drawControl(QStyle.ControlElement.CE_ComboBoxLabel, option)

    @Slot(int)
    def _on_activated(self, index: int) -> None:
        value = self.itemData(index)
        if value is None:
            files = tr("GGUF models (*{suffix})").format(suffix=GGUF_SUFFIX)
            value, _ = QFileDialog.getOpenFileName(self, self._title, "", files)
            if not value.lower().endswith(GGUF_SUFFIX):
                self.set_value(self._value)
                return
        self.chosen.emit(value)


class EncoderDeviceField(QComboBox):
    """Combo box for the vision encoder's device: automatic, a GPU or the CPU."""

    chosen = Signal(str)  # "auto" or device id

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._devices = tuple[str, ...]()
        self.activated.connect(lambda index: self.chosen.emit(self.itemData(index)))

    def set_devices(self, devices: Sequence[str], value: str) -> None:
        """Offer `devices`, GPUs first; `value` is the selected one, or "auto"."""
        with QSignalBlocker(self):
            if self._devices != devices:
                self._devices = tuple(devices)
                self.clear()
                self.addItem(tr("auto"), "auto")
                named = zip(devices, rank_labels(devices), strict=True)
                labels = ["CPU" if device == "cpu" else name for device, name in named]
                for device, text in zip(devices, labels, strict=True):
                    self.addItem(text, device)
            self.setCurrentIndex(self.findData(value))


HANDLE = 14  # pixels; handle width in the style sheet, centred on the value


class ContextSlider(QSlider):
    """Slider with fixed context lengths; its groove is red beyond the longest that fits."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(Qt.Orientation.Horizontal, parent)
        self._stops: Sequence[int] = (1,)
        self._most: int | None = None

    def set_stops(self, stops: Sequence[int]) -> None:
        """Set the context lengths that the slider can stop at, in tokens."""
        self._stops = stops
        self.setRange(0, len(stops) - 1)
        self.update()

    def set_most(self, n_ctx: int | None) -> None:
        """Mark the longest context that fits, in tokens; None if unknown."""
        if n_ctx != self._most:
            self._most = n_ctx
            self.update()

    @property
    def mark(self) -> float | None:
        """Position of the mark, 0 to 1, or None if every stop fits or the limit is unknown."""
        if self._most is None or self._most >= self._stops[-1]:
            return None
        return self._place(self._most)

    def _place(self, n_ctx: int) -> float:
        last = len(self._stops) - 1
        if not last or n_ctx <= self._stops[0]:
            return 0.0
        left = min(last - 1, bisect_right(self._stops, n_ctx) - 1)
        low, high = self._stops[left], self._stops[left + 1]
        return (left + log2(n_ctx / low) / log2(high / low)) / last

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        mark = self.mark
        if mark is None:
            return
        colours, room = theme(), self.width() - px(HANDLE)
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        x, middle = px(HANDLE) / 2 + mark * room, self.height() / 2
        at = px(HANDLE) / 2 + self.value() / max(1, self.maximum()) * room
        for start, end in ((x, at - px(HANDLE) / 2), (max(x, at + px(HANDLE) / 2), self.width())):
            if end > start:
                painter.fillRect(QRectF(start, middle - 2, end - start, 4), QColor(colours.danger))
        if abs(x - at) > px(HANDLE) / 2:
            painter.fillRect(QRectF(x - 1, middle - 7, 2, 14), QColor(colours.text))


SAME_HINT = tr_later("Keys and values both use the KV cache type")

ROPE_NAMES = {
    "": tr_later("As the file says"), "none": tr_later("None"), "linear": tr_later("Linear"),
    "yarn": tr_later("YaRN"),
}  # fmt: skip
ROPE_HINTS = {
    "": tr_later("Scales positions as the model's file says"),
    "none": tr_later("Does not scale positions, even if the file says to"),
    "linear": tr_later("Scales all positions equally; costs some accuracy"),
    "yarn": tr_later("Scales only slow rotations, which is more accurate"),
}


ORDER = (
    "parallel", "checkpoint_bytes", "kv_type", "n_batch", "fast_prompts", "n_draft", "draft_path",
    "draft_vocab", "mmproj", "mmproj_device", "rope_scaling", "rope_factor", "rope_base",
    "chat_template",
)  # fmt: skip
"""Fields from top to bottom ("kv_type" is the type of values); other fields follow these."""


class NumberField(QSpinBox):
    """Integer field; its minimum is shown as the option's `lowest` text, if any."""

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
        """Show a value without emitting a signal."""
        show_number(self, self.minimum() if value is None else value // self._option.unit)

    def _report(self, n: int) -> None:
        low, unit = int(self._option.low), self._option.unit
        if n * unit >= low:
            self.chosen.emit(n * unit)
        else:
            self.chosen.emit(self._default if n == self.minimum() else low)


class FactorField(QDoubleSpinBox):
    """Field for a number that is at least 1, or 0 to use the file's value."""

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
        """Show a value without emitting a signal."""
        show_number(self, value)


class FlagField(QCheckBox):
    """Checkbox for a flag."""

    chosen = Signal(bool)

    def __init__(self) -> None:
        super().__init__()
        self.toggled.connect(self.chosen)

    def show_value(self, value: bool) -> None:
        """Show a value without emitting a signal."""
        with QSignalBlocker(self):
            self.setChecked(value)


class RareOptions(QWidget):
    """Rarely used fields below a button that shows or hides them.

    Attributes:
        head: the button.
        fields: widgets by setting name; "kv_type" is the type of values.
    """

    changed = Signal(str, object)  # name and value of a setting
    type_v_changed = Signal()
    template_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.head = QToolButton()
        self.head.setProperty("role", "group")
        self.head.setText(tr("Requests, batch, images, RoPE, template"))
        self.head.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextBesideIcon)
        self.head.setCheckable(True)
        same = ("", tr_later("Same as keys"), SAME_HINT)
        self.type_v = choice_box([same, *kv_type_entries()])
        sources = [(tr("No model"), ""), (tr("MTP block"), OWN_BLOCK)]
        self.draft_model = GgufField(tr("Draft model"), sources)
        words = [(tr("auto"), "auto"), (tr("Off"), "off")]
        self.mmproj = GgufField(tr("Vision encoder (mmproj)"), words)
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
        """Show settings, and unfold the fields if any setting differs from its default."""
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
        """Enable or disable choosing the model's MTP block as the draft model."""
        why = tr("Neither this model's file nor its folder has an MTP block.")
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
                tip = tr("Data type for values, if it differs from that for keys")
            caption = label(title, "muted")
            caption.setBuddy(field)
            field.setAccessibleName(title)
            field.setAccessibleDescription(tip)
            scaled(field, field.setFixedWidth, 150)
            set_tip(field, tip)
            ignore_wheel(field)
            grid.addWidget(caption, row, 0)
            grid.addWidget(field, row, 1)
        fill(QVBoxLayout(self), self.head, self._body, margins=NO_MARGINS)


def _field(name: str) -> NumberField | FactorField | FlagField:
    option = WINDOW_OPTIONS[name]
    if option.kind is bool:
        return FlagField()
    return FactorField(option) if option.kind is float else NumberField(option, DEFAULTS[name])


DEFAULTS: dict[str, Any] = {spec.name: spec.default for spec in fields(SplitSettings)}


FIRST_STOP = 512  # tokens; the shortest context on the slider
CONTEXT_IF_UNKNOWN = 32768
"""Longest context offered if the model declares none, in tokens."""
PEER_NAMES = {
    "auto": tr_later("Direct if faster"), "on": tr_later("Direct"),
    "off": tr_later("Through host memory"),
}  # fmt: skip
PEER_HINTS = {
    "auto": tr_later(
        "GPUs write directly into each other's memory if a test on this machine shows that this "
        "is safe and faster"
    ),
    "on": tr_later(
        "GPUs write directly into each other's memory even if host memory is faster, but never if "
        "the test failed"
    ),
    "off": tr_later(
        "GPUs never access each other's memory. Choose this if answers are gibberish or the "
        "machine hangs"
    ),
}


def context_stops(n_ctx_train: int) -> list[int]:
    """Return the powers of two from `FIRST_STOP` up to the model's length, then that length."""
    last = n_ctx_train or CONTEXT_IF_UNKNOWN
    stops = []
    stop = FIRST_STOP
    while stop < last:
        stops.append(stop)
        stop *= 2
    return [*stops, last]


class LoadFields(QWidget):
    """Fields for all settings other than shares."""

    changed = Signal(str, object)  # name and value of a setting
    gesture_began = Signal()
    gesture_ended = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._n_ctx_train, self._stops = 0, list[int]()
        self.context_slider = ContextSlider()
        self.context_slider.setAccessibleName(tr("Context length"))
        self.context_note = ElidedLabel()
        self.context_note.setProperty("role", "muted")
        self.context = QSpinBox()
        self.context.setAccessibleName(tr(WINDOW_OPTIONS["n_ctx"].title))
        self.context.setKeyboardTracking(False)
        scaled(self.context, self.context.setFixedWidth, 96)
        self.kv_type = choice_box(kv_type_entries())
        self.kv_type.setAccessibleName(tr(WINDOW_OPTIONS["kv_type"].title))
        self.p2p = choice_box([(mode, PEER_NAMES[mode], PEER_HINTS[mode]) for mode in PEER_MODES])
        self.p2p.setAccessibleName(tr(WINDOW_OPTIONS["p2p"].title))
        self.p2p_label = label(tr("GPU to GPU"), "muted")
        self.threads = NumberField(WINDOW_OPTIONS["cpu_threads"], None)
        self.threads.setAccessibleName(tr(WINDOW_OPTIONS["cpu_threads"].title))
        scaled(self.threads, self.threads.setFixedWidth, 96)
        self.rare = RareOptions()
        self.threads_label = label(tr("Threads"), "muted")
        for field in (self.context_slider, self.context, self.kv_type, self.threads, self.p2p):
            ignore_wheel(field)
        self._build()
        self._connect()
        self.set_model_context(0)

    def _connect(self) -> None:
        self.context_slider.valueChanged.connect(self._on_slider)
        self.context_slider.sliderPressed.connect(self.gesture_began)
        self.context_slider.sliderReleased.connect(self.gesture_ended)
        self.context.valueChanged.connect(partial(self.changed.emit, "n_ctx"))
        self.kv_type.currentIndexChanged.connect(self._report_kv_type)
        self.rare.type_v_changed.connect(self._report_kv_type)
        self.p2p.currentIndexChanged.connect(
            lambda _: self.changed.emit("p2p", self.p2p.currentData())
        )
        self.threads.chosen.connect(partial(self.changed.emit, "cpu_threads"))
        self.rare.changed.connect(self.changed)

    def set_model_context(self, n_ctx_train: int) -> None:
        """Offer context lengths up to `n_ctx_train`; 0 if unknown."""
        self._n_ctx_train = n_ctx_train
        self._offer(n_ctx_train)

    def _offer(self, most: int) -> None:
        if self._stops == context_stops(most):
            return
        self._stops = context_stops(most)
        with QSignalBlocker(self.context_slider), QSignalBlocker(self.context):
            self.context_slider.set_stops(self._stops)
            self.context.setRange(1, self._stops[-1])
            self.context.setSingleStep(max(1, min(FIRST_STOP, self._stops[-1] // 8)))
        names = ", ".join(context_text(stop) for stop in self._stops)
        set_tip(self.context_slider, tr("Context length in tokens: {names}").format(names=names))

    def set_settings(self, settings: SplitSettings, n_ctx: int) -> None:
        """Show settings; `n_ctx` is the context length in effect, in tokens."""
        self._offer(round(self._n_ctx_train * max(1.0, settings.rope_factor)))
        n_ctx = min(n_ctx, self._stops[-1])
        with (
            QSignalBlocker(self.context_slider), QSignalBlocker(self.kv_type),
            QSignalBlocker(self.p2p),
        ):  # fmt: skip
            self.context_slider.setValue(max(0, bisect_right(self._stops, n_ctx) - 1))
            self.kv_type.setCurrentIndex(self.kv_type.findData(kv_types(settings.kv_type).k))
            self.p2p.setCurrentIndex(self.p2p.findData(settings.p2p))
            set_tip(self.p2p, tr(PEER_HINTS[settings.p2p]))
        show_number(self.context, n_ctx)
        self.threads.show_value(settings.cpu_threads)
        self.rare.set_settings(settings)
        has_cpu = any(settings.ranks[i].device == "cpu" for i in settings.active)
        self.threads.setVisible(has_cpu)
        self.threads_label.setVisible(has_cpu)
        for field in (self.p2p, self.p2p_label):
            field.setVisible(settings.n_gpus > 1)

    def set_most(self, most: int | None, n_ctx: int) -> None:
        """Mark the longest context that fits, in tokens; `n_ctx` is the context in effect."""
        self.context_slider.set_most(most)
        if most is None:
            text = ""
        elif not most:
            text = tr("No context fits.")
        elif most >= self._stops[-1]:
            text = tr("The whole context fits.")
        else:
            text = tr("Up to {tokens} fit.").format(tokens=tokens_text(most))
        self.context_note.set_full_text(text)
        is_over = most is not None and n_ctx > most
        set_role(self.context_note, "shortage" if is_over else "muted")
        spoken = f"{tokens_text(n_ctx)}. {text}".replace("\u202f", "")
        self.context_slider.setAccessibleDescription(spoken)

    def _report_kv_type(self) -> None:
        k = self.kv_type.currentData()
        self.changed.emit("kv_type", str(KVTypes(k, self.rare.type_v.currentData() or k)))

    def _on_slider(self, stop: int) -> None:
        self.changed.emit("n_ctx", self._stops[stop])

    def _build(self) -> None:
        layout = QGridLayout(self)
        layout.setContentsMargins(0, 4, 0, 4)
        layout.setHorizontalSpacing(10)
        layout.setVerticalSpacing(8)
        layout.setColumnStretch(1, 1)
        layout.addWidget(label(tr("Context"), "muted"), 0, 0)
        layout.addWidget(self.context_slider, 0, 1, 1, 2)
        layout.addWidget(self.context, 0, 3)
        layout.addWidget(self.context_note, 1, 1, 1, 3)
        layout.addWidget(kv_label := label(tr("KV cache"), "muted"), 2, 0)
        layout.addWidget(self.kv_type, 2, 1)
        layout.addWidget(self.threads_label, 2, 2, Qt.AlignmentFlag.AlignRight)
        layout.addWidget(self.threads, 2, 3)
        layout.addWidget(self.p2p_label, 3, 0)
        layout.addWidget(self.p2p, 3, 1, 1, 3)
        layout.addWidget(self.rare, 4, 0, 1, 4)
        for caption, box in ((kv_label, self.kv_type), (self.p2p_label, self.p2p)):
            caption.setBuddy(box)  # so that screen readers on Linux know the box's name
