"""Details of a device's row: bytes by kind, what is unproven, memory to keep free, the order."""

from __future__ import annotations

from PySide6.QtCore import QSignalBlocker, Signal
from PySide6.QtWidgets import QHBoxLayout, QSpinBox, QVBoxLayout, QWidget

from app.core.translation import tr
from app.core.units import MIB, size_text
from app.devices.split.figures import RowFigures, kinds_of
from app.devices.split.views.memory_bar import GUEST_TONE, TONES
from app.widgets.buttons import IconButton
from app.widgets.controls import ignore_wheel, show_number
from app.widgets.sizes import scaled
from app.widgets.text import LegendLabel, Sign, label, set_tip
from app.widgets.theme import mix, theme, theme_signals

RESERVE_STEP_MIB = 256
OWN_KINDS = ("weights", "KV cache", "compute", "overhead")
"""Kinds of bytes of a rank itself, in the order of `TONES`."""


class DeviceDetails(QWidget):
    """Shows bytes by kind in the colours of the memory bar; sets the reserve and the order."""

    reserve_changed = Signal(int)  # MiB
    moved = Signal(int)  # places further down

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._figures: RowFigures | None = None
        self.kinds = LegendLabel()
        self.kinds.setWordWrap(True)
        self.note = label(role="muted")
        self.note.setWordWrap(True)
        self.reserve = QSpinBox()
        self.reserve.setSuffix(" MiB")
        self.reserve.setSingleStep(RESERVE_STEP_MIB)
        self.reserve.setKeyboardTracking(False)
        scaled(self.reserve, self.reserve.setFixedWidth, 112)
        set_tip(self.reserve, tr("Memory to keep free for other programs"))
        ignore_wheel(self.reserve)
        self.up, self.down = (
            IconButton("chevron-up", tr("Move up")),
            IconButton("chevron-down", tr("Move down")),
        )
        self._build()
        self.reserve.valueChanged.connect(self.reserve_changed)
        self.up.clicked.connect(lambda: self.moved.emit(-1))
        self.down.clicked.connect(lambda: self.moved.emit(1))
        theme_signals().changed.connect(self.refresh)

    def set_figures(self, figures: RowFigures, *, place: tuple[int, int]) -> None:
        """Show a rank.

        Args:
            place: the rank's number in the order, from 0, and the number of ranks.
        """
        with QSignalBlocker(self.reserve):
            self.reserve.setMaximum(max(0, figures.total // MIB))
        show_number(self.reserve, figures.reserve // MIB)
        self.reserve.setAccessibleName(
            tr("Memory to keep free on {device} in mebibytes").format(device=figures.label)
        )
        number, count = place
        for button, text, is_possible in (
            (self.up, tr("Move {device} up"), number > 0),
            (self.down, tr("Move {device} down"), number < count - 1),
        ):
            button.set_text(text.format(device=figures.label))
            button.setEnabled(is_possible)
            button.setVisible(count > 1)
        self._order.setVisible(count > 1)
        self.note.setText(figures.note)
        self.note.setVisible(bool(figures.note))
        if figures != self._figures:
            self._figures = figures
            self.refresh()

    def refresh(self) -> None:
        """Show the kinds again in the colours of the theme."""
        figures, colours = self._figures, theme()
        if figures is None:
            return
        own = colours.device_colour(figures.colour)
        tones = dict(zip(OWN_KINDS, TONES, strict=True))
        parts = []
        for name, size in kinds_of(figures):
            colour = mix(own, colours.surface, tones.get(name, 0.0))
            if name not in tones:
                colour = mix(colours.muted, colours.surface, GUEST_TONE)
            words = f"{tr(name)} {size_text(size)}".replace(" ", "\N{NO-BREAK SPACE}")
            parts.append(Sign(colour, "■", words))
        self.kinds.set_signs(parts, "" if parts else tr("No part of the model is here."))

    def _build(self) -> None:
        self._order = label(tr("Order"), "muted")
        line = QHBoxLayout()
        line.setSpacing(6)
        line.addWidget(label(tr("Keep free"), "muted"))
        line.addWidget(self.reserve)
        line.addStretch(1)
        line.addWidget(self._order)
        line.addWidget(self.up)
        line.addWidget(self.down)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(6)
        layout.addWidget(self.kinds)
        layout.addWidget(self.note)
        layout.addLayout(line)
