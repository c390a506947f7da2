"""A chat as a printable document, written with a cursor, so that nothing is parsed as HTML."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QSizeF, Qt, QUrl
from PySide6.QtGui import (
    QBrush,
    QColor,
    QFont,
    QFontMetricsF,
    QImage,
    QTextBlockFormat,
    QTextCharFormat,
    QTextCursor,
    QTextDocument,
    QTextFormat,
    QTextFrameFormat,
    QTextImageFormat,
    QTextLength,
    QTextTableFormat,
)

from app.chat.conversation import Conversation
from app.chat.export import said, spoken
from app.chat.formulas import MAX_LATEX, OBJECT, SCALE, FormulaImage, FormulaLook, FormulaRenderer
from app.chat.images.album import PathOf
from app.chat.images.child import ImageChild
from app.chat.markdown import (
    CodeBlock,
    DisplayFormula,
    Formula,
    Piece,
    Rule,
    Table,
    TextLine,
    TextSpan,
    parse,
)
from app.chat.message import ChatImage
from app.chat.views.prose_view import MONOSPACE
from app.core.translation import tr
from app.widgets.theme import FONT_FAMILY
from engine import EngineError, one_line, printable

RATIO: Final = 600 / 96
"""Image pixels per document unit, for 600 pixels per inch."""

PIXELS: Final = 96 / 72
"""Document units per point."""

MEASURED: Final = 1000
"""Font size in pixels at which font metrics are measured precisely."""


class PaperFormulas:
    """Renderer and cache for one document's formulas; used on one thread."""

    def __init__(self, document: QTextDocument) -> None:
        self._document = document
        self._renderer = FormulaRenderer()
        self._drawn: dict[FormulaLook, FormulaImage | None] = {}
        self._n_made = 0

    def insert(self, cursor: QTextCursor, formula: Formula, style: QTextCharFormat) -> bool:
        """Insert a formula's image into text in this style; return whether it could be rendered."""
        font = style.font()
        pixels = font.pointSizeF() * PIXELS * SCALE
        colour = style.foreground().color().name()
        look = FormulaLook(formula.latex, formula.is_display, pixels, colour, RATIO)
        if look not in self._drawn:
            is_short = len(look.latex) <= MAX_LATEX
            self._drawn[look] = self._renderer.draw(look) if is_short else None
        picture = self._drawn[look]
        if picture is not None:
            cursor.insertText(OBJECT, self._image(picture, font, style))
        return picture is not None

    def close(self) -> None:
        """Stop the child process."""
        self._renderer.close()

    def _image(
        self, picture: FormulaImage, font: QFont, style: QTextCharFormat
    ) -> QTextImageFormat:
        # Qt lets an inline object extend below the baseline by the descent of its format's font,
        # so choose a font size with that descent
        below = QFont(font)
        below.setPixelSize(MEASURED)
        units = picture.depth * MEASURED / QFontMetricsF(below).descent()
        below.setPointSizeF(max(0.1, units / PIXELS))
        name = f"formula:{self._n_made}"
        self._n_made += 1
        pixels = QImage(picture.image)
        pixels.setDevicePixelRatio(1.0)  # printed documents ignore it
        self._document.addResource(
            QTextDocument.ResourceType.ImageResource.value, QUrl(name), pixels
        )
        image = QTextImageFormat()
        image.merge(style)
        image.setObjectType(QTextFormat.ObjectTypes.ImageObject.value)
        image.setFont(below)
        image.setName(name)
        image.setWidth(picture.width)
        image.setHeight(picture.height)
        return image


MAX_SIDE: Final = 1600
"""Maximum side length of an image in the file, in pixels."""

BOX: Final = QSizeF(420.0, 320.0)
"""Maximum size on paper, in document units (96 per inch)."""


class PaperImages:
    """Inserts message images into one document; used on one thread."""

    def __init__(self, document: QTextDocument, path_of: PathOf) -> None:
        self._document, self._path_of = document, path_of
        self._child = ImageChild()

    def insert(self, cursor: QTextCursor, picture: ChatImage) -> bool:
        """Insert an image; return whether it could be read."""
        path = self._path_of(picture)
        try:
            image = self._child.image(path, MAX_SIDE, picture.name)
        except EngineError:  # the image is missing
            return False
        name = QUrl(f"picture:{picture.file}")
        self._document.addResource(QTextDocument.ResourceType.ImageResource.value, name, image)
        size = QSizeF(image.size())
        if size.width() > BOX.width() or size.height() > BOX.height():
            size.scale(BOX, Qt.AspectRatioMode.KeepAspectRatio)
        form = QTextImageFormat()
        form.setName(name.toString())
        form.setWidth(size.width())
        form.setHeight(size.height())
        cursor.insertImage(form)
        return True

    def close(self) -> None:
        """Stop the child process."""
        self._child.close()


TEXT_POINTS: Final = 10.5
HEADING_POINTS: Final = (15.0, 13.5, 12.0, 11.0, 10.5, 10.5)
TITLE_POINTS, SPEAKER_POINTS, CODE_POINTS, NOTE_POINTS = 17.0, 9.0, 9.0, 9.0
GAP, TIGHT_GAP, SPEAKER_GAP, INDENT = 5.0, 1.5, 14.0, 14.0
"""Distances, in points."""

INK, FAINT_INK, LINK_INK = "#16181d", "#6b7280", "#1d4ed8"
CODE_PAPER, LINE_INK = "#f2f2f4", "#c9cdd4"


def paper_font(points: float) -> QFont:
    """Return the text font for paper."""
    font = QFont(FONT_FAMILY)
    font.setPointSizeF(points)
    for feature in ("tnum", "calt"):  # alternate glyphs cannot be copied from a PDF as text
        font.setFeature(QFont.Tag(feature), 0)
    return font


class PaperWriter:
    """Writes a chat into a document.

    Args:
        scale: device pixels per document unit, for lengths that Qt does not scale.
    """

    def __init__(
        self, document: QTextDocument, scale: float, formulas: PaperFormulas,
        pictures: PaperImages,
    ) -> None:  # fmt: skip
        self._cursor = QTextCursor(document)
        self._formulas, self._pictures = formulas, pictures
        self._scale = scale
        self._is_fresh = True

    def write(self, chat: Conversation) -> None:
        """Write the messages on screen, without thoughts."""
        title = _ink(paper_font(TITLE_POINTS), is_bold=True)
        self._start(0)
        self._cursor.insertText(one_line(chat.shown_title), title)
        if chat.system_prompt.strip():
            self._write_speaker(tr("System prompt"))
            self._write_plain(chat.system_prompt.strip())
        for message, speaker in spoken(chat):
            if speaker:
                self._write_speaker(speaker)
            for picture in message.pictures:
                self._start(GAP)
                if not self._pictures.insert(self._cursor, picture):
                    self._cursor.insertText(f"[{picture.title}]", _ink(paper_font(TEXT_POINTS)))
            text = said(message)
            if message.is_answer:
                for piece in parse(text):
                    self._write_piece(piece)
            elif text:
                self._write_plain(text)

    def _write_speaker(self, name: str) -> None:
        self._start(SPEAKER_GAP)
        faint = _ink(paper_font(SPEAKER_POINTS), FAINT_INK, is_bold=True)
        self._cursor.insertText(name, faint)

    def _write_plain(self, text: str) -> None:
        for line in printable(text).split("\n"):
            self._start(TIGHT_GAP)
            self._cursor.insertText(line, _ink(paper_font(TEXT_POINTS)))

    def _write_piece(self, piece: Piece) -> None:
        if isinstance(piece, TextLine):
            self._write_line(piece)
        elif isinstance(piece, CodeBlock):
            self._write_code(piece.text)
        elif isinstance(piece, DisplayFormula):
            span = TextSpan(piece.formula.source, formula=piece.formula)
            self._write_line(TextLine((span,), indent=1))
        elif isinstance(piece, Table):
            self._write_table(piece)
        elif isinstance(piece, Rule):
            width = QTextLength(QTextLength.Type.PercentageLength, 100)
            block = self._start(GAP)
            block.setProperty(QTextFormat.Property.BlockTrailingHorizontalRulerWidth, width)
            self._cursor.setBlockFormat(block)

    def _write_line(self, line: TextLine) -> None:
        indent = line.indent + line.quote + bool(line.note)
        self._start(TIGHT_GAP if line.tight else GAP, indent)
        points = HEADING_POINTS[line.heading - 1] if line.heading else TEXT_POINTS
        font = paper_font(NOTE_POINTS if line.note else points)
        base = _ink(font, FAINT_INK if line.quote or line.note else INK, is_bold=line.heading > 0)
        if line.marker:
            self._cursor.insertText(f"{line.marker} ", base)
        self._write_spans(line.spans, base)

    def _write_spans(self, spans: tuple[TextSpan, ...], base: QTextCharFormat) -> None:
        for span in spans:
            if span.formula and self._formulas.insert(self._cursor, span.formula, base):
                continue
            form = QTextCharFormat(base)
            if span.bold:
                form.setFontWeight(QFont.Weight.DemiBold)
            form.setFontItalic(span.italic)
            form.setFontStrikeOut(span.strike)
            if span.code or span.formula is not None:
                form.setFontFamilies(MONOSPACE)
            if span.href:
                form.setForeground(QColor(LINK_INK))
                form.setAnchor(True)
                form.setAnchorHref(span.href)
            if span.note:
                form.setVerticalAlignment(QTextCharFormat.VerticalAlignment.AlignSuperScript)
            self._cursor.insertText(printable(span.text), form)

    def _write_code(self, text: str) -> None:
        code = _ink(paper_font(CODE_POINTS))
        code.setFontFamilies(MONOSPACE)
        for number, line in enumerate(printable(text).split("\n")):
            block = self._start(0 if number else GAP)
            block.setBackground(QBrush(QColor(CODE_PAPER)))
            self._cursor.setBlockFormat(block)
            self._cursor.insertText(line, code)

    def _write_table(self, table: Table) -> None:
        form = QTextTableFormat()
        form.setCellPadding(3 * PIXELS)
        form.setCellSpacing(0)
        form.setBorder(1)
        form.setBorderStyle(QTextFrameFormat.BorderStyle.BorderStyle_Solid)
        form.setBorderBrush(QBrush(QColor(LINE_INK)))
        form.setBorderCollapse(True)
        form.setTopMargin(GAP * PIXELS)
        n_columns = max(map(len, table.rows))
        self._start(0)
        made = self._cursor.insertTable(len(table.rows), n_columns, form)
        for y, row in enumerate(table.rows):
            for x, spans in enumerate(row):
                self._cursor = made.cellAt(y, x).firstCursorPosition()
                base = _ink(paper_font(TEXT_POINTS), is_bold=y == 0)
                self._write_spans(spans, base)
        self._cursor = QTextCursor(self._cursor.document())
        self._cursor.movePosition(QTextCursor.MoveOperation.End)
        self._is_fresh = True  # Qt leaves an empty block after a table

    def _start(self, gap: float, indent: int = 0) -> QTextBlockFormat:
        block = QTextBlockFormat()
        block.setTopMargin(gap * PIXELS)
        block.setLeftMargin(indent * INDENT * PIXELS * self._scale)
        block.setLineHeight(125.0, QTextBlockFormat.LineHeightTypes.ProportionalHeight.value)
        if self._is_fresh:
            self._cursor.setBlockFormat(block)
        else:
            self._cursor.insertBlock(block, QTextCharFormat())
        self._is_fresh = False
        return block


def _ink(font: QFont, colour: str = INK, *, is_bold: bool = False) -> QTextCharFormat:
    form = QTextCharFormat()
    if is_bold:
        font.setWeight(QFont.Weight.DemiBold)
    form.setFont(font)
    form.setForeground(QColor(colour))
    return form
