"""The base of views of formatted text, written with a cursor: no HTML is parsed anywhere."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from PySide6.QtCore import QByteArray, QMimeData, QSize, Qt, QUrl, Signal, Slot
from PySide6.QtGui import (
    QColor,
    QCursor,
    QFont,
    QTextCharFormat,
    QTextCursor,
    QTextFormat,
    QWheelEvent,
)
from PySide6.QtWidgets import QFrame, QSizePolicy, QTextBrowser, QWidget

from app.chat.markdown import TextSpan
from app.widgets.text import set_tip
from app.widgets.theme import px, theme
from engine import printable

if TYPE_CHECKING:
    from app.chat.views.inline_formulas import InlineFormulas

TEXT_PIXELS: Final = 14
MONOSPACE: Final = ["JetBrains Mono", "DejaVu Sans Mono", "Menlo", "Consolas", "monospace"]
NOTE_SCHEME: Final = "note"
"""Scheme of what refers to a footnote of the same message."""


class TextBlock(QTextBrowser):
    """Text view as high as its text, selectable by mouse and keyboard."""

    note_wanted = Signal(str)  # label of the footnote whose reference was clicked

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
        """The text, with the sources of its formulas."""
        return self._with_sources(self.document().toPlainText(), 0)

    def insert_spans(
        self, cursor: QTextCursor, spans: tuple[TextSpan, ...], base: QTextCharFormat
    ) -> None:
        """Insert spans at a cursor, on top of the style of their line."""
        for span in spans:
            style = base if span.is_plain else _char_format(span, base)
            if span.formula is None:
                cursor.insertText(printable(span.text).replace("\n", "\u2028"), style)
                continue
            self._inline_formulas().insert(cursor, span.formula, style, _code(style))

    def _inline_formulas(self) -> InlineFormulas:
        """Return what shows formulas in this text; a window without any imports none of it."""
        if self._formulas is None:
            from app.chat.views.inline_formulas import InlineFormulas

            self._formulas = InlineFormulas(self)
        return self._formulas

    def _with_sources(self, text: str, start: int) -> str:
        """Return a text, from a position on, with the sources of its formulas."""
        return text if self._formulas is None else self._formulas.with_sources(text, start)

    @Slot(QUrl)
    def _follow(self, url: QUrl) -> None:
        if url.scheme() == NOTE_SCHEME:
            self.note_wanted.emit(url.path())
        else:
            from app.chat.views.links import ask_to_open  # late: seldom needed

            ask_to_open(url, QCursor.pos(), self)

    def fitting_height(self) -> int:
        """Return the height of the whole text, in pixels."""
        return math.ceil(self.document().size().height())

    @Slot()
    def _fit(self) -> None:
        height = self.fitting_height()
        if height != self.height():
            self.setFixedHeight(height)

    # Qt

    def createMimeDataFromSelection(self) -> QMimeData:  # noqa: N802 Qt
        """Return what is copied: formulas as they were written."""
        cursor = self.textCursor()
        text = cursor.selection().toPlainText()
        written = self._with_sources(text, cursor.selectionStart())
        if written == text:
            return super().createMimeDataFromSelection()
        data = QMimeData()
        data.setText(written)
        return data

    def loadResource(self, kind: int, name: QUrl | str) -> object:
        """Return nothing, as no text may fetch anything, neither from the net nor from the disk.

        It is empty rather than None, after which Qt would read a local file itself.
        """
        return QByteArray()

    def sizeHint(self) -> QSize:
        return QSize(super().sizeHint().width(), self.fitting_height())

    def wheelEvent(self, event: QWheelEvent) -> None:
        event.ignore()  # the chat scrolls, not the message


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
