"""The formulas of a chat on paper: pictures on the baseline of their lines."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QUrl
from PySide6.QtGui import (
    QFont,
    QFontMetricsF,
    QImage,
    QTextCharFormat,
    QTextCursor,
    QTextDocument,
    QTextFormat,
    QTextImageFormat,
)

from app.chat.formulas.pictures import MAX_LATEX, FormulaArtist, FormulaLook, FormulaPicture
from app.chat.markdown import Formula

RATIO: Final = 600 / 96
"""Dots of a picture for each unit of a document: 600 per inch."""

SCALE: Final = 1.14
"""Size of a formula's letters beside those of the text, whose small letters are larger."""

UNITS_PER_POINT: Final = 96 / 72
OBJECT: Final = "\ufffc"
MEASURED: Final = 1000
"""Size of a font, in pixels, whose measures are exact enough."""


class PaperFormulas:
    """Draws the formulas of one document, each of them once; used on one thread."""

    def __init__(self, document: QTextDocument) -> None:
        self._document = document
        self._artist = FormulaArtist()
        self._drawn: dict[FormulaLook, FormulaPicture | None] = {}
        self._n_made = 0

    def insert(self, cursor: QTextCursor, formula: Formula, style: QTextCharFormat) -> bool:
        """Insert the picture of a formula; return whether there is one.

        Args:
            style: style of the text around it.
        """
        font = style.font()
        pixels = font.pointSizeF() * UNITS_PER_POINT * SCALE
        colour = style.foreground().color().name()
        look = FormulaLook(formula.latex, formula.is_display, pixels, colour, RATIO)
        if look not in self._drawn:
            is_short = len(look.latex) <= MAX_LATEX
            self._drawn[look] = self._artist.draw(look) if is_short else None
        picture = self._drawn[look]
        if picture is not None:
            cursor.insertText(OBJECT, self._image(picture, font, style))
        return picture is not None

    def close(self) -> None:
        """End the child that draws."""
        self._artist.close()

    def _image(
        self, picture: FormulaPicture, font: QFont, style: QTextCharFormat
    ) -> QTextImageFormat:
        """Return the format of a picture.

        Qt lets an object reach as far below the baseline as letters of its format's font do, so
        the font is as large as that takes: nothing is written in it.
        """
        below = QFont(font)
        below.setPixelSize(MEASURED)
        units = picture.depth * MEASURED / QFontMetricsF(below).descent()
        below.setPointSizeF(max(0.1, units / UNITS_PER_POINT))
        name = f"formula:{self._n_made}"
        self._n_made += 1
        self._document.addResource(
            QTextDocument.ResourceType.ImageResource.value, QUrl(name), _on_dots(picture)
        )
        image = QTextImageFormat()
        image.merge(style)
        image.setObjectType(QTextFormat.ObjectTypes.ImageObject.value)
        image.setFont(below)
        image.setName(name)
        image.setWidth(picture.width)
        image.setHeight(picture.height)
        return image


def _on_dots(picture: FormulaPicture) -> QImage:
    """Return a picture without a ratio of its own, as paper has none."""
    made = QImage(picture.image)
    made.setDevicePixelRatio(1.0)
    return made
