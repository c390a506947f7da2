"""The placement map's table model, cell delegate and headers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from PySide6.QtCore import (
    QAbstractTableModel,
    QMimeData,
    QModelIndex,
    QObject,
    QPersistentModelIndex,
    QRect,
    QRectF,
    QSize,
    Qt,
)
from PySide6.QtGui import QColor, QPainter, QPainterPath, QPen
from PySide6.QtWidgets import (
    QHeaderView,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QWidget,
)

from app.devices.map.grid import Cell, Grid, Part, cell_lines, ranks_text, spoken_text
from app.widgets.layout import scaled
from app.widgets.text import plain_tip
from app.widgets.theme import mix, theme
from engine import one_line

PARTS_MIME: Final = "application/x-tandem-parts"
SHARED_FADE: Final = 0.6  # fade for tensors that every rank holds and that cannot be moved

Index = QModelIndex | QPersistentModelIndex


@dataclass(frozen=True, slots=True)
class Look:
    """Each rank's device colour index and label."""

    colours: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()


class PlacementTable(QAbstractTableModel):
    """Table model for the map: rows are blocks, columns are kinds of tensors."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.grid, self.look = Grid(), Look()

    def set_grid(self, grid: Grid, look: Look) -> bool:
        """Show another map; return whether rows, columns or spans changed."""
        is_other = (grid.rows, grid.columns, _spans(grid)) != (
            self.grid.rows, self.grid.columns, _spans(self.grid),
        )  # fmt: skip
        if is_other:
            self.beginResetModel()
        self.grid, self.look = grid, look
        if is_other:
            self.endResetModel()
        elif grid.rows:
            last = self.index(len(grid.rows) - 1, len(grid.columns) - 1)
            self.dataChanged.emit(self.index(0, 0), last)
        return is_other

    def cell(self, index: Index) -> Cell | None:
        """Return the cell at an index, if any."""
        return self.grid.cells.get((index.row(), index.column())) if index.isValid() else None

    # Qt

    def rowCount(self, parent: Index | None = None) -> int:
        return 0 if parent is not None and parent.isValid() else len(self.grid.rows)

    def columnCount(self, parent: Index | None = None) -> int:  # noqa: N802 Qt
        return 0 if parent is not None and parent.isValid() else len(self.grid.columns)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        cell = self.cell(index)
        if cell is None:
            return None
        if role == Qt.ItemDataRole.AccessibleTextRole:
            return one_line(spoken_text(cell, self.grid.columns[cell.column], self.look.labels))
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip("\n".join([*cell_lines(cell), ranks_text(cell, self.look.labels)]))
        return None

    def headerData(  # noqa: N802 Qt
        self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole
    ) -> Any:
        titles = self.grid.columns if orientation == Qt.Orientation.Horizontal else self.grid.rows
        if role == Qt.ItemDataRole.DisplayRole and section < len(titles):
            return one_line(titles[section])
        return None

    def flags(self, index: Index) -> Qt.ItemFlag:
        cell = self.cell(index)
        if cell is None:
            return Qt.ItemFlag.NoItemFlags
        usual = Qt.ItemFlag.ItemIsEnabled | Qt.ItemFlag.ItemIsSelectable
        return usual | Qt.ItemFlag.ItemIsDragEnabled if cell.parts else usual

    def mimeTypes(self) -> list[str]:
        return [PARTS_MIME]

    def mimeData(self, indexes: Sequence[QModelIndex]) -> QMimeData:
        cells = (self.cell(index) for index in indexes)
        parts = {part for cell in cells if cell is not None for part in cell.parts}
        data = QMimeData()
        data.setData(PARTS_MIME, json.dumps(sorted(parts, key=str)).encode())
        return data


def dragged_parts(data: QMimeData) -> frozenset[Part]:
    """Return the parts dragged from the map; none if the drag came from elsewhere."""
    if not data.hasFormat(PARTS_MIME):
        return frozenset()
    parts = json.loads(bytes(data.data(PARTS_MIME).data()))
    return frozenset((block, part) for block, part in parts)


def _spans(grid: Grid) -> list[tuple[int, int, int]]:
    return [(cell.row, cell.column, cell.span) for cell in grid.cells.values() if cell.span > 1]


class CellPainter(QStyledItemDelegate):
    """Draws a cell as one stripe per rank, in rank order, with widths proportional to shares."""

    def __init__(self, table: PlacementTable, parent: QObject) -> None:
        super().__init__(parent)
        self._table = table

    def sizeHint(self, option: QStyleOptionViewItem, index: Index) -> QSize:
        return QSize(8, 6)

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        cell = self._table.cell(index)
        if cell is None:
            return
        colours = theme()
        area: QRect = option.rect
        state: QStyle.StateFlag = option.state
        gap = 1 if min(area.width(), area.height()) > 4 else 0
        area = area.adjusted(0, 0, -gap, -gap)
        self._paint_ranks(painter, area, cell)
        if cell.is_pinned:
            _paint_pin(painter, area)
        is_selected = bool(state & QStyle.StateFlag.State_Selected)
        if is_selected:
            tint = QColor(colours.text)
            tint.setAlphaF(0.35)
            painter.fillRect(area, tint)
        if state & QStyle.StateFlag.State_HasFocus or is_selected:
            has_focus = bool(state & QStyle.StateFlag.State_HasFocus)
            painter.setPen(QPen(QColor(colours.text), 2 if has_focus else 1))
            painter.setBrush(Qt.BrushStyle.NoBrush)
            inset = 1 if has_focus else 0
            painter.drawRect(area.adjusted(inset, inset, -1, -1))

    def _paint_ranks(self, painter: QPainter, area: QRect, cell: Cell) -> None:
        colours, look = theme(), self._table.look
        total = sum(cell.ranks)
        if not total:
            painter.fillRect(area, QColor(colours.raised))
            return
        done = 0
        for rank, n_bytes in enumerate(cell.ranks):
            if not n_bytes:
                continue
            left = area.left() + round(area.width() * done / total)
            done += n_bytes
            right = area.left() + round(area.width() * done / total)
            colour = colours.device_colour(look.colours[rank])
            if cell.is_shared:
                colour = mix(colour, colours.surface, SHARED_FADE)
            painter.fillRect(left, area.top(), right - left, area.height(), QColor(colour))


def _paint_pin(painter: QPainter, area: QRect) -> None:
    size = min(7.0, area.width() / 2, area.height() - 1.0)
    corner = QPainterPath()
    corner.moveTo(area.left(), area.top())
    corner.lineTo(area.left() + size, area.top())
    corner.lineTo(area.left(), area.top() + size)
    corner.closeSubpath()
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    painter.fillPath(corner, QColor(theme().text))
    painter.setRenderHint(QPainter.RenderHint.Antialiasing, False)


class NarrowHeader(QHeaderView):
    """Header with vertical column titles; if rows are low, only some rows have titles."""

    FONT_PIXELS = 10
    MARGIN = 6

    def __init__(self, orientation: Qt.Orientation, parent: QWidget) -> None:
        super().__init__(orientation, parent)
        self.setMinimumSectionSize(4)
        self.setSectionsClickable(True)
        self.setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
        scaled(self, self._set_text_size, self.FONT_PIXELS)

    def _set_text_size(self, n_pixels: int) -> None:
        font = self.font()
        font.setPixelSize(n_pixels)
        self.setFont(font)

    def _title(self, section: int) -> str:
        model = self.model()
        return str(model.headerData(section, self.orientation()) or "") if model else ""

    def sizeHint(self) -> QSize:
        metrics = self.fontMetrics()
        count = self.count()
        widest = max((metrics.horizontalAdvance(self._title(i)) for i in range(count)), default=0)
        room = widest + 2 * self.MARGIN
        is_across = self.orientation() == Qt.Orientation.Horizontal
        return QSize(0, room) if is_across else QSize(room, 0)

    def paintSection(self, painter: QPainter, rect: QRect, section: int) -> None:  # noqa: N802 Qt
        painter.save()
        painter.setFont(self.font())
        painter.setPen(QColor(theme().muted))
        title = self._title(section)
        if self.orientation() == Qt.Orientation.Horizontal:
            painter.translate(rect.left(), rect.bottom())
            painter.rotate(-90)
            area = QRectF(self.MARGIN / 2, 0, rect.height() - self.MARGIN / 2, rect.width())
            side = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
            painter.drawText(area, side, title)
        elif self._is_titled(section, rect.height()):
            room = self.fontMetrics().height()
            middle = rect.center().y() - room / 2 + 1
            area = QRectF(rect.left(), middle, rect.width() - self.MARGIN, room)
            side = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
            painter.drawText(area, side, title)
        painter.restore()

    def _is_titled(self, section: int, height: int) -> bool:
        """Return whether a row has a title: both ends do, and every 1st, 2nd, 5th or 10th block."""
        step = next((n for n in (1, 2, 5) if n * height >= self.fontMetrics().height()), 10)
        if section in (0, self.count() - 1):
            return True
        is_near_end = (
            section * height < self.fontMetrics().height()
            or (self.count() - 1 - section) * height < self.fontMetrics().height()
        )
        return not is_near_end and (section - 1) % step == 0
