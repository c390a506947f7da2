"""The view of a table, which may grow and scrolls if it is wide."""

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
    QTextTable,
    QTextTableFormat,
    QWheelEvent,
)
from PySide6.QtWidgets import QWidget

from app.chat.markdown import Piece, Table, TextSpan
from app.chat.views.text_block import TextBlock
from app.scale import px
from app.theme import theme
from app.translation import tr

PADDING: Final = 6
COLUMN_PIXELS: Final = 190
"""Width that each column gets, on average, before the table scrolls rather than wraps."""


class TableView(TextBlock):
    """View of one `Table`; a longer version of it changes only the new rows."""

    def __init__(self, table: Table, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAccessibleName(tr("Table"))
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAsNeeded)
        self.setLineWrapMode(TextBlock.LineWrapMode.FixedPixelWidth)
        self._shown = Table((), table.aligns)
        self._metrics = QFontMetricsF(self.document().defaultFont())
        self._widths = [0.0] * len(table.aligns)  # of each column, if nothing wraps
        self._grid = self._make_grid(len(table.rows))
        self._write(table)
        self.moveCursor(QTextCursor.MoveOperation.Start)  # Qt scrolls to it
        self.horizontalScrollBar().rangeChanged.connect(self._fit_bar)

    def take(self, piece: Piece) -> bool:
        """Show another version of the table; return False if that needs another view."""
        if not isinstance(piece, Table) or piece.aligns != self._shown.aligns:
            return False
        self._write(piece)
        return True

    def _make_grid(self, n_rows: int) -> QTextTable:
        shape = QTextTableFormat()
        shape.setBorderCollapse(True)
        shape.setBorder(1)
        shape.setBorderStyle(QTextTableFormat.BorderStyle.BorderStyle_Solid)
        shape.setBorderBrush(QBrush(QColor(theme().line)))
        shape.setCellPadding(PADDING)
        cursor = QTextCursor(self.document())
        grid = cursor.insertTable(n_rows, len(self._widths), shape)
        cursor.movePosition(QTextCursor.MoveOperation.End)
        cursor.setBlockFormat(_flat())
        return grid

    def _write(self, table: Table) -> None:
        """Write the rows that differ from those on screen."""
        cursor = QTextCursor(self.document())
        cursor.beginEditBlock()
        n_rows = len(table.rows)
        if n_rows < self._grid.rows():
            self._grid.removeRows(n_rows, self._grid.rows() - n_rows)
        elif n_rows > self._grid.rows():
            self._grid.appendRows(n_rows - self._grid.rows())
        for y, row in enumerate(table.rows):
            if y >= len(self._shown.rows) or self._shown.rows[y] != row:
                self._write_row(y, row, table.aligns)
        cursor.endEditBlock()
        self._shown = table
        self._spread()

    def _write_row(
        self, y: int, row: tuple[tuple[TextSpan, ...], ...], aligns: tuple[str, ...]
    ) -> None:
        base = QTextCharFormat()
        if y == 0:
            base.setFontWeight(QFont.Weight.DemiBold)
        for x, spans in enumerate(row):
            cell = self._grid.cellAt(y, x)
            cursor = cell.firstCursorPosition()
            end = cell.lastCursorPosition().position()
            cursor.setPosition(end, QTextCursor.MoveMode.KeepAnchor)
            cursor.removeSelectedText()
            cursor.setBlockFormat(_aligned(aligns[x]))
            self.insert_spans(cursor, spans, base)
            text = "".join(span.text for span in spans)
            width = self._metrics.horizontalAdvance(text) + 2 * PADDING + 2
            self._widths[x] = max(self._widths[x], width)

    def _spread(self) -> None:
        """Set the width of the table: that of the view, unless its columns were too narrow."""
        wanted = min(sum(self._widths), px(COLUMN_PIXELS) * len(self._widths))
        width = max(self.viewport().width(), math.ceil(wanted))
        if width != self.lineWrapColumnOrWidth():
            self.setLineWrapColumnOrWidth(width)

    @Slot()
    def _fit_bar(self) -> None:
        self._fit()

    def fitting_height(self) -> int:
        """Return the height of all rows and of the scroll bar, if there is one."""
        bar = self.horizontalScrollBar()
        return super().fitting_height() + (bar.sizeHint().height() if bar.maximum() > 0 else 0)

    # Qt

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


def _flat() -> QTextBlockFormat:
    """Return a format without height, for the empty block that Qt puts behind a table."""
    block = QTextBlockFormat()
    block.setLineHeight(1, QTextBlockFormat.LineHeightTypes.FixedHeight.value)
    return block
