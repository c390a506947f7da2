"""A table whose rows are chosen by Enter or a double click; the order of Tab stops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from PySide6.QtCore import QModelIndex, QPoint, Qt, Signal, Slot
from PySide6.QtGui import QKeyEvent, QResizeEvent, QShowEvent
from PySide6.QtWidgets import QHeaderView, QScrollArea, QTableView, QWidget

from app.widgets.layout import scaled
from app.widgets.shortcuts import is_pressed
from app.widgets.theme import px

ROW_HEIGHT = 30
GOOD_NAME = 290  # pixels; other columns are hidden to keep the name column this wide
MIN_NAME = 140  # minimum width of the name column, in pixels


class RowTable(QTableView):
    """Table with names in the first column, which fills the remaining width."""

    chosen = Signal(QModelIndex)

    def __init__(self, name: str) -> None:
        super().__init__()
        self._droppable: Sequence[int] = ()
        self._is_fitting = False
        self.doubleClicked.connect(self.chosen)
        self.setAccessibleName(name)
        self.setShowGrid(False)
        self.setWordWrap(False)
        self.setTextElideMode(Qt.TextElideMode.ElideMiddle)  # model names also differ at the end
        self.setTabKeyNavigation(False)
        self.verticalHeader().hide()
        scaled(self, self.verticalHeader().setDefaultSectionSize, ROW_HEIGHT)
        self.setEditTriggers(QTableView.EditTrigger.NoEditTriggers)
        self.setSelectionBehavior(QTableView.SelectionBehavior.SelectRows)
        self.setSelectionMode(QTableView.SelectionMode.SingleSelection)

    def set_headers(self, droppable: Sequence[int] = ()) -> None:
        """Lay out the columns; if they do not fit, hide those in `droppable`, in this order."""
        self._droppable = droppable
        header = self.horizontalHeader()
        header.setDefaultAlignment(Qt.AlignmentFlag.AlignLeft)
        header.setHighlightSections(False)  # highlighted titles are bold and thus wider
        header.setSectionResizeMode(QHeaderView.ResizeMode.ResizeToContents)
        header.setSectionResizeMode(0, QHeaderView.ResizeMode.Interactive)
        header.setMinimumSectionSize(60)
        header.sectionResized.connect(self.fit_names)

    @Slot()
    def fit_names(self) -> None:
        """Set the width of the name column, and hide other columns if they do not fit."""
        if self._is_fitting or not self.isVisible():  # resizing a column calls this again
            return
        self._is_fitting = True
        room = self.viewport().width() - self._drop_columns()
        self.horizontalHeader().resizeSection(0, max(px(MIN_NAME), room))
        self._is_fitting = False

    def _drop_columns(self) -> int:
        header = self.horizontalHeader()
        # not `sectionSizeHint`: it is 0 for hidden columns, so they would be shown again
        widths = [
            max(
                self.sizeHintForColumn(column),
                header.sectionSizeFromContents(column).width(),
                header.minimumSectionSize(),
            )
            for column in range(1, header.count())
        ]
        room = self.viewport().width() - px(GOOD_NAME)
        for column in self._droppable:
            is_dropped = sum(widths) > room
            self.setColumnHidden(column, is_dropped)
            if is_dropped:
                widths[column - 1] = 0
        return sum(widths)

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.fit_names()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.fit_names()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if is_pressed("open-selected", event) and self.currentIndex().isValid():
            self.chosen.emit(self.currentIndex())
        else:
            super().keyPressEvent(event)


LINE_PIXELS = 10  # maximum vertical distance between widgets in the same line


def place_among(widgets: Sequence[QWidget], number: int) -> None:
    """Restack `widgets[number]` to match the list; screen readers follow the stacking order."""
    if number + 1 < len(widgets):
        widgets[number].stackUnder(widgets[number + 1])
    else:
        widgets[number].raise_()


def tab_stops(regions: Iterable[QWidget]) -> list[QWidget]:
    """Return the Tab stops region by region, and within each, line by line from the top."""
    return [stop for region in regions for stop in _stops_in(region)]


def neighbour(stops: Sequence[QWidget], now: QWidget | None, *, forward: bool) -> QWidget | None:
    """Return the stop after or before `now`, wrapping around; None if there are no stops."""
    if not stops:
        return None
    if now not in stops:
        return stops[0 if forward else -1]
    return stops[(stops.index(now) + (1 if forward else -1)) % len(stops)]


def _stops_in(region: QWidget) -> list[QWidget]:
    """Return a region's stops in an order that does not depend on scroll positions."""
    scrolls = region.findChildren(QScrollArea)
    areas = [area for area in scrolls if not _is_inside(area, scrolls)]
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
    """Return the middle of the left edge; for a tall widget, the middle of its first line."""
    return QPoint(0, min(widget.height() // 2, 2 * LINE_PIXELS))
