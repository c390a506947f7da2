"""The formatted text of a message, written with a cursor: no HTML is parsed anywhere.

The text can grow at its end: everything behind a mark is removed and written again; the text before
it is never touched or laid out a second time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from PySide6.QtCore import QByteArray, QRectF, QSize, Qt, QUrl, Slot
from PySide6.QtGui import (
    QBrush,
    QColor,
    QDesktopServices,
    QFont,
    QFontMetricsF,
    QPainter,
    QPaintEvent,
    QResizeEvent,
    QTextBlockFormat,
    QTextCharFormat,
    QTextCursor,
    QTextFormat,
    QTextLength,
    QTextTableFormat,
    QWheelEvent,
)
from PySide6.QtWidgets import QFrame, QSizePolicy, QTextBrowser, QWidget

from app.chat.markdown import Rule, Table, TextLine, TextSpan
from app.theme import theme
from app.widgets.text import set_tip
from engine import printable

TEXT_PIXELS = 14
HEADING_PIXELS = (22, 19, 17, 15, 14, 14)
LINE_HEIGHT_PERCENT = 145.0
GAP, TIGHT_GAP = 10, 3
INDENT, QUOTE_INDENT, BAR_WIDTH = 22, 16, 2
QUOTE_DEPTH = QTextFormat.Property.UserProperty + 1
MONOSPACE = ["JetBrains Mono", "DejaVu Sans Mono", "Menlo", "Consolas", "monospace"]

Written = TextLine | Table | Rule


@dataclass(frozen=True, slots=True)
class Mark:
    """A position in the text to return to; everything behind it is not final."""

    position: int
    is_fresh: bool


START = Mark(0, is_fresh=True)


class ProseView(QTextBrowser):
    """Text view as high as its text, selectable by mouse and keyboard."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._is_fresh = True  # the last block exists but is unused
        self._base = QTextCharFormat()  # format of the last line's plain words
        self._bars: _QuoteBars | None = None
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setStyleSheet("background: transparent; border: none; padding: 0;")
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setOpenLinks(False)
        self.setTextInteractionFlags(Qt.TextInteractionFlag.TextBrowserInteraction)
        self.setFocusPolicy(Qt.FocusPolicy.ClickFocus)
        self.anchorClicked.connect(open_link)
        font = QFont(self.font())
        font.setPixelSize(TEXT_PIXELS)
        document = self.document()
        document.setUndoRedoEnabled(False)
        document.setDocumentMargin(0)
        document.setDefaultFont(font)
        document.documentLayout().documentSizeChanged.connect(self._fit)

    def write(self, pieces: list[Written]) -> None:
        """Append pieces."""
        cursor = QTextCursor(self.document())
        cursor.beginEditBlock()
        for piece in pieces:
            cursor.movePosition(QTextCursor.MoveOperation.End)
            if isinstance(piece, TextLine):
                self._write_line(cursor, piece)
            elif isinstance(piece, Table):
                self._write_table(cursor, piece)
            else:
                self._write_rule(cursor)
        cursor.endEditBlock()

    def extend(self, spans: tuple[TextSpan, ...]) -> None:
        """Append spans to the last line."""
        cursor = QTextCursor(self.document())
        cursor.movePosition(QTextCursor.MoveOperation.End)
        cursor.beginEditBlock()
        insert_spans(cursor, spans, self._base)
        cursor.endEditBlock()

    @property
    def is_empty(self) -> bool:
        return self._is_fresh and self.document().characterCount() == 1

    def mark(self) -> Mark:
        return Mark(self.document().characterCount() - 1, self._is_fresh)

    def truncate(self, mark: Mark) -> None:
        """Remove the text written since `mark`."""
        cursor = QTextCursor(self.document())
        cursor.setPosition(mark.position)
        cursor.movePosition(QTextCursor.MoveOperation.End, QTextCursor.MoveMode.KeepAnchor)
        cursor.removeSelectedText()
        self._is_fresh = mark.is_fresh

    def _write_line(self, cursor: QTextCursor, line: TextLine) -> None:
        block = self._block_format(TIGHT_GAP if line.tight else GAP)
        block.setLeftMargin(line.indent * INDENT + line.quote * QUOTE_INDENT)
        if line.quote:
            block.setProperty(QUOTE_DEPTH, line.quote)
            self._bars = self._bars or _QuoteBars(self)
        self._base = base = self._base_format(line)
        marker = f"{line.marker} " if line.marker else ""
        if marker:
            block.setTextIndent(
                -QFontMetricsF(self.document().defaultFont()).horizontalAdvance(marker)
            )
        self._start_block(cursor, block)
        cursor.insertText(marker, base)
        insert_spans(cursor, line.spans, base)

    def _base_format(self, line: TextLine) -> QTextCharFormat:
        """Return the format of a line's plain words."""
        base = QTextCharFormat()
        if line.heading:
            font = QFont(self.document().defaultFont())
            font.setPixelSize(HEADING_PIXELS[line.heading - 1])
            font.setWeight(QFont.Weight.DemiBold)
            base.setFont(font)
        if line.quote:
            base.setForeground(QColor(theme().muted))
        return base

    def _write_table(self, cursor: QTextCursor, table: Table) -> None:
        if not self._is_fresh:
            self._start_block(cursor, self._block_format(0))
        shape = QTextTableFormat()
        shape.setBorderCollapse(True)
        shape.setBorder(1)
        shape.setBorderStyle(QTextTableFormat.BorderStyle.BorderStyle_Solid)
        shape.setBorderBrush(QBrush(QColor(theme().line)))
        shape.setCellPadding(6)
        shape.setTopMargin(GAP)
        shape.setBottomMargin(GAP)
        grid = cursor.insertTable(len(table.rows), max(len(row) for row in table.rows), shape)
        for y, row in enumerate(table.rows):
            base = QTextCharFormat()
            if y == 0:
                base.setFontWeight(QFont.Weight.DemiBold)
            for x, spans in enumerate(row):
                cell = grid.cellAt(y, x).firstCursorPosition()
                cell.setBlockFormat(_aligned(table.aligns[x]))
                insert_spans(cell, spans, base)
        cursor.movePosition(QTextCursor.MoveOperation.End)
        cursor.setBlockFormat(_flat())
        self._is_fresh = True

    def _write_rule(self, cursor: QTextCursor) -> None:
        block = self._block_format(GAP)
        width = QTextLength(QTextLength.Type.PercentageLength, 100)
        block.setProperty(QTextFormat.Property.BlockTrailingHorizontalRulerWidth, width)
        block.setProperty(QTextFormat.Property.BackgroundBrush, QBrush(QColor(theme().line)))
        self._start_block(cursor, block)

    def _block_format(self, gap: int) -> QTextBlockFormat:
        block = QTextBlockFormat()
        proportional = QTextBlockFormat.LineHeightTypes.ProportionalHeight
        block.setLineHeight(LINE_HEIGHT_PERCENT, proportional.value)
        is_first = self._is_fresh and self.document().blockCount() == 1
        block.setTopMargin(0 if is_first else gap)
        return block

    def _start_block(self, cursor: QTextCursor, block: QTextBlockFormat) -> None:
        if self._is_fresh:
            cursor.setBlockFormat(block)
        else:
            cursor.insertBlock(block, QTextCharFormat())
        self._is_fresh = False

    @Slot()
    def _fit(self) -> None:
        height = math.ceil(self.document().size().height())
        if height != self.height():
            self.setFixedHeight(height)

    # Qt

    def loadResource(self, kind: int, name: QUrl | str) -> object:
        """Return nothing, as no text may fetch anything, neither from the net nor from the disk.

        It is empty rather than None, after which Qt would read a local file itself.
        """
        return QByteArray()

    def sizeHint(self) -> QSize:
        return QSize(super().sizeHint().width(), math.ceil(self.document().size().height()))

    def wheelEvent(self, event: QWheelEvent) -> None:
        event.ignore()  # the chat scrolls, not the message

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        if self._bars is not None:
            self._bars.resize(self.viewport().size())


class _QuoteBars(QWidget):
    """Bars beside quoted text.

    The widget lies over the text and exists only if there is a quote: a paint method in the text's
    own class would make Python take part in every repaint of an answer.
    """

    def __init__(self, view: ProseView) -> None:
        super().__init__(view.viewport())
        self._document = view.document()
        self.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        self.resize(view.viewport().size())
        self._document.documentLayout().documentSizeChanged.connect(self.update)
        self.show()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QColor(theme().line))
        layout, block = self._document.documentLayout(), self._document.firstBlock()
        while block.isValid():
            if depth := int(block.blockFormat().property(QUOTE_DEPTH) or 0):
                area = layout.blockBoundingRect(block)
                for level in range(depth):
                    x = level * QUOTE_INDENT
                    painter.drawRect(QRectF(x, area.top(), BAR_WIDTH, area.height()))
            block = block.next()
        painter.end()


@Slot(QUrl)
def open_link(url: QUrl) -> None:
    """Open a clicked address in the browser, if it is http or https."""
    if url.scheme() in ("http", "https"):
        QDesktopServices.openUrl(url)


def insert_spans(cursor: QTextCursor, spans: tuple[TextSpan, ...], base: QTextCharFormat) -> None:
    for span in spans:
        cursor.insertText(printable(span.text).replace("\n", "\u2028"), _char_format(span, base))


def _char_format(span: TextSpan, base: QTextCharFormat) -> QTextCharFormat:
    style = QTextCharFormat(base)
    if span.bold:
        style.setFontWeight(QFont.Weight.DemiBold)
    style.setFontItalic(span.italic)
    style.setFontStrikeOut(span.strike)
    if span.code:
        style.setFontFamilies(MONOSPACE)
        style.setProperty(QTextFormat.Property.FontPixelSize, TEXT_PIXELS - 1)
        style.setBackground(QColor(theme().raised))
    if span.href:
        style.setAnchor(True)
        style.setAnchorHref(span.href)
        set_tip(style, span.href)
        style.setForeground(QColor(theme().accent))
    return style


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
