"""Fields that choose a file to load beside a model, and the device that encodes pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PySide6.QtCore import QSignalBlocker, Qt, Signal, Slot
from PySide6.QtWidgets import QComboBox, QFileDialog, QWidget

from app.split.figures import rank_labels
from app.split.settings import GGUF_SUFFIX
from app.translation import tr
from app.widgets.text import plain_tip


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
            self.addItem(tr("Choose…"))
            self.setCurrentIndex(values.index(value))

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
