"""Formatted text, written with a cursor, so no HTML is parsed. Links open a menu, not a browser."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from PySide6.QtCore import (
    QByteArray,
    QMimeData,
    QPoint,
    QRect,
    QRectF,
    QSize,
    Qt,
    QUrl,
    Signal,
    Slot,
)
from PySide6.QtGui import (
    QBrush,
    QColor,
    QCursor,
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
    QWheelEvent,
)
from PySide6.QtWidgets import QApplication, QFrame, QMenu, QSizePolicy, QTextBrowser, QWidget

from app.chat.markdown import Rule, TextLine, TextSpan
from app.core.translation import tr
from app.widgets.text import caption_text, set_tip
from app.widgets.theme import px, theme
from engine import printable

if TYPE_CHECKING:
    from app.chat.formulas import InlineFormulas

TEXT_PIXELS: Final = 14
MONOSPACE: Final = ["JetBrains Mono", "DejaVu Sans Mono", "Menlo", "Consolas", "monospace"]
NOTE_SCHEME: Final = "note"
"""URL scheme for references to footnotes in the same message."""


class TextBlock(QTextBrowser):
    """Text view as high as its text; the text can be selected with mouse and keyboard."""

    note_wanted = Signal(str)  # label of a footnote whose reference was clicked

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._formulas: InlineFormulas | None = None
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setProperty("role", "prose")
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setOpenLinks(False)
        self.setTextInteractionFlags(Qt.TextInteractionFlag.TextBrowserInteraction)
        self.setFocusPolicy(Qt.FocusPolicy.ClickFocus)
        self.anchorClicked.connect(self._follow)
        font = QFont(self.font())
        font.setPixelSize(px(TEXT_PIXELS))
        document = self.document()
        document.setUndoRedoEnabled(False)
        document.setDocumentMargin(0)
        document.setDefaultFont(font)
        document.documentLayout().documentSizeChanged.connect(self._fit)

    @property
    def plain_text(self) -> str:
        """The text, with formulas as source."""
        return self._with_sources(self.document().toPlainText(), 0)

    def insert_spans(
        self, cursor: QTextCursor, spans: tuple[TextSpan, ...], base: QTextCharFormat
    ) -> None:
        """Insert spans at a cursor, with their styles applied on top of `base`."""
        for span in spans:
            style = base if span.is_plain else _char_format(span, base)
            if span.formula is None:
                cursor.insertText(printable(span.text).replace("\n", "\u2028"), style)
                continue
            self._inline_formulas().insert(cursor, span.formula, style, _code(style))

    def _inline_formulas(self) -> InlineFormulas:
        if self._formulas is None:
            from app.chat.formulas import InlineFormulas

            self._formulas = InlineFormulas(self)
        return self._formulas

    def _with_sources(self, text: str, start: int) -> str:
        return text if self._formulas is None else self._formulas.with_sources(text, start)

    @Slot(QUrl)
    def _follow(self, url: QUrl) -> None:
        if url.scheme() == NOTE_SCHEME:
            self.note_wanted.emit(url.path())
        else:
            ask_to_open(url, QCursor.pos(), self)

    def fitting_height(self) -> int:
        """Return the height of the whole text, in pixels."""
        return math.ceil(self.document().size().height())

    @Slot()
    def _fit(self) -> None:
        height = self.fitting_height()
        if height != self.height():
            self.setFixedHeight(height)

    def createMimeDataFromSelection(self) -> QMimeData:  # noqa: N802 Qt
        """Return the selection, with formulas as source."""
        cursor = self.textCursor()
        text = cursor.selection().toPlainText()
        written = self._with_sources(text, cursor.selectionStart())
        if written == text:
            return super().createMimeDataFromSelection()
        data = QMimeData()
        data.setText(written)
        return data

    def loadResource(self, kind: int, name: QUrl | str) -> object:
        """Load nothing, as texts must not access the network or the disk.

        The result is empty rather than None, because Qt would read a local file itself for None.
        """
        return QByteArray()

    def sizeHint(self) -> QSize:
        return QSize(super().sizeHint().width(), self.fitting_height())

    def wheelEvent(self, event: QWheelEvent) -> None:
        event.ignore()  # let the chat scroll, not the message


def _char_format(span: TextSpan, base: QTextCharFormat) -> QTextCharFormat:
    style = QTextCharFormat(base)
    if span.bold:
        style.setFontWeight(QFont.Weight.DemiBold)
    style.setFontItalic(span.italic)
    style.setFontStrikeOut(span.strike)
    if span.href:
        style.setAnchor(True)
        style.setAnchorHref(span.href)
        set_tip(style, span.href)
        style.setForeground(QColor(theme().accent))
    if span.note:
        style.setAnchor(True)
        style.setAnchorHref(f"{NOTE_SCHEME}:{span.note}")
        style.setVerticalAlignment(QTextCharFormat.VerticalAlignment.AlignSuperScript)
        style.setForeground(QColor(theme().accent))
    return _code(style) if span.code else style


def _code(style: QTextCharFormat) -> QTextCharFormat:
    made = QTextCharFormat(style)
    made.setFontFamilies(MONOSPACE)
    made.setProperty(QTextFormat.Property.FontPixelSize, px(TEXT_PIXELS - 1))
    made.setBackground(QColor(theme().raised))
    return made


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
    """A text position for `truncate`; its cursor is None at the beginning."""

    cursor: QTextCursor | None
    is_fresh: bool


START = TextMark(None, is_fresh=True)


class ProseView(TextBlock):
    """Lines of text, quotes and rules."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._is_fresh = True  # the last block is unused
        self._base = QTextCharFormat()  # base format for the last line
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
        """Return a footnote's area; None if the footnote is not in this view."""
        block = self.document().firstBlock()
        while block.isValid():
            if block.blockFormat().property(NOTE_LABEL) == label:
                return self.document().documentLayout().blockBoundingRect(block).toRect()
            block = block.next()
        return None

    def mark(self) -> TextMark:
        """Mark the end of the text for `truncate`."""
        cursor = QTextCursor(self.document())
        cursor.movePosition(QTextCursor.MoveOperation.End)
        cursor.setKeepPositionOnInsert(True)
        return TextMark(cursor, self._is_fresh)

    def truncate(self, mark: TextMark) -> None:
        """Remove the text written after `mark`."""
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

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        if self._bars is not None:
            self._bars.resize(self.viewport().size())


class _QuoteBars(QWidget):
    # an overlay that exists only if there is a quote, because a paint method in the text's class
    # would run Python code whenever an answer is repainted

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


SCHEMES = ("http", "https")
MAX_SHOWN = 120  # characters of a URL in the menu


def open_link(url: QUrl) -> None:
    """Open an http or https URL in the browser."""
    if url.scheme() in SCHEMES:
        QDesktopServices.openUrl(url)


def ask_to_open(url: QUrl, place: QPoint, parent: QWidget) -> QMenu | None:
    """Show a menu at `place` that displays the real URL and can open or copy it.

    Returns:
        the menu; None if the URL has another scheme.
    """
    if url.scheme() not in SCHEMES:
        return None
    menu = QMenu(parent)
    menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    menu.setAccessibleName(tr("Web address"))
    address = url.toString(QUrl.ComponentFormattingOption.FullyEncoded)
    menu.addAction(caption_text(address, MAX_SHOWN)).setEnabled(False)
    menu.addSeparator()
    menu.addAction(tr("Open in browser")).triggered.connect(lambda: open_link(url))
    copy = menu.addAction(tr("Copy address"))
    copy.triggered.connect(lambda: QApplication.clipboard().setText(address))
    menu.popup(place)
    return menu
