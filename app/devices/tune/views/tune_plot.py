"""Graph of the splits tried: speed versus the first device's share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyqtgraph as pg
from PySide6.QtCore import Qt
from PySide6.QtGui import QColor, QFont
from PySide6.QtWidgets import QSizePolicy, QVBoxLayout, QWidget

from app.core.translation import tr
from app.devices.tune.results import SHAPE_TEXTS, SHAPES, Point, Shape
from app.widgets.controls import nice_top
from app.widgets.layout import NO_MARGINS, fill
from app.widgets.text import LegendLabel, Sign, html_text
from app.widgets.theme import px, theme, theme_signals

SYMBOLS: Final[dict[Shape, str]] = {"tensor": "o", "layer": "s", "groups": "t1", "single": "d"}
SIGNS: Final[dict[Shape, str]] = {"tensor": "●", "layer": "■", "groups": "▲", "single": "◆"}
SIZE, BEST_SIZE = 8, 13
SHADE: Final = 0.18  # opacity of the shading over shares that do not fit


class TunePlot(QWidget):
    """Graph with one point per trial; shares that do not fit are shaded."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.plot = pg.PlotWidget(background=None)
        self.legend = LegendLabel()
        self._points: tuple[Point, ...] = ()
        self._best: int | None = None
        self._regions: tuple[tuple[float, float], ...] = ()
        self._first = ""
        self._items: list[Any] = []
        self._set_up()
        fill(QVBoxLayout(self), (self.plot, 1), self.legend, margins=NO_MARGINS, spacing=4)
        self.setMinimumHeight(200)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.setAccessibleName(tr("Graph of speed by share; the table below lists the same trials"))
        theme_signals().changed.connect(self._draw)
        self._draw()

    def show_points(self, points: Sequence[Point], best: int | None) -> None:
        """Draw trials; `best` is the index of the fastest one."""
        self._points, self._best = tuple(points), best
        self._draw()

    def show_regions(self, regions: Sequence[tuple[float, float]], first: str) -> None:
        """Shade shares (0 to 1) of the first device that do not fit; `first` is its name."""
        self._regions, self._first = tuple(regions), first
        self._draw()

    def _set_up(self) -> None:
        item = self.plot.getPlotItem()
        item.setMenuEnabled(False)
        item.hideButtons()
        self.plot.setMouseEnabled(x=False, y=False)
        self.plot.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.plot.viewport().setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.plot.setXRange(0, 100, padding=0.03)
        self.plot.showGrid(y=True, alpha=0.2)
        font = QFont(self.font())
        font.setPixelSize(px(11))
        for side in ("left", "bottom"):
            axis = self.plot.getAxis(side)
            axis.setStyle(tickLength=0, tickFont=font, tickTextOffset=6)
        self.plot.getAxis("left").setWidth(64)

    def _draw(self) -> None:
        colours = theme()
        for side in ("left", "bottom"):
            axis = self.plot.getAxis(side)
            axis.setTextPen(QColor(colours.muted))
            axis.setPen(pg.mkPen(None))
            axis.enableAutoSIPrefix(enable=False)
        name = self._first or tr("the first device")
        for side, text in (
            ("bottom", tr("share of {device}, %").format(device=name)),
            ("left", "tok/s"),
        ):
            self.plot.setLabel(side, html_text(text), color=colours.muted, **{"font-size": "11px"})
        for item in self._items:
            self.plot.removeItem(item)
        self._items = [*self._shades(), *self._lines(), *self._marks()]
        for item in self._items:
            self.plot.addItem(item)
        ran = [point.tokens_per_s for point in self._points if point.can_run]
        self.plot.setYRange(0, nice_top(max(ran, default=1.0)), padding=0.03)
        self._show_legend()

    def _shades(self) -> list[Any]:
        shade = QColor(theme().danger)
        shade.setAlphaF(SHADE)
        made = []
        for start, stop in self._regions:
            area = pg.LinearRegionItem(
                (100 * start, 100 * stop), movable=False, brush=shade, pen=pg.mkPen(None)
            )
            area.setZValue(-10)
            made.append(area)
        return made

    def _lines(self) -> list[Any]:
        line = sorted(
            (100 * p.share, p.tokens_per_s)
            for p in self._points
            if p.shape == "tensor" and p.can_run
        )
        if len(line) < 2:
            return []
        pen = pg.mkPen(_colour("tensor"), width=1.5)
        return [pg.PlotDataItem([x for x, _ in line], [y for _, y in line], pen=pen)]

    def _marks(self) -> list[Any]:
        made = []
        for at, point in enumerate(self._points):
            is_best = at == self._best
            made.append(
                pg.ScatterPlotItem(
                    [100 * point.share],
                    [point.tokens_per_s],
                    symbol=SYMBOLS[point.shape] if point.can_run else "x",
                    size=BEST_SIZE if is_best else SIZE,
                    brush=QColor(_colour(point.shape) if point.can_run else theme().danger),
                    pen=pg.mkPen(theme().text if is_best else None, width=2),
                )
            )
        return made

    def _show_legend(self) -> None:
        shapes = {point.shape for point in self._points}
        signs = [
            Sign(_colour(shape), SIGNS[shape], tr(SHAPE_TEXTS[shape]))
            for shape in SHAPES
            if shape in shapes
        ]
        if self._regions:
            signs.append(Sign(theme().danger, "▒", tr("does not fit")))
        self.legend.set_signs(signs)


def _colour(shape: Shape) -> str:
    return theme().device_colour(SHAPES.index(shape))
