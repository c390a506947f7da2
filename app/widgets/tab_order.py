"""The orders of keyboard and screen readers: as the window is read, not as it was built."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from PySide6.QtCore import QPoint, Qt
from PySide6.QtWidgets import QScrollArea, QWidget

LINE_PIXELS = 10
"""Largest distance between the middles of widgets on one line."""


def place_among(widgets: Sequence[QWidget], number: int) -> None:
    """Move one of some siblings to its place in their order, by which screen readers go."""
    if number + 1 < len(widgets):
        widgets[number].stackUnder(widgets[number + 1])
    else:
        widgets[number].raise_()


def tab_stops(regions: Iterable[QWidget]) -> list[QWidget]:
    """Return the widgets that Tab stops at: region by region, in each by lines from the top."""
    return [stop for region in regions for stop in _stops_in(region)]


def neighbour(stops: Sequence[QWidget], now: QWidget | None, *, forward: bool) -> QWidget | None:
    """Return the stop after or before `now`, wrapping around; None if there are no stops."""
    if not stops:
        return None
    if now not in stops:
        return stops[0 if forward else -1]
    return stops[(stops.index(now) + (1 if forward else -1)) % len(stops)]


def _stops_in(region: QWidget) -> list[QWidget]:
    """Return the stops of a region; a scroll area keeps its place however far it is scrolled."""
    found = region.findChildren(QScrollArea)
    areas = [area for area in found if not _is_inside(area, found)]
    stops = [
        widget
        for widget in region.findChildren(QWidget)
        if _is_stop(widget, region) and not _is_inside(widget, areas)
    ]
    result: list[QWidget] = []
    for widget in _by_lines({*stops, *areas}, region):
        if widget in stops:
            result.append(widget)
        if isinstance(widget, QScrollArea):
            content = widget.widget()
            result += _stops_in(content) if content is not None else []
    return result


def _is_inside(widget: QWidget, areas: Sequence[QWidget]) -> bool:
    return any(area is not widget and area.isAncestorOf(widget) for area in areas)


def _is_stop(widget: QWidget, region: QWidget) -> bool:
    return (
        bool(widget.focusPolicy() & Qt.FocusPolicy.TabFocus)
        and widget.focusProxy() is None
        and widget.isVisible()
        and widget.isEnabled()
        and widget.window() is region.window()
    )


def _by_lines(widgets: Iterable[QWidget], region: QWidget) -> list[QWidget]:
    anchors = {widget: widget.mapTo(region, _anchor(widget)) for widget in widgets}
    lines: list[list[QWidget]] = []
    top = 0
    for widget in sorted(anchors, key=lambda widget: anchors[widget].y()):
        y = anchors[widget].y()
        if not lines or y - top > LINE_PIXELS:
            lines.append([])
            top = y
        lines[-1].append(widget)
    return [w for line in lines for w in sorted(line, key=lambda widget: anchors[widget].x())]


def _anchor(widget: QWidget) -> QPoint:
    """Return the middle of the left edge, or of the first line of a high widget."""
    return QPoint(0, min(widget.height() // 2, 2 * LINE_PIXELS))
