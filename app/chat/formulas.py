"""LaTeX formulas, rendered by ziamath in a child process, cached, and inserted into texts.

A child process is used because ziamath's time doubles with each level of nested fractions, so a
model's formula may take forever. `formula_program` is the child; this is the window's side.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Final

from PySide6.QtCore import QByteArray, QObject, QPointF, QRectF, Qt, QUrl, Signal, Slot
from PySide6.QtGui import (
    QFont,
    QFontMetrics,
    QImage,
    QPainter,
    QPixmap,
    QTextCharFormat,
    QTextCursor,
    QTextDocument,
    QTextFormat,
    QTextImageFormat,
)
from PySide6.QtSvg import QSvgRenderer
from PySide6.QtWidgets import QTextEdit

import engine  # names used only in this module load on first access
from app.chat.markdown import Formula
from app.core.background import KeptChild
from app.widgets.text import set_tip
from app.widgets.theme import theme
from engine import printable, program_command

log = logging.getLogger(__name__)

COMMAND: Final = program_command("app.chat.formula_program")
MAX_LATEX: Final = 4000  # characters
MAX_KEPT: Final = 48 << 20  # bytes of cached images
MAX_AREA: Final = 16 << 20  # pixels of an image

MAX_WAITING: Final = 500
"""Maximum length of the render queue; when it is full, the oldest formula remains as source."""

JOIN_S: Final = 8.0
"""Seconds to wait for the thread to stop, as it may be rendering a formula."""

IDLE_S: Final = 30.0
"""Seconds without a formula after which the child and the thread stop."""


@dataclass(frozen=True, slots=True)
class FormulaLook:
    """A formula and its rendering options; the cache key of its image.

    Attributes:
        pixels: font size, in logical pixels.
        colour: colour as "#rrggbb".
        ratio: device pixel ratio.
    """

    latex: str
    is_display: bool
    pixels: float
    colour: str
    ratio: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class FormulaImage:
    """A formula's image, with lengths in logical pixels; `depth` is the part below the baseline."""

    image: QImage
    width: float
    height: float
    depth: float


class FormulaCache(QObject):
    """Cache and render queue for the window's formulas."""

    ready = Signal(object)  # FormulaLook that was rendered or cannot be rendered

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._kept: OrderedDict[FormulaLook, FormulaImage | None] = OrderedDict()
        self._n_bytes = 0
        self._waiting: OrderedDict[FormulaLook, None] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def find(self, look: FormulaLook) -> FormulaImage | None:
        """Return a cached image, if any."""
        with self._changed:
            if look in self._kept:
                self._kept.move_to_end(look)
            return self._kept.get(look)

    def want(self, look: FormulaLook) -> bool:
        """Put a formula first in the queue; return whether `ready` will report it."""
        if len(look.latex) > MAX_LATEX:
            return False
        with self._changed:
            if look in self._kept:
                return False  # an earlier attempt failed
            self._waiting[look] = None
            self._waiting.move_to_end(look)
            while len(self._waiting) > MAX_WAITING:
                self._waiting.popitem(last=False)
            self._changed.notify_all()
            if self._thread is None:
                self._is_closed = False
                self._thread = threading.Thread(
                    target=self._work, name="tandem-formulas", daemon=True
                )
                self._thread.start()
        return True

    def close(self) -> None:
        """Stop the thread and the child."""
        with self._changed:
            thread, self._is_closed = self._thread, True
            self._waiting.clear()
            self._changed.notify_all()
        if thread is not None:
            thread.join(JOIN_S)

    def _work(self) -> None:
        renderer = FormulaRenderer()
        while (look := self._next()) is not None:
            picture = renderer.draw(look)
            self._keep(look, picture)
            self.ready.emit(look)
        renderer.close()

    def _next(self) -> FormulaLook | None:
        # None stops the thread
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting) or self._is_closed, IDLE_S)
            if self._is_closed or not self._waiting:
                self._thread = None
                return None
            return self._waiting.popitem()[0]

    def _keep(self, look: FormulaLook, picture: FormulaImage | None) -> None:
        with self._changed:
            self._kept[look] = picture
            self._n_bytes += _size(picture)
            while self._n_bytes > MAX_KEPT and len(self._kept) > 1:
                self._n_bytes -= _size(self._kept.popitem(last=False)[1])


@cache
def formula_cache() -> FormulaCache:
    """Return this process's formula cache."""
    return FormulaCache()


def _size(picture: FormulaImage | None) -> int:
    return 1000 if picture is None else 1000 + picture.image.sizeInBytes()


class FormulaRenderer:
    """Renderer in a child process that starts on demand; used on one thread."""

    def __init__(self) -> None:
        self._child = KeptChild(COMMAND)

    def draw(self, look: FormulaLook) -> FormulaImage | None:
        """Return a formula's image; None if it cannot be rendered within the limits."""
        values = asdict(look)
        ratio = values.pop("ratio")
        drawn = self._ask(values)
        return _picture(drawn, ratio) if drawn else None

    def close(self) -> None:
        """Stop the child."""
        self._child.close()

    def _ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        from app.chat.formula_program import MAX_MEMORY, MAX_SECONDS  # late: only for the child

        try:
            return self._child.ask(request, MAX_MEMORY, MAX_SECONDS)
        except engine.ChildEnded as error:
            log.info("a formula cannot be rendered: %s", error)
        except OSError as error:
            log.warning("formulas cannot be rendered: %s", error)
        return {}


def _picture(drawn: dict[str, Any], ratio: float) -> FormulaImage | None:
    width, height = float(drawn["width"]), float(drawn["height"])
    columns, rows = math.ceil(width * ratio), math.ceil(height * ratio)
    if columns * rows > MAX_AREA:
        return None
    renderer = QSvgRenderer(QByteArray(str(drawn["svg"]).encode()))
    if not renderer.isValid():
        return None
    image = QImage(columns, rows, QImage.Format.Format_ARGB32_Premultiplied)
    image.fill(0)
    painter = QPainter(image)
    renderer.render(painter, QRectF(0, 0, width * ratio, height * ratio))
    painter.end()
    image.setDevicePixelRatio(ratio)
    return FormulaImage(image, columns / ratio, rows / ratio, float(drawn["depth"]))


SOURCE: Final = QTextFormat.Property.UserProperty + 2
"""Text format property: an image's formula source."""

NUMBER: Final = QTextFormat.Property.UserProperty + 3
"""Text format property: the number of a formula being rendered, set on its source text."""

SCALE: Final = 1.14
"""Font size of formulas relative to the text, which has a larger x-height."""

OBJECT: Final = "\ufffc"


@dataclass(frozen=True, slots=True)
class _Waiting:
    look: FormulaLook
    formula: Formula
    style: QTextCharFormat  # of the surrounding text
    cursor: QTextCursor  # at the start of its source
    length: int  # of its source, in UTF-16 units as in documents


class InlineFormulas(QObject):
    """The formulas of one text view."""

    def __init__(self, view: QTextEdit) -> None:
        super().__init__(view)
        self._view = view
        self._document = view.document()
        self._pictures = formula_cache()
        self._waiting: dict[int, _Waiting] = {}
        self._n_made = 0

    def insert(
        self, cursor: QTextCursor, formula: Formula, style: QTextCharFormat, code: QTextCharFormat
    ) -> None:
        """Insert a formula.

        Args:
            style: style of the surrounding text.
            code: style of its source, which is shown until the formula is rendered.
        """
        look = self._look(formula, style)
        if not self._waiting:
            self._pictures.ready.connect(self._show)  # before `want`, so as not to miss it
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
        """Return document text with each formula image replaced by its source.

        Args:
            text: text in which each image is a single `OBJECT` character.
            start: where the text starts in the document.
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
        if not self._waiting:
            return  # the signal had been queued before `disconnect`
        picture = self._pictures.find(look)
        for number, waiting in list(self._waiting.items()):
            if waiting.look == look:
                del self._waiting[number]
                if picture is not None:
                    self._replace(number, waiting, picture)
        if not self._waiting:
            self._pictures.ready.disconnect(self._show)

    def _replace(self, number: int, waiting: _Waiting, picture: FormulaImage) -> None:
        start, end = waiting.cursor.position(), waiting.cursor.position() + waiting.length
        cursor = QTextCursor(self._document)
        if end >= self._document.characterCount():
            return
        cursor.setPosition(start + 1)
        if cursor.charFormat().property(NUMBER) != number:
            return
        cursor.beginEditBlock()
        # insert inside the source, so that cursors at its ends stay in place
        cursor.insertText(OBJECT, self._image(picture, waiting.formula, waiting.style))
        keep = QTextCursor.MoveMode.KeepAnchor
        for first, last in ((start + 2, end + 1), (start, start + 1)):
            cursor.setPosition(first)
            cursor.setPosition(last, keep)
            cursor.removeSelectedText()
        cursor.endEditBlock()

    def _image(
        self, picture: FormulaImage, formula: Formula, style: QTextCharFormat
    ) -> QTextCharFormat:
        # Qt lets an inline object extend below the baseline by the descent of its format's font,
        # so choose a font with that descent
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
    # the smallest font with this descent (in pixels)
    found = QFont(font)
    size = 1
    found.setPixelSize(size)
    while QFontMetrics(found).descent() < depth:
        size += 1
        found.setPixelSize(size)
    return found
