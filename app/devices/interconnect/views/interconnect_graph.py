"""Graph of the links: devices as boxes, links as lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from PySide6.QtCore import QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QColor, QFont, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.core.translation import tr
from app.core.units import decimal
from app.devices.interconnect.interconnect import Edge, InterconnectPicture, Node
from app.widgets.theme import px, theme, theme_signals

if TYPE_CHECKING:
    from engine import LinkFacts

BOX: Final = QSize(104, 40)  # box size at 100 % zoom

MAX_LABELS: Final = 3  # maximum number of labelled lines; more labels would overlap

SIDES: Final = 0.55  # distance of the outermost GPUs from the top, as a fraction of the height

WIDTHS: Final = {"nvlink": 4.0, "p2p": 2.5, "host": 1.2, "network": 1.2}
"""Line width in pixels per kind of link."""


@dataclass(frozen=True, slots=True)
class NodeLook:
    """A device's label and colour index."""

    label: str
    colour: int


class InterconnectGraph(QWidget):
    """Graph of the links; the table below it lists the same facts as text."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._picture = InterconnectPicture()
        self._looks: dict[str, NodeLook] = {}
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setAccessibleName(tr("Graph of the links; the table below lists the same facts"))
        theme_signals().changed.connect(self.update)

    def show_picture(self, picture: InterconnectPicture, looks: dict[str, NodeLook]) -> None:
        """Draw links, with devices named and coloured by `looks`."""
        self._picture, self._looks = picture, looks
        self.updateGeometry()
        self.update()

    def sizeHint(self) -> QSize:
        n = len(self._picture.nodes)
        return QSize(300, px(110 if n <= 1 else 170 if n <= 3 else 230))

    def minimumSizeHint(self) -> QSize:
        return QSize(200, self.sizeHint().height())

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        font = QFont(self.font())
        font.setPixelSize(px(11))
        painter.setFont(font)
        places = self._places()
        for edge in self._picture.edges:
            self._paint_line(painter, places, edge)
        for node in self._picture.nodes:
            self._paint_box(painter, places[node.device], node)
        for edge in self._labelled():
            self._paint_label(painter, places, edge)

    def _labelled(self) -> list[Edge]:
        between = [edge for edge in self._picture.edges if "cpu" not in (edge.a, edge.b)]
        alone = len(self._picture.nodes) == 1
        others = [edge for edge in self._picture.edges if alone or edge.a != edge.b]
        return next((shown for shown in (others, between) if len(shown) <= MAX_LABELS), [])

    def _places(self) -> dict[str, QPointF]:
        area = QRectF(self.rect()).adjusted(
            px(BOX.width()) / 2 + 1,
            px(BOX.height()) / 2 + 1,
            -px(BOX.width()) / 2 - 1,
            -px(BOX.height()) / 2 - 1,
        )
        gpus = [node.device for node in self._picture.nodes if node.device != "cpu"]
        places = {"cpu": QPointF(area.center().x(), area.bottom() if gpus else area.center().y())}
        for number, device in enumerate(gpus):
            if len(gpus) <= 2:
                part = 0.5 if len(gpus) == 1 else number / (len(gpus) - 1)
                places[device] = QPointF(area.left() + part * area.width(), area.top())
            else:
                turn = math.pi * (1 - number / (len(gpus) - 1))
                places[device] = QPointF(
                    area.center().x() + math.cos(turn) * area.width() / 2,
                    area.top() + SIDES * area.height() * (1 - math.sin(turn)),
                )
        return places

    def _paint_line(self, painter: QPainter, places: dict[str, QPointF], edge: Edge) -> None:
        colours = theme()
        is_fast = edge.kind == "nvlink"
        named = {
            "nvlink": colours.ok, "p2p": colours.accent, "host": colours.muted,
            "network": colours.muted,
        }  # fmt: skip
        colour = colours.warn if edge.problems else named[edge.kind]
        pen = QPen(QColor(colour), WIDTHS[edge.kind])
        if edge.kind == "host" and edge.a != edge.b and "cpu" not in (edge.a, edge.b):
            pen.setStyle(Qt.PenStyle.DashLine)
        if edge.kind == "network":
            pen.setStyle(Qt.PenStyle.DotLine)
        pen.setCapStyle(Qt.PenCapStyle.FlatCap if not is_fast else Qt.PenCapStyle.RoundCap)
        painter.setPen(pen)
        painter.setBrush(Qt.BrushStyle.NoBrush)
        if edge.a == edge.b:
            if len(self._picture.nodes) == 1:
                centre = places[edge.a] + QPointF(px(BOX.width()) / 2, 0)
                painter.drawEllipse(centre, 22, 14)
        else:
            painter.drawLine(places[edge.a], places[edge.b])

    def _paint_box(self, painter: QPainter, place: QPointF, node: Node) -> None:
        colours, look = theme(), self._looks[node.device]
        area = QRectF(0, 0, px(BOX.width()), px(BOX.height()))
        area.moveCenter(place)
        painter.setPen(QPen(QColor(colours.line), 1))
        painter.setBrush(QColor(colours.raised))
        painter.drawRoundedRect(area, 8, 8)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QColor(colours.device_colour(look.colour)))
        dot = QRectF(area.left() + px(10), area.top() + px(8), px(9), px(9))
        if not node.slot:
            dot.moveTop(area.center().y() - px(9) / 2)
        painter.drawRoundedRect(dot, 2.5, 2.5)
        painter.setPen(QColor(colours.text))
        line = QRectF(area.left() + px(25), dot.center().y() - px(8), area.width() - px(30), px(16))
        side = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
        painter.drawText(line, side, look.label)
        if node.slot:
            painter.setPen(QColor(colours.warn if node.slot_at_most else colours.muted))
            line = QRectF(area.left() + px(10), area.top() + px(20), area.width() - px(12), px(16))
            painter.drawText(line, side, slot_line(node))

    def _paint_label(self, painter: QPainter, places: dict[str, QPointF], edge: Edge) -> None:
        colours = theme()
        text = facts_text(edge.facts, is_measured=edge.is_measured)
        if edge.a == edge.b:
            middle = places[edge.a] + QPointF(0, px(BOX.height()) / 2 + 14)
        else:
            middle = (places[edge.a] + places[edge.b]) / 2
        width = painter.fontMetrics().horizontalAdvance(text) + 8
        area = QRectF(0, 0, width, painter.fontMetrics().height() + 2)
        area.moveCenter(middle)
        painter.fillRect(area, QColor(colours.surface))
        painter.setPen(QColor(colours.text if edge.is_measured else colours.muted))
        painter.drawText(area, Qt.AlignmentFlag.AlignCenter, text)


def slot_line(node: Node) -> str:
    """Return a slot as "PCIe 4.0 x16", or "1.0 x16 of 4.0 x16" if it is below its maximum."""
    if not node.slot:
        return ""
    if not node.slot_at_most:
        return f"PCIe {node.slot}"
    return tr("{now} of {most}").format(now=node.slot, most=node.slot_at_most)


def facts_text(facts: LinkFacts, *, is_measured: bool) -> str:
    """Return latency and bandwidth as "11 µs · 4.9 GB/s", prefixed with "~" if estimated."""
    about = "" if is_measured else "~ "
    return f"{about}{latency_text(facts)} · {rate_text(facts)}"


def latency_text(facts: LinkFacts) -> str:
    """Return a latency as "11 µs"."""
    return f"{1e6 * facts.latency_s:.0f} µs"


def rate_text(facts: LinkFacts) -> str:
    """Return a bandwidth as "4.9 GB/s"."""
    speed = facts.bytes_per_s / 1e9
    return decimal(f"{speed:.0f} GB/s" if speed >= 10 else f"{speed:.1f} GB/s")


def looks_of(devices: Sequence[str], labels: Sequence[str]) -> dict[str, NodeLook]:
    """Return each device's look; its colour is its index in `devices`."""
    pairs = zip(devices, labels, strict=True)
    return {device: NodeLook(label, at) for at, (device, label) in enumerate(pairs)}
