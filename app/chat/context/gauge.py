"""Gauge of the context: a percentage and a ring for the part that the chat and the draft fill."""

from __future__ import annotations

from PySide6.QtCore import QRectF, Qt
from PySide6.QtGui import QColor, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QHBoxLayout, QWidget

from app.chat.context.counter import ContextUsage
from app.core.translation import tr
from app.widgets.layout import scaled
from app.widgets.text import label, set_tip
from app.widgets.theme import px, set_role, theme, theme_signals

WARN_SHARE, DANGER_SHARE = 0.8, 0.95


class ContextGauge(QWidget):
    """Percentage and ring of a `ContextUsage`; the tip says what is counted and what is left."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._label = label(role="muted")
        self._ring = _Ring(self)
        layout = QHBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(8)
        layout.addWidget(self._label)
        layout.addWidget(self._ring)
        self.show_usage(ContextUsage())

    @property
    def text(self) -> str:
        """The percentage in words."""
        return self._label.text()

    def show_usage(self, usage: ContextUsage) -> None:
        """Show how full the context is; hide the gauge while there is none."""
        share = min(usage.share, 1.0)
        percent = tr("context {share} %").format(share=f"{100 * share:.0f}")
        text = percent if usage.fits else tr("too long")
        self._label.setText(text)
        set_role(self._label, "muted" if usage.fits else "danger")
        self._ring.set_share(share)
        set_tip(self, usage.tip())
        self.setAccessibleName(text)
        self.setAccessibleDescription(usage.tip())
        self.setVisible(usage.size > 0)

    def set_compact(self, compact: bool) -> None:
        """Show the ring alone, or the words as well."""
        self._label.setHidden(compact)


class _Ring(QWidget):
    """Ring that is filled by a share of 0 to 1."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._share = 0.0
        scaled(self, self.setFixedSize, 16, 16)
        theme_signals().changed.connect(self.update)

    def set_share(self, share: float) -> None:
        if share != self._share:
            self._share = share
            self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        colours = theme()
        filled = colours.accent
        if self._share >= WARN_SHARE:
            filled = colours.danger if self._share >= DANGER_SHARE else colours.warn
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        area = QRectF(px(2), px(2), px(12), px(12))
        painter.setPen(QPen(QColor(colours.line), 2.5))
        painter.drawEllipse(area)
        pen = QPen(QColor(filled), 2.5)
        pen.setCapStyle(Qt.PenCapStyle.FlatCap)
        painter.setPen(pen)
        painter.drawArc(area, 90 * 16, -int(self._share * 360 * 16))
        painter.end()
