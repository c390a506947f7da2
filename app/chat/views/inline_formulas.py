"""Formulas in the lines of a text: their source at first, then their pictures on the baseline."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from PySide6.QtCore import QObject, QPointF, Qt, QUrl, Slot
from PySide6.QtGui import (
    QFont,
    QFontMetrics,
    QPainter,
    QPixmap,
    QTextCharFormat,
    QTextCursor,
    QTextDocument,
    QTextFormat,
    QTextImageFormat,
)
from PySide6.QtWidgets import QTextEdit

from app.chat.formulas.pictures import FormulaLook, FormulaPicture, formula_pictures
from app.chat.markdown import Formula
from app.widgets.text import set_tip
from app.widgets.theme import theme
from engine import printable

SOURCE: Final = QTextFormat.Property.UserProperty + 2
"""Property of a picture: the formula as it was written."""

NUMBER: Final = QTextFormat.Property.UserProperty + 3
"""Property of the source of a formula whose picture is being drawn."""

SCALE: Final = 1.14
"""Size of a formula's letters beside those of the text, whose small letters are larger."""

OBJECT: Final = "\ufffc"


@dataclass(frozen=True, slots=True)
class _Waiting:
    """The source of a formula that stands in a text.

    Attributes:
        style: style of the text around it.
        cursor: its beginning.
        length: its length in the document, which counts in UTF-16.
    """

    look: FormulaLook
    formula: Formula
    style: QTextCharFormat
    cursor: QTextCursor
    length: int


class InlineFormulas(QObject):
    """The formulas of one text view."""

    def __init__(self, view: QTextEdit) -> None:
        super().__init__(view)
        self._view = view
        self._document = view.document()
        self._pictures = formula_pictures()
        self._waiting: dict[int, _Waiting] = {}
        self._n_made = 0

    def insert(
        self, cursor: QTextCursor, formula: Formula, style: QTextCharFormat, code: QTextCharFormat
    ) -> None:
        """Insert a formula.

        Args:
            style: style of the text around it.
            code: style of its source, shown until its picture is there, or if there will be none.
        """
        look = self._look(formula, style)
        if not self._waiting:
            self._pictures.ready.connect(self._show)  # before it is wanted, or it may be missed
        is_coming = self._pictures.want(look)
        picture = self._pictures.find(look)
        shown = printable(formula.source).replace("\n", "\u2028")
        if picture is not None:
            cursor.insertText(OBJECT, self._image(picture, formula, style))
        elif is_coming:
            self._insert_source(cursor, shown, code, look, formula, style)
        else:
            cursor.insertText(shown, code)
        if not self._waiting:
            self._pictures.ready.disconnect(self._show)

    def _insert_source(
        self, cursor: QTextCursor, shown: str, code: QTextCharFormat, look: FormulaLook,
        formula: Formula, style: QTextCharFormat,
    ) -> None:  # fmt: skip
        self._n_made += 1
        code.setProperty(NUMBER, self._n_made)
        start = QTextCursor(cursor)
        start.setKeepPositionOnInsert(True)
        cursor.insertText(shown, code)
        start.setKeepPositionOnInsert(False)
        length = len(shown.encode("utf-16-le")) // 2
        self._waiting[self._n_made] = _Waiting(look, formula, style, start, length)

    def with_sources(self, text: str, start: int) -> str:
        """Return a text of the document with the formulas' sources in place of their pictures.

        Args:
            text: text in which each picture is one character, `OBJECT`.
            start: position of the document behind which the first of them is looked for.
        """
        document, position = self._document, start
        parts = text.split(OBJECT)
        result = [parts[0]]
        cursor = QTextCursor(document)
        for part in parts[1:]:
            while position < document.characterCount() and document.characterAt(position) != OBJECT:
                position += 1
            position += 1
            cursor.setPosition(min(position, document.characterCount() - 1))
            result += [str(cursor.charFormat().property(SOURCE) or OBJECT), part]
        return "".join(result)

    def _look(self, formula: Formula, style: QTextCharFormat) -> FormulaLook:
        is_coloured = style.hasProperty(QTextFormat.Property.ForegroundBrush)
        return FormulaLook(
            formula.latex,
            formula.is_display,
            self._font(style).pixelSize() * SCALE,
            style.foreground().color().name() if is_coloured else theme().text,
            self._view.devicePixelRatioF(),
        )

    def _font(self, style: QTextCharFormat) -> QFont:
        font = QFont(self._document.defaultFont())
        pixels = style.property(QTextFormat.Property.FontPixelSize)
        if pixels:
            font.setPixelSize(int(pixels))
        return font

    @Slot(object)
    def _show(self, look: FormulaLook) -> None:
        """Put a picture in the place of all sources that wait for it."""
        if not self._waiting:
            return  # it was on its way when the last one was shown
        picture = self._pictures.find(look)
        for number, waiting in list(self._waiting.items()):
            if waiting.look == look:
                del self._waiting[number]
                if picture is not None:
                    self._replace(number, waiting, picture)
        if not self._waiting:
            self._pictures.ready.disconnect(self._show)

    def _replace(self, number: int, waiting: _Waiting, picture: FormulaPicture) -> None:
        """Replace a source, unless it has gone; marks of positions around it stay right."""
        start, end = waiting.cursor.position(), waiting.cursor.position() + waiting.length
        cursor = QTextCursor(self._document)
        if end >= self._document.characterCount():
            return
        cursor.setPosition(start + 1)
        if cursor.charFormat().property(NUMBER) != number:
            return
        cursor.beginEditBlock()
        # inside the source, so that a mark at either end of it stays there
        cursor.insertText(OBJECT, self._image(picture, waiting.formula, waiting.style))
        keep = QTextCursor.MoveMode.KeepAnchor
        for first, last in ((start + 2, end + 1), (start, start + 1)):
            cursor.setPosition(first)
            cursor.setPosition(last, keep)
            cursor.removeSelectedText()
        cursor.endEditBlock()

    def _image(
        self, picture: FormulaPicture, formula: Formula, style: QTextCharFormat
    ) -> QTextCharFormat:
        """Return the format of a picture that stands on the baseline of its line.

        Qt lets an object reach as far below the baseline as letters of its format's font do, so the
        font is chosen for that: nothing is written in it.
        """
        below = _font_reaching(self._font(style), picture.depth)
        depth = QFontMetrics(below).descent()
        ratio = picture.image.devicePixelRatio()
        above = math.ceil((picture.height - picture.depth) * ratio) / ratio
        height = above + depth
        pixmap = QPixmap(math.ceil(picture.width * ratio), math.ceil(height * ratio))
        pixmap.setDevicePixelRatio(ratio)
        pixmap.fill(Qt.GlobalColor.transparent)
        painter = QPainter(pixmap)
        painter.drawImage(QPointF(0, above - (picture.height - picture.depth)), picture.image)
        painter.end()
        self._n_made += 1
        name = f"formula:{self._n_made}"
        self._document.addResource(
            QTextDocument.ResourceType.ImageResource.value, QUrl(name), pixmap
        )
        image = QTextImageFormat()
        image.merge(style)
        image.setObjectType(QTextFormat.ObjectTypes.ImageObject.value)
        image.setFont(below)
        image.setName(name)
        image.setWidth(picture.width)
        image.setHeight(height)
        image.setVerticalAlignment(QTextCharFormat.VerticalAlignment.AlignBaseline)
        image.setProperty(SOURCE, formula.source)
        set_tip(image, formula.source)
        return image


def _font_reaching(font: QFont, depth: float) -> QFont:
    """Return a font of the size whose letters reach a depth below the baseline, in pixels."""
    found = QFont(font)
    size = 1
    found.setPixelSize(size)
    while QFontMetrics(found).descent() < depth:
        size += 1
        found.setPixelSize(size)
    return found
