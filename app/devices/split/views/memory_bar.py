"""Bar of a device's memory: parts of the model, other ranks, other programs, reserve, free."""

from __future__ import annotations

from collections.abc import Iterator

from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QBrush, QColor, QPainter, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.core.scale import px
from app.core.translation import tr, tr_later
from app.core.units import size_text
from app.devices.split.figures import RowFigures, kinds_of
from app.widgets.text import set_tip
from app.widgets.theme import mix, theme

TONES = (0.0, 0.42, 0.62, 0.74)
"""Fade into the background of weights, KV cache, compute buffers and overhead, 0 to 1."""
SIBLING_TONE = 0.8
"""Fade of other ranks on the same device."""
GUEST_TONE = 0.55
"""Fade of the KV cache of GPUs in host memory."""
LEAST_WIDTH = 3
"""Smallest width in pixels of the model's part, so that a small model is still seen."""


class MemoryBar(QWidget):
    """Stacked bar of the memory figures of a row."""

    HEIGHT = 9

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._figures: RowFigures | None = None
        self._measured: int | None = None
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)

    def set_figures(self, figures: RowFigures, measured: int | None = None) -> None:
        """Show `figures`, and a tick where the model was measured to end (bytes)."""
        if figures == self._figures and measured == self._measured:
            return
        self._figures, self._measured = figures, measured
        text = breakdown(figures)
        set_tip(self, text.replace(" · ", "\n"))
        self.setAccessibleName(tr("Memory of {device}").format(device=figures.label))
        self.setAccessibleDescription(text)
        self.update()

    def sizeHint(self) -> QSize:
        return QSize(200, px(self.HEIGHT))

    def paintEvent(self, event: QPaintEvent) -> None:
        colours = theme()
        painter = QPainter(self)
        painter.fillRect(self.rect(), QColor(colours.raised))
        figures = self._figures
        if figures is None or not figures.total:
            return
        used = sum(size for size, _ in self._parts(figures))
        scale = self.width() / max(figures.total, used + figures.reserve)
        left = 0.0
        for size, brush in self._parts(figures):
            painter.fillRect(QRectF(left, 0, size * scale, self.height()), brush)
            left += size * scale
        if figures.reserve:
            start = max(used, figures.total - figures.reserve) * scale
            kept = QRectF(start, 0, figures.reserve * scale, self.height())
            painter.fillRect(kept, _hatch(colours.accent, Qt.BrushStyle.FDiagPattern))
        if used + figures.reserve > figures.total:
            end = figures.total * scale
            over = QRectF(end, 0, self.width() - end, self.height())
            painter.fillRect(over, QColor(colours.danger))
            painter.fillRect(QRectF(end - 1, 0, 2, self.height()), QColor(colours.text))
        if 0 < figures.memory.total * scale < LEAST_WIDTH:
            own = QRectF(0, 0, LEAST_WIDTH, self.height())
            painter.fillRect(own, QColor(colours.device_colour(figures.colour)))
        elif self._measured is not None:
            tick = QRectF(self._measured * scale - 1, 0, 2, self.height())
            painter.fillRect(tick, QColor(colours.text))

    def _parts(self, figures: RowFigures) -> Iterator[tuple[int, QBrush]]:
        colours = theme()
        own = colours.device_colour(figures.colour)
        memory = figures.memory
        kinds = (
            memory.weights,
            memory.kv,
            memory.compute + memory.padding + memory.draft + memory.pictures,
            figures.overhead,
        )
        for size, tone in zip(kinds, TONES, strict=True):
            yield size, QBrush(QColor(mix(own, colours.surface, tone)))
        for sibling, size in figures.siblings:
            colour = mix(colours.device_colour(sibling), colours.surface, SIBLING_TONE)
            yield size, QBrush(QColor(colour))
        guests = QBrush(QColor(mix(colours.muted, colours.surface, GUEST_TONE)))
        yield figures.visiting, guests
        yield figures.outside, _hatch(colours.muted, Qt.BrushStyle.BDiagPattern)


def _hatch(colour: str, style: Qt.BrushStyle) -> QBrush:
    hatch = QBrush(QColor(mix(colour, theme().surface, 0.2)))
    hatch.setStyle(style)
    return hatch


def breakdown(figures: RowFigures) -> str:
    """Return the bar in words: "weights 9.1 GiB · KV cache 2.0 GiB · ..."."""
    parts = [
        *kinds_of(figures),
        (tr_later("other ranks"), sum(size for _, size in figures.siblings)),
        (tr_later("other programs"), figures.outside),
        (tr_later("kept free"), figures.reserve),
        (tr_later("free") if figures.free >= 0 else tr_later("missing"), abs(figures.free)),
    ]
    always = ("free", "missing", "other programs")
    shown = [(name, size) for name, size in parts if size or name in always]
    return " · ".join(f"{tr(name)} {size_text(size)}" for name, size in shown)
