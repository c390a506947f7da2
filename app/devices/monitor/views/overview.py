"""All devices at a glance: one row each, with bars for memory and load.

A single widget paints it, because a table of widgets would cost more than all graphs together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from PySide6.QtCore import QEvent, QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QColor, QHelpEvent, QPainter, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.core.translation import tr, tr_later, translated
from app.devices.monitor.record import (
    clock_text,
    memory_text,
    others_text,
    power_text,
    spoken_state,
    traffic_text,
)
from app.widgets.text import set_tip, show_tip
from app.widgets.theme import mix, px, theme
from engine import DeviceSnapshot

ROW: Final = 24
HEAD: Final = 20
GAP: Final = 14
NAME: Final = 170
MIN_BAR: Final = 110
TEXT_PIXELS: Final = 12


@dataclass(frozen=True, slots=True)
class DeviceState:
    """A device's label ("GPU 0"), product name, colour and latest reading."""

    label: str
    name: str
    colour: int
    snapshot: DeviceSnapshot


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    width: int
    text: Callable[[DeviceSnapshot], str]


def _degrees(snapshot: DeviceSnapshot) -> str:
    return "" if snapshot.temperature_c is None else f"{snapshot.temperature_c:.0f} °C"


COLUMNS: Final = (
    _Column(tr_later("Power"), 86, power_text),
    _Column(tr_later("Temp."), 48, _degrees),
    _Column(tr_later("Clock"), 140, clock_text),
    _Column(tr_later("PCIe"), 120, traffic_text),
    _Column(tr_later("Others"), 62, others_text),
)
ORDER: Final = (0, 1, 4, 2, 3)
"""Columns by decreasing importance; the last ones are omitted if not all fit."""


class Overview(QWidget):
    """Table of the current state of all devices."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._states: tuple[DeviceState, ...] = ()
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Minimum)
        self.setAccessibleName(tr("All devices"))

    def show_states(self, states: Sequence[DeviceState]) -> None:
        """Draw these devices."""
        if len(states) != len(self._states):
            self.updateGeometry()
        self._states = tuple(states)
        self.setAccessibleDescription(
            ". ".join(spoken_state(state.label, state.snapshot) for state in states)
        )
        self.update()

    def sizeHint(self) -> QSize:
        return QSize(px(320), px(HEAD + ROW * len(self._states)))

    def minimumSizeHint(self) -> QSize:
        return QSize(px(280), self.sizeHint().height())

    def event(self, event: QEvent) -> bool:
        if isinstance(event, QHelpEvent) and event.type() == QEvent.Type.ToolTip:
            at = (event.pos().y() - px(HEAD)) // px(ROW)
            if 0 <= at < len(self._states):
                state = self._states[at]
                full = f"{state.label} {state.name}".strip()
                show_tip(self, event.globalPos(), spoken_state(full, state.snapshot))
            else:
                set_tip(self, "")
            return True
        return super().event(event)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        font = painter.font()
        font.setPixelSize(px(TEXT_PIXELS))
        painter.setFont(font)
        columns, bar = self._fitting()
        painter.setPen(QColor(theme().muted))
        head = [(tr(column.title), column.width) for column in columns]
        self._paint_texts(painter, QRectF(0, 0, bar, px(HEAD)), tr("Device"), head)
        left = self._bars_left()
        for at, title in enumerate((tr("Memory"), tr("Load", "how busy a device is"))):
            x = left + at * (bar + px(GAP))
            _write(painter, QRectF(x, 0, bar, px(HEAD)), title)
        for row, state in enumerate(self._states):
            area = QRectF(0, px(HEAD) + row * px(ROW), bar, px(ROW))
            self._paint_row(painter, area, state, columns)

    def _fitting(self) -> tuple[list[_Column], float]:
        room = self.width() - self._bars_left() - 2 * px(MIN_BAR + GAP)
        chosen: set[int] = set()
        for at in ORDER:
            needed = px(COLUMNS[at].width + GAP)
            if needed > room:
                break
            room -= needed
            chosen.add(at)
        columns = [COLUMNS[at] for at in sorted(chosen)]
        return columns, px(MIN_BAR) + max(0.0, room / 2)

    def _bars_left(self) -> int:
        return min(px(NAME), self.width() // 4) + px(GAP)

    def _paint_row(
        self, painter: QPainter, area: QRectF, state: DeviceState, columns: Sequence[_Column]
    ) -> None:
        """Paint a device; `area` gives the top and height of its row and the width of a bar."""
        colours, shown = theme(), state.snapshot
        painter.setPen(QColor(colours.text))
        cells = [("" if shown.problem else column.text(shown), column.width) for column in columns]
        self._paint_texts(painter, area, f"     {state.label}  {state.name}", cells)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QColor(colours.device_colour(state.colour)))
        radius = px(8) / 2
        painter.drawEllipse(QPointF(radius + 1, area.center().y()), radius, radius)
        bar = area.translated(self._bars_left(), 0)
        if shown.problem:
            painter.setPen(QColor(colours.danger))
            bar.setRight(self.width())
            _write(painter, bar, translated(shown.problem))
            return
        memory = shown.used_bytes / shown.total_bytes if shown.total_bytes else None
        load = None if shown.load_percent is None else shown.load_percent / 100
        _paint_bar(painter, bar, memory, memory_text(shown), state.colour)
        bar.translate(area.width() + px(GAP), 0)
        _paint_bar(painter, bar, load, "" if load is None else f"{100 * load:.0f} %", state.colour)

    def _paint_texts(
        self, painter: QPainter, area: QRectF, name: str, cells: Sequence[tuple[str, int]]
    ) -> None:
        left = self._bars_left()
        place = QRectF(area)
        place.setWidth(left - px(GAP))
        _write(painter, place, name)
        place.moveLeft(left + 2 * (area.width() + px(GAP)))
        for text, width in cells:
            place.setWidth(px(width))
            _write(painter, place, text)
            place.translate(px(width + GAP), 0)


def _write(painter: QPainter, area: QRectF, text: str) -> None:
    side = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
    elide = Qt.TextElideMode.ElideRight
    painter.drawText(area, side, painter.fontMetrics().elidedText(text, elide, int(area.width())))


def _paint_bar(painter: QPainter, area: QRectF, part: float | None, text: str, colour: int) -> None:
    colours = theme()
    inner = area.adjusted(0, px(3), 0, -px(3))
    painter.fillRect(inner, QColor(colours.raised))
    if part is not None:
        tone = mix(colours.device_colour(colour), colours.raised, 0.45)
        filled = QRectF(inner)
        filled.setWidth(inner.width() * min(1.0, part))
        painter.fillRect(filled, QColor(tone))
    painter.setPen(QColor(colours.text if text else colours.muted))
    _write(painter, inner.adjusted(px(6), 0, -px(4), 0), text or "–")
