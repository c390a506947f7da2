"""The placement map: blocks × tensors in the colours of the devices that hold them.

A `QTableView`, so that arrow keys, selections and screen readers work as in any table. It only
emits which parts should be pinned.
"""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QEvent, QItemSelectionModel, QPoint, Qt, Signal
from PySide6.QtGui import (
    QContextMenuEvent,
    QKeyEvent,
    QMouseEvent,
    QResizeEvent,
    QWheelEvent,
)
from PySide6.QtWidgets import QAbstractItemView, QMenu, QTableView, QWidget

from app.core.translation import tr
from app.devices.map.grid import Cell, Grid
from app.devices.map.pins import Part
from app.devices.map.views.device_chips import PinTarget
from app.devices.map.views.placement_table import (
    CellPainter,
    Index,
    Look,
    NarrowHeader,
    PlacementTable,
)
from app.widgets.shortcuts import is_pressed
from app.widgets.theme import theme_signals

ZOOM_STEP = 1.25
MAX_ZOOM = 12
"""Number of zoom steps at most; at zoom 0 the map fills the view."""

ROW_HEIGHT = (6, 22)
COLUMN_WIDTH = (14, 64)
"""Least and largest size of a cell in pixels at zoom 0."""


class PlacementView(QTableView):
    """The map as a table; `PlacementPanel` has the controls around it."""

    pin_requested = Signal(str, object)  # override target, parts
    unpin_requested = Signal(object)  # parts
    pointed = Signal(object)  # Cell under the mouse or with the focus, or None
    chosen = Signal()  # the selection has changed

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.table = PlacementTable(self)
        self.zoom = 0
        self._targets: tuple[PinTarget, ...] = ()
        self.setModel(self.table)
        self.setItemDelegate(CellPainter(self.table, self))
        self.setHorizontalHeader(NarrowHeader(Qt.Orientation.Horizontal, self))
        self.setVerticalHeader(NarrowHeader(Qt.Orientation.Vertical, self))
        self.setShowGrid(False)
        self.setMouseTracking(True)
        self.setDragEnabled(True)
        self.setDragDropMode(QAbstractItemView.DragDropMode.DragOnly)
        self.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        self.setHorizontalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.setVerticalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.setCornerButtonEnabled(False)
        self.setTabKeyNavigation(False)
        self.setAccessibleName(tr("Placement map"))
        self.entered.connect(lambda index: self.pointed.emit(self.table.cell(index)))
        theme_signals().changed.connect(self.viewport().update)

    def show_grid(self, grid: Grid, look: Look) -> None:
        """Show a map; the selection is kept while rows and columns stay the same."""
        if self.table.set_grid(grid, look):
            self.clearSpans()
            for cell in grid.cells.values():
                if cell.span > 1:
                    self.setSpan(cell.row, cell.column, 1, cell.span)
            self._resize_cells()
        self.pointed.emit(self.table.cell(self.currentIndex()))

    def set_targets(self, targets: Sequence[PinTarget]) -> None:
        """Set what parts can be pinned to, by the keys 1 to 9 and by the menu."""
        self._targets = tuple(targets)

    @property
    def selected_parts(self) -> frozenset[Part]:
        """Parts of the selected cells."""
        cells = (self.table.cell(index) for index in self.selectedIndexes())
        return frozenset(part for cell in cells if cell is not None for part in cell.parts)

    def pin(self, target: str) -> None:
        """Emit that the selection should be pinned to `target`."""
        if self.selected_parts:
            self.pin_requested.emit(target, self.selected_parts)

    def unpin(self) -> None:
        """Emit that the selection should be unpinned, so that the split decides its place."""
        if self.selected_parts:
            self.unpin_requested.emit(self.selected_parts)

    def set_zoom(self, zoom: int, anchor: QPoint | None = None) -> None:
        """Set the size of cells; what is at `anchor` of the view stays there."""
        zoom = min(MAX_ZOOM, max(0, zoom))
        if zoom == self.zoom:
            return
        at = anchor or self.viewport().rect().center()
        bars = (self.horizontalScrollBar(), self.verticalScrollBar())
        before = self.horizontalHeader().length(), self.verticalHeader().length()
        places = [bar.value() + offset for bar, offset in zip(bars, at.toTuple(), strict=True)]
        self.zoom = zoom
        self._resize_cells()
        after = self.horizontalHeader().length(), self.verticalHeader().length()
        self.updateGeometries()
        for bar, place, old, new, offset in zip(
            bars, places, before, after, at.toTuple(), strict=True
        ):
            bar.setValue(round(place * new / max(1, old) - offset))

    def _resize_cells(self) -> None:
        """Set the size of cells: they fill the view at zoom 0, and grow from there."""
        grid, factor = self.table.grid, ZOOM_STEP**self.zoom
        if not grid.rows:
            return
        room = self.viewport().size()
        width = min(COLUMN_WIDTH[1], max(COLUMN_WIDTH[0], room.width() // len(grid.columns)))
        height = min(ROW_HEIGHT[1], max(ROW_HEIGHT[0], room.height() // len(grid.rows)))
        self.horizontalHeader().setDefaultSectionSize(round(width * factor))
        self.verticalHeader().setDefaultSectionSize(round(height * factor))

    # Qt

    def currentChanged(self, current: Index, previous: Index) -> None:  # noqa: N802 Qt
        super().currentChanged(current, previous)
        self.pointed.emit(self.table.cell(current))

    def selectionChanged(self, *args: object) -> None:  # noqa: N802 Qt
        super().selectionChanged(*args)  # type: ignore[arg-type]
        self.chosen.emit()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if is_pressed("unpin", event):
            self.unpin()
        elif is_pressed("zoom-in", event):
            self.set_zoom(self.zoom + 1)
        elif is_pressed("zoom-out", event):
            self.set_zoom(self.zoom - 1)
        elif is_pressed("no-zoom", event):
            self.set_zoom(0)
        elif is_pressed("pin", event) and int(event.text()) <= len(self._targets):
            self.pin(self._targets[int(event.text()) - 1].override)
        else:
            super().keyPressEvent(event)

    def wheelEvent(self, event: QWheelEvent) -> None:
        if event.modifiers() & Qt.KeyboardModifier.ControlModifier:
            step = 1 if event.angleDelta().y() > 0 else -1
            self.set_zoom(self.zoom + step, event.position().toPoint())
            event.accept()
        else:
            super().wheelEvent(event)

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        super().mouseMoveEvent(event)
        if not self.indexAt(event.position().toPoint()).isValid():
            self.pointed.emit(self.table.cell(self.currentIndex()))

    def leaveEvent(self, event: QEvent) -> None:
        super().leaveEvent(event)
        self.pointed.emit(self.table.cell(self.currentIndex()))

    def contextMenuEvent(self, event: QContextMenuEvent) -> None:
        index = self.indexAt(event.pos())
        if index.isValid() and not self.selectionModel().isSelected(index):
            flag = QItemSelectionModel.SelectionFlag.ClearAndSelect
            self.selectionModel().setCurrentIndex(index, flag)
        menu = self.make_menu()
        menu.exec(event.globalPos())
        menu.deleteLater()

    def make_menu(self) -> QMenu:
        """Return the menu of the selection."""
        menu = QMenu(self)
        has_parts = bool(self.selected_parts)
        for target in self._targets:
            action = menu.addAction(tr("Pin to {device}").format(device=target.label))
            action.setEnabled(has_parts)
            action.triggered.connect(lambda _=False, t=target.override: self.pin(t))
        menu.addSeparator()
        unpin = menu.addAction(tr("Unpin"))
        unpin.setEnabled(any(cell.is_pinned for cell in self._selected_cells()))
        unpin.triggered.connect(self.unpin)
        return menu

    def _selected_cells(self) -> list[Cell]:
        cells = (self.table.cell(index) for index in self.selectedIndexes())
        return [cell for cell in cells if cell is not None]

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._resize_cells()
