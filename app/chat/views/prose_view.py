"""The lines of a message: paragraphs, headings, lists, quotes and footnotes.

The text can grow at its end: everything behind a mark is removed and written again; the text before
it is never touched or laid out a second time.
"""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import QRect, QRectF, Qt
from PySide6.QtGui import (
    QBrush,
    QColor,
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
)
from PySide6.QtWidgets import QWidget

from app.chat.markdown import Rule, TextLine, TextSpan
from app.chat.views.text_block import TextBlock
from app.widgets.theme import px, theme

NOTE_PIXELS = 12
HEADING_PIXELS = (22, 19, 17, 15, 14, 14)
LINE_HEIGHT_PERCENT = 145.0
GAP, TIGHT_GAP = 10, 3
INDENT, QUOTE_INDENT, BAR_WIDTH = 26, 16, 2
QUOTE_DEPTH = QTextFormat.Property.UserProperty + 1
NOTE_LABEL = QTextFormat.Property.UserProperty + 4

Written = TextLine | Rule


@dataclass(frozen=True, slots=True)
class TextMark:
    """A position in the text to return to; everything behind it is not final.

    Attributes:
        cursor: the position, which moves with the text before it; None for the beginning.
    """

    cursor: QTextCursor | None
    is_fresh: bool


START = TextMark(None, is_fresh=True)


class ProseView(TextBlock):
    """Lines of text, quotes and rules."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._is_fresh = True  # the last block exists but is unused
        self._base = QTextCharFormat()  # format of the last line's plain words
        self._bars: _QuoteBars | None = None

    def write(self, pieces: list[Written]) -> None:
        """Append pieces."""
        cursor = QTextCursor(self.document())
        cursor.beginEditBlock()
        for piece in pieces:
            cursor.movePosition(QTextCursor.MoveOperation.End)
            if isinstance(piece, TextLine):
                self._write_line(cursor, piece)
            else:
                self._write_rule(cursor)
        cursor.endEditBlock()

    def extend(self, spans: tuple[TextSpan, ...]) -> None:
        """Append spans to the last line."""
        cursor = QTextCursor(self.document())
        cursor.movePosition(QTextCursor.MoveOperation.End)
        cursor.beginEditBlock()
        self.insert_spans(cursor, spans, self._base)
        cursor.endEditBlock()

    @property
    def is_empty(self) -> bool:
        return self._is_fresh and self.document().characterCount() == 1

    def note_place(self, label: str) -> QRect | None:
        """Return where a footnote is; None if it is not in this view."""
        block = self.document().firstBlock()
        while block.isValid():
            if block.blockFormat().property(NOTE_LABEL) == label:
                return self.document().documentLayout().blockBoundingRect(block).toRect()
            block = block.next()
        return None

    def mark(self) -> TextMark:
        """Return the end of the text, to which `truncate` returns."""
        cursor = QTextCursor(self.document())
        cursor.movePosition(QTextCursor.MoveOperation.End)
        cursor.setKeepPositionOnInsert(True)
        return TextMark(cursor, self._is_fresh)

    def truncate(self, mark: TextMark) -> None:
        """Remove the text written since `mark`."""
        cursor = QTextCursor(self.document())
        cursor.setPosition(mark.cursor.position() if mark.cursor else 0)
        cursor.movePosition(QTextCursor.MoveOperation.End, QTextCursor.MoveMode.KeepAnchor)
        cursor.removeSelectedText()
        self._is_fresh = mark.is_fresh

    def _write_line(self, cursor: QTextCursor, line: TextLine) -> None:
        block = self._block_format(TIGHT_GAP if line.tight else GAP)
        indent = line.indent + bool(line.note)
        marker = f"{line.marker} " if line.marker else ""
        hung = QFontMetricsF(self.document().defaultFont()).horizontalAdvance(marker)
        block.setLeftMargin(max(indent * INDENT, hung) + line.quote * QUOTE_INDENT)
        block.setTextIndent(-hung)
        if line.quote:
            block.setProperty(QUOTE_DEPTH, line.quote)
            self._bars = self._bars or _QuoteBars(self)
        if line.note and line.marker:
            block.setProperty(NOTE_LABEL, line.note)
        self._base = base = self._base_format(line)
        self._start_block(cursor, block)
        cursor.insertText(marker, base)
        self.insert_spans(cursor, line.spans, base)

    def _base_format(self, line: TextLine) -> QTextCharFormat:
        """Return the format of a line's plain words."""
        base = QTextCharFormat()
        if line.heading:
            font = QFont(self.document().defaultFont())
            font.setPixelSize(px(HEADING_PIXELS[line.heading - 1]))
            font.setWeight(QFont.Weight.DemiBold)
            base.setFont(font)
        if line.note:
            base.setProperty(QTextFormat.Property.FontPixelSize, px(NOTE_PIXELS))
        if line.quote or line.note:
            base.setForeground(QColor(theme().muted))
        return base

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

    # Qt

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
