"""Fields of a load that offer choices: fixed ones, files to load beside a model, devices."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import log2
from pathlib import Path

from PySide6.QtCore import QRectF, QSignalBlocker, Qt, Signal, Slot
from PySide6.QtGui import QColor, QPainter, QPaintEvent, QStandardItemModel
from PySide6.QtWidgets import (
    QComboBox,
    QFileDialog,
    QSlider,
    QStyle,
    QStyleOptionComboBox,
    QStylePainter,
    QWidget,
)

from app.core.translation import tr, tr_later
from app.devices.split.figures import rank_labels
from app.devices.split.settings import GGUF_SUFFIX
from app.widgets.text import plain_tip
from app.widgets.theme import px, theme
from engine import KV_TYPES

TEXT_MARGIN = 4
"""Room around the text of a box, in pixels."""

KV_HINTS = {
    "f32": tr_later("Exact, twice as large as F16"), "f16": tr_later("Half of F32"),
    "bf16": tr_later("Half of F32, less exact"), "q8_0": tr_later("About half of F16"),
    "q4_0": tr_later("About a quarter of F16"),
}  # fmt: skip


def choice_box(entries: Sequence[tuple[str, str, str]]) -> QComboBox:
    """Return a combo box of entries (value, text, tooltip)."""
    box = QComboBox()
    for value, text, tip in entries:
        box.addItem(tr(text), value)
        box.setItemData(box.count() - 1, plain_tip(tr(tip)), Qt.ItemDataRole.ToolTipRole)
    return box


def kv_type_entries() -> list[tuple[str, str, str]]:
    """Return the entries of a combo box for the type of keys or of values."""
    return [(kind, kind.upper(), KV_HINTS.get(kind, "")) for kind in KV_TYPES]


class GgufField(QComboBox):
    """Choice of a GGUF file.

    Args:
        title: what the file is, as the dialog calls it.
        words: (text, value) of what can be chosen without naming a file; the first is the default.
    """

    chosen = Signal(str)  # value of a word, or path

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
        """Show a word or a file as the chosen one."""
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
        """Let these words not be chosen, in place of those before.

        Args:
            reasons: why not, as a sentence, by the word's value.
        """
        self._refused = reasons
        self.set_value(self._value)

    def _disable(self) -> None:
        """Grey out what cannot be chosen, with the reason as its tool tip."""
        items = self.model()
        assert isinstance(items, QStandardItemModel)
        for value, why in self._refused.items():
            at = self.findData(value)
            items.item(at).setEnabled(False)
            self.setItemData(at, plain_tip(why), Qt.ItemDataRole.ToolTipRole)

    def paintEvent(self, event: QPaintEvent) -> None:
        """Draw the box with a name that has room; Qt would cut it off."""
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
    """Choice of the device that encodes pictures: the engine's, a GPU's or the CPU."""

    chosen = Signal(str)  # "auto" or device id

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._devices = tuple[str, ...]()
        self.activated.connect(lambda index: self.chosen.emit(self.itemData(index)))

    def set_devices(self, devices: Sequence[str], value: str) -> None:
        """Offer GPUs, and the CPU last, and show one of them or "auto" as the chosen one."""
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


HANDLE = 14
"""Width in pixels of the style sheet's handle, whose middle stands for the value."""


class ContextSlider(QSlider):
    """Slider that moves from stop to stop; beyond the mark its groove has the danger colour."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(Qt.Orientation.Horizontal, parent)
        self._stops: Sequence[int] = (1,)
        self._most: int | None = None

    def set_stops(self, stops: Sequence[int]) -> None:
        """Set the context lengths, in tokens, that the slider can stop at."""
        self._stops = stops
        self.setRange(0, len(stops) - 1)
        self.update()

    def set_most(self, n_ctx: int | None) -> None:
        """Mark the longest context that fits, in tokens; None if it is unknown."""
        if n_ctx != self._most:
            self._most = n_ctx
            self.update()

    @property
    def mark(self) -> float | None:
        """Position of the mark, 0 to 1; None where every stop fits or the limit is unknown."""
        if self._most is None or self._most >= self._stops[-1]:
            return None
        return self._place(self._most)

    def _place(self, n_ctx: int) -> float:
        """Return the position of a context length, 0 to 1, logarithmic between the stops."""
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
