"""The placement map: blocks × tensors in the colours of their devices.

It is a `QTableView`, so arrow keys, selection and screen readers work as in any table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PySide6.QtCore import QEvent, QItemSelectionModel, QPoint, QSize, Qt, Signal
from PySide6.QtGui import (
    QColor,
    QContextMenuEvent,
    QDragEnterEvent,
    QDragLeaveEvent,
    QDropEvent,
    QIcon,
    QKeyEvent,
    QMouseEvent,
    QPainter,
    QPixmap,
    QResizeEvent,
    QShowEvent,
    QWheelEvent,
)
from PySide6.QtWidgets import (
    QAbstractItemView,
    QGridLayout,
    QHBoxLayout,
    QMenu,
    QPushButton,
    QTableView,
    QVBoxLayout,
    QWidget,
)

from app.core.translation import tr, tr_later
from app.devices.map.grid import (
    Cell,
    Grid,
    Overrides,
    Part,
    cell_lines,
    grid_of,
    parts_text,
    ranks_text,
)
from app.devices.map.views.placement_table import (
    CellPainter,
    Index,
    Look,
    NarrowHeader,
    PlacementTable,
    dragged_parts,
)
from app.widgets.buttons import button
from app.widgets.layout import fill
from app.widgets.shortcuts import is_pressed
from app.widgets.text import caption_text, label, set_tip
from app.widgets.theme import px, set_role, theme, theme_signals

if TYPE_CHECKING:
    from engine import PlacementMap

PER_ROW = 4  # buttons per row


@dataclass(frozen=True, slots=True)
class PinTarget:
    """Device or rank to pin parts to; `override` is a device id, or "#" and a rank index."""

    override: str
    label: str
    colour: int


class DeviceChip(QPushButton):
    """Button for one target: a click pins the selection, a drop pins the dropped parts."""

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
    """Buttons for all targets, in rows."""

    pressed = Signal(str)  # override target for the selection
    dropped = Signal(str, object)  # override target, parts

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.chips: list[DeviceChip] = []
        self._layout = QGridLayout(self)
        self._layout.setContentsMargins(0, 0, 0, 0)
        self._layout.setSpacing(6)

    def set_targets(self, targets: Sequence[PinTarget]) -> None:
        """Offer targets; if they are unchanged, the buttons and the focus are kept."""
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


ZOOM_STEP = 1.25
MAX_ZOOM = 12  # maximum number of zoom steps; at zoom 0 the map fills the view

ROW_HEIGHT = (6, 22)
COLUMN_WIDTH = (14, 64)
"""Minimum and maximum size of a cell in pixels at zoom 0."""


class PlacementView(QTableView):
    """The map as a table; `PlacementPanel` adds the controls around it."""

    pin_requested = Signal(str, object)  # override target, parts
    unpin_requested = Signal(object)  # parts
    pointed = Signal(object)  # Cell under the mouse or with the focus, or None
    chosen = Signal()  # the selection changed

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
        """Show a map; if rows and columns are unchanged, the selection is kept."""
        if self.table.set_grid(grid, look):
            self.clearSpans()
            for cell in grid.cells.values():
                if cell.span > 1:
                    self.setSpan(cell.row, cell.column, 1, cell.span)
            self._resize_cells()
        self.pointed.emit(self.table.cell(self.currentIndex()))

    def set_targets(self, targets: Sequence[PinTarget]) -> None:
        """Set the targets for the keys 1 to 9 and for the menu."""
        self._targets = tuple(targets)

    @property
    def selected_parts(self) -> frozenset[Part]:
        """Parts of the selected cells."""
        return frozenset(part for cell in self._selected_cells() for part in cell.parts)

    def pin(self, target: str) -> None:
        """Request to pin the selection to `target`."""
        if self.selected_parts:
            self.pin_requested.emit(target, self.selected_parts)

    def unpin(self) -> None:
        """Request to unpin the selection."""
        if self.selected_parts:
            self.unpin_requested.emit(self.selected_parts)

    def set_zoom(self, zoom: int, anchor: QPoint | None = None) -> None:
        """Set the zoom step; the cell at `anchor` in the view stays in place."""
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
        """Return the context menu for the selection."""
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


EMPTY = tr_later("Open a model to see which device holds each tensor.")
HINT = tr_later("Select cells and drag them to a device, or press its number.")
HINT_TIP = tr_later("Click a row or column title to select all of it")
DETAIL_LINES = 4  # maximum number of lines in the details


class PlacementPanel(QWidget):
    """A model's map with its controls; emits requests to pin parts."""

    pin_requested = Signal(str, object)  # override target, frozenset[Part]
    unpin_requested = Signal(object)  # frozenset[Part]
    unpin_all_requested = Signal()
    shown = Signal()  # the content may be outdated

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.setProperty("role", "panel")
        self.view = PlacementView()
        self.chips = DeviceChips()
        self.unpin = button(tr("Unpin"), "quiet")
        self.unpin_all = button(tr("Unpin all"), "quiet")
        self.hint = label(tr(EMPTY), "muted")
        set_tip(self.hint, tr(HINT_TIP))
        self.hint.setWordWrap(True)
        self.detail = label(role="muted")
        self.detail.setAccessibleName(tr("Tensor"))
        self.detail.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.detail.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.detail.setWordWrap(True)
        self._labels: tuple[str, ...] = ()
        self._overrides: Overrides = ()
        self._build()
        self._connect()
        self.clear()

    def show_map(
        self, found: PlacementMap, overrides: Overrides, look: Look, targets: Sequence[PinTarget]
    ) -> None:
        """Show a model's map, given its ranks' labels and colours and the available pin targets."""
        self._labels, self._overrides = look.labels, overrides
        self.chips.set_targets(targets)
        self.view.set_targets(targets)
        self.view.show_grid(grid_of(found, overrides), look)
        self._set_shown(True)
        self._show_selection()

    def show_problem(self, text: str, overrides: Overrides) -> None:
        """Show why there is no map, and offer to remove the pins, which may be the cause."""
        self._overrides = overrides
        self.unpin_all.setVisible(bool(overrides))
        self.unpin_all.setEnabled(bool(overrides))
        set_role(self.hint, "shortage")
        self.hint.setText(text)
        self.hint.show()

    def clear(self) -> None:
        """Show that there is no model."""
        self._set_shown(False)
        set_role(self.hint, "muted")
        self.hint.setText(tr(EMPTY))
        self.hint.show()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.shown.emit()

    def _set_shown(self, shown: bool) -> None:
        for widget in (self.view, self.chips, self.unpin, self.unpin_all, self.detail):
            widget.setVisible(shown)

    def _show_selection(self) -> None:
        parts = self.view.selected_parts
        set_role(self.hint, "muted")
        selected = tr("Selected: {parts}")
        self.hint.setText(selected.format(parts=parts_text(parts)) if parts else tr(HINT))
        self.unpin.setEnabled(bool(parts))
        self.unpin_all.setEnabled(bool(self._overrides))

    def _show_cell(self, cell: Cell | None) -> None:
        lines = [] if cell is None else [*cell_lines(cell), ranks_text(cell, self._labels)]
        if cell is not None and cell.is_shared:
            lines.append(tr("Each of the block's ranks holds a full copy."))
        self.detail.setText("\n".join(lines))

    def _build(self) -> None:
        below = fill(QHBoxLayout(), (self.hint, 1), self.unpin, self.unpin_all)
        # the layout must not jump when texts change
        self.hint.setMinimumHeight(2 * self.hint.fontMetrics().height() + 4)
        self.detail.setAlignment(Qt.AlignmentFlag.AlignTop)
        self.detail.setMinimumHeight((DETAIL_LINES + 1) * self.detail.fontMetrics().height())
        parts = self.chips, below, (self.view, 1), self.detail
        layout = fill(QVBoxLayout(self), *parts, margins=(16, 4, 16, 8), spacing=6)
        layout.setAlignment(below, Qt.AlignmentFlag.AlignTop)

    def _connect(self) -> None:
        self.view.pointed.connect(self._show_cell)
        self.view.chosen.connect(self._show_selection)
        self.view.pin_requested.connect(self.pin_requested)
        self.view.unpin_requested.connect(self.unpin_requested)
        self.chips.pressed.connect(self.view.pin)
        self.chips.dropped.connect(self.pin_requested)
        self.unpin.clicked.connect(self.view.unpin)
        self.unpin_all.clicked.connect(self.unpin_all_requested)
