"""The view of a table, which may grow; a wide table has a scroll bar.

Qt lays out a whole table again whenever a row changes, so a long table is split into several Qt
tables with the same columns, one directly below the other.
"""

from __future__ import annotations

import math
from typing import Final

from PySide6.QtCore import Qt, Slot
from PySide6.QtGui import (
    QBrush,
    QColor,
    QFont,
    QFontMetricsF,
    QResizeEvent,
    QTextBlockFormat,
    QTextCharFormat,
    QTextCursor,
    QTextLength,
    QTextTable,
    QTextTableFormat,
    QWheelEvent,
)
from PySide6.QtWidgets import QWidget

from app.chat.markdown import Piece, Table, TextSpan
from app.chat.views.prose_view import TextBlock
from app.core.translation import tr
from app.widgets.theme import px, theme

PADDING: Final = 6
COLUMN_PIXELS: Final = 190
"""Average column width up to which a table scrolls instead of wrapping."""

GRID_ROWS: Final = 40
"""Rows per Qt table."""

SEAM: Final = -4.0
"""Top margin in pixels of each further Qt table; closes the gap that Qt leaves."""


class TableView(TextBlock):
    """View of a `Table`; given a longer version, it updates only the new rows."""

    def __init__(self, table: Table, parent: QWidget | None = None) -> None:
        self._grids: list[QTextTable] = []
        self._columns: list[float] = []  # column widths of the first grid, shared by the others
        super().__init__(parent)
        self.setAccessibleName(tr("Table"))
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAsNeeded)
        self.horizontalScrollBar().rangeChanged.connect(self._fit_bar)
        self.setLineWrapMode(TextBlock.LineWrapMode.FixedPixelWidth)
        self._shown = Table((), table.aligns)
        self._metrics = QFontMetricsF(self.document().defaultFont())
        self._widths = [0.0] * len(table.aligns)  # column widths without wrapping
        self._grids.append(self._make_grid(min(GRID_ROWS, len(table.rows))))
        self._write(table)
        self.moveCursor(QTextCursor.MoveOperation.Start)  # Qt scrolls to the cursor

    def take(self, piece: Piece) -> bool:
        """Show another version of the table; return False if it needs another view."""
        if not isinstance(piece, Table) or piece.aligns != self._shown.aligns:
            return False
        self._write(piece)
        return True

    def _make_grid(self, n_rows: int) -> QTextTable:
        shape = QTextTableFormat()
        if self._columns:
            shape.setColumnWidthConstraints(_lengths(self._columns))
            shape.setTopMargin(SEAM)
        shape.setBorderCollapse(True)
        shape.setBorder(1)
        shape.setBorderStyle(QTextTableFormat.BorderStyle.BorderStyle_Solid)
        shape.setBorderBrush(QBrush(QColor(theme().line)))
        shape.setCellPadding(PADDING)
        cursor = QTextCursor(self.document())
        cursor.movePosition(QTextCursor.MoveOperation.End)
        grid = cursor.insertTable(n_rows, len(self._widths), shape)
        cursor.movePosition(QTextCursor.MoveOperation.End)
        cursor.setBlockFormat(_flat())
        return grid

    def _write(self, table: Table) -> None:
        for row in table.rows[len(self._shown.rows) - 1 :] if self._shown.rows else table.rows:
            self._note_widths(row)
        self._spread()
        cursor = QTextCursor(self.document())
        for first in range(0, max(len(table.rows), len(self._shown.rows)), GRID_ROWS):
            rows = table.rows[first : first + GRID_ROWS]
            shown = self._shown.rows[first : first + GRID_ROWS]
            if rows == shown:
                continue
            cursor.beginEditBlock()
            self._fit_grid(first // GRID_ROWS, len(rows))
            for y, row in enumerate(rows):
                if y >= len(shown) or shown[y] != row:
                    self._write_row(first + y, row, table.aligns)
            cursor.endEditBlock()
        self._shown = table

    def _fit_grid(self, number: int, n_rows: int) -> None:
        if number == len(self._grids):
            self._columns = self._first_columns()
            self._grids.append(self._make_grid(n_rows))
        grid = self._grids[number]
        if n_rows > grid.rows():
            grid.appendRows(n_rows - grid.rows())
        elif n_rows < grid.rows():
            grid.removeRows(n_rows, grid.rows() - n_rows)
        if n_rows == 0:
            del self._grids[number:]

    def _first_columns(self) -> list[float]:
        layout, grid = self.document().documentLayout(), self._grids[0]
        cells = (grid.cellAt(0, x).firstCursorPosition().block() for x in range(grid.columns()))
        return [layout.blockBoundingRect(cell).width() + 2 * PADDING + 1 for cell in cells]

    def _align(self) -> None:
        if len(self._grids) > 1 and (columns := self._first_columns()) != self._columns:
            self._columns = columns
            for grid in self._grids[1:]:
                shape = grid.format()
                shape.setColumnWidthConstraints(_lengths(columns))
                grid.setFormat(shape)

    def _write_row(
        self, y: int, row: tuple[tuple[TextSpan, ...], ...], aligns: tuple[str, ...]
    ) -> None:
        base = QTextCharFormat()
        if y == 0:
            base.setFontWeight(QFont.Weight.DemiBold)
        for x, spans in enumerate(row):
            cell = self._grids[y // GRID_ROWS].cellAt(y % GRID_ROWS, x)
            cursor = cell.firstCursorPosition()
            if y < len(self._shown.rows):
                end = cell.lastCursorPosition().position()
                cursor.setPosition(end, QTextCursor.MoveMode.KeepAnchor)
                cursor.removeSelectedText()
            if aligns[x] != "left":
                cursor.setBlockFormat(_aligned(aligns[x]))
            self.insert_spans(cursor, spans, base)

    def _note_widths(self, row: tuple[tuple[TextSpan, ...], ...]) -> None:
        for x, spans in enumerate(row):
            text = "".join(span.text for span in spans)
            width = self._metrics.horizontalAdvance(text) + 2 * PADDING + 2
            self._widths[x] = max(self._widths[x], width)

    def _spread(self) -> None:
        wanted = min(sum(self._widths), px(COLUMN_PIXELS) * len(self._widths))
        parent = self.parentWidget()
        is_here = parent is None or self.isVisible()  # not being prepared off screen
        room = self.viewport().width() if is_here or parent is None else parent.width()
        width = max(room, math.ceil(wanted))
        if width != self.lineWrapColumnOrWidth():
            self.setLineWrapColumnOrWidth(width)

    @Slot()
    def _fit(self) -> None:
        self._align()
        super()._fit()

    @Slot()
    def _fit_bar(self) -> None:
        self._fit()

    def fitting_height(self) -> int:
        """Return the height of all rows, plus the scroll bar if there is one."""
        bar = self.horizontalScrollBar()
        return super().fitting_height() + (bar.sizeHint().height() if bar.maximum() > 0 else 0)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._spread()

    def wheelEvent(self, event: QWheelEvent) -> None:
        bar = self.horizontalScrollBar()
        if event.angleDelta().x() and bar.maximum() > 0:
            bar.setValue(bar.value() - event.angleDelta().x())
        else:
            event.ignore()


def _aligned(align: str) -> QTextBlockFormat:
    sides = {"right": Qt.AlignmentFlag.AlignRight, "center": Qt.AlignmentFlag.AlignHCenter}
    block = QTextBlockFormat()
    block.setAlignment(sides.get(align, Qt.AlignmentFlag.AlignLeft))
    return block


def _lengths(widths: list[float]) -> list[QTextLength]:
    return [QTextLength(QTextLength.Type.FixedLength, width) for width in widths]


def _flat() -> QTextBlockFormat:
    # hides the empty block that Qt appends to a table
    block = QTextBlockFormat()
    block.setLineHeight(1, QTextBlockFormat.LineHeightTypes.FixedHeight.value)
    return block
