"""Buttons for devices, which accept dropped parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import (
    QColor,
    QDragEnterEvent,
    QDragLeaveEvent,
    QDropEvent,
    QIcon,
    QPainter,
    QPixmap,
)
from PySide6.QtWidgets import QGridLayout, QPushButton, QWidget

from app.core.scale import px
from app.core.translation import tr
from app.devices.map.views.placement_table import dragged_parts
from app.widgets.text import caption_text, set_tip
from app.widgets.theme import theme, theme_signals

PER_ROW = 4
"""Number of buttons in a row."""


@dataclass(frozen=True, slots=True)
class PinTarget:
    """Device or rank that parts can be pinned to.

    Attributes:
        override: name in the engine's overrides: a device id, or "#" and a rank number.
        label: name for the person, such as "GPU 0".
        colour: index of the device colour.
    """

    override: str
    label: str
    colour: int


class DeviceChip(QPushButton):
    """Button of one target: a press pins the selection, a drop pins the dropped parts."""

    dropped = Signal(object)  # frozenset[Part]

    ICON = 10

    def __init__(self, target: PinTarget, number: int, parent: QWidget | None = None) -> None:
        super().__init__(f" {caption_text(target.label)}", parent)
        self.target = target
        self.setAcceptDrops(True)
        name = tr("Pin the selection to {device}").format(device=target.label)
        with_key = tr("Pin the selection to {device} (key {key})")
        tip = with_key.format(device=target.label, key=number) if number <= 9 else name
        set_tip(self, tip)
        self.setAccessibleName(name)
        theme_signals().changed.connect(self._refresh)
        self._refresh()

    def _refresh(self) -> None:
        size = px(self.ICON)
        self.setIconSize(QSize(size, size))
        pixmap = QPixmap(size, size)
        pixmap.fill(Qt.GlobalColor.transparent)
        painter = QPainter(pixmap)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QColor(theme().device_colour(self.target.colour)))
        painter.drawRoundedRect(pixmap.rect(), 3, 3)
        painter.end()
        self.setIcon(QIcon(pixmap))

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        if dragged_parts(event.mimeData()):
            self.setDown(True)
            event.acceptProposedAction()

    def dragLeaveEvent(self, event: QDragLeaveEvent) -> None:
        self.setDown(False)

    def dropEvent(self, event: QDropEvent) -> None:
        self.setDown(False)
        parts = dragged_parts(event.mimeData())
        if parts:
            event.acceptProposedAction()
            self.dropped.emit(parts)


class DeviceChips(QWidget):
    """Buttons of all targets, in rows."""

    pressed = Signal(str)  # override target for the selection
    dropped = Signal(str, object)  # override target, parts

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.chips: list[DeviceChip] = []
        self._layout = QGridLayout(self)
        self._layout.setContentsMargins(0, 0, 0, 0)
        self._layout.setSpacing(6)

    def set_targets(self, targets: Sequence[PinTarget]) -> None:
        """Offer targets; while they stay the same, buttons and focus are kept."""
        if [chip.target for chip in self.chips] == list(targets):
            return
        for chip in self.chips:
            chip.hide()
            chip.deleteLater()
        self.chips = []
        for number, target in enumerate(targets):
            chip = DeviceChip(target, number + 1)
            chip.clicked.connect(lambda _=False, t=target.override: self.pressed.emit(t))
            chip.dropped.connect(lambda parts, t=target.override: self.dropped.emit(t, parts))
            self._layout.addWidget(chip, number // PER_ROW, number % PER_ROW)
            self.chips.append(chip)
