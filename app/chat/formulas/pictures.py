"""Pictures of formulas for the window: drawn on a thread, by way of a child process, and kept."""

from __future__ import annotations

import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Final

from PySide6.QtCore import QByteArray, QObject, QRectF, Signal
from PySide6.QtGui import QImage, QPainter
from PySide6.QtSvg import QSvgRenderer

import engine  # for names that only formulas need, which are resolved when they are used
from app.core.background import KeptChild
from engine import program_command

log = logging.getLogger(__name__)

COMMAND: Final = program_command("app.chat.formulas.program")
MAX_LATEX: Final = 4000
"""Largest number of characters of a formula that is drawn."""

MAX_KEPT: Final = 48 << 20
"""Bytes of the pictures that are kept."""

MAX_AREA: Final = 16 << 20
"""Largest number of dots of a picture."""

MOST_WAITING: Final = 500
"""Formulas that wait for their pictures; the oldest of more are shown as their source."""

JOIN_S: Final = 8.0
"""Longest wait for the thread, which may be in the middle of a formula."""

IDLE_S: Final = 30.0
"""Seconds without a formula after which the child and the thread end."""


@dataclass(frozen=True, slots=True)
class FormulaLook:
    """A formula and how it is drawn, which is all that its picture depends on.

    Attributes:
        pixels: size of its letters, in logical pixels.
        colour: colour as "#rrggbb".
        ratio: dots of the screen for each logical pixel.
    """

    latex: str
    is_display: bool
    pixels: float
    colour: str
    ratio: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class FormulaPicture:
    """The picture of a formula; its lengths are in logical pixels.

    Attributes:
        depth: height of what is below the baseline.
    """

    image: QImage
    width: float
    height: float
    depth: float


class FormulaPictures(QObject):
    """The pictures of all formulas of the window, each of which is drawn once."""

    ready = Signal(object)  # FormulaLook whose picture is there, or will never be

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._kept: OrderedDict[FormulaLook, FormulaPicture | None] = OrderedDict()
        self._n_bytes = 0
        self._waiting: OrderedDict[FormulaLook, None] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def find(self, look: FormulaLook) -> FormulaPicture | None:
        """Return a picture that is there."""
        with self._changed:
            if look in self._kept:
                self._kept.move_to_end(look)
            return self._kept.get(look)

    def want(self, look: FormulaLook) -> bool:
        """Have a picture drawn, the newest first; return whether `ready` will tell of it."""
        if len(look.latex) > MAX_LATEX:
            return False
        with self._changed:
            if look in self._kept:
                return False  # it has failed before
            self._waiting[look] = None
            self._waiting.move_to_end(look)
            while len(self._waiting) > MOST_WAITING:
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
        """End the thread and the child."""
        with self._changed:
            thread, self._is_closed = self._thread, True
            self._waiting.clear()
            self._changed.notify_all()
        if thread is not None:
            thread.join(JOIN_S)

    def _work(self) -> None:
        """Draw what is wanted; runs on the thread."""
        artist = FormulaArtist()
        while (look := self._next()) is not None:
            picture = artist.draw(look)
            self._keep(look, picture)
            self.ready.emit(look)
        artist.close()

    def _next(self) -> FormulaLook | None:
        """Return the formula to draw now; None, and end the thread, if there has long been none."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting) or self._is_closed, IDLE_S)
            if self._is_closed or not self._waiting:
                self._thread = None
                return None
            return self._waiting.popitem()[0]

    def _keep(self, look: FormulaLook, picture: FormulaPicture | None) -> None:
        with self._changed:
            self._kept[look] = picture
            self._n_bytes += _size(picture)
            while self._n_bytes > MAX_KEPT and len(self._kept) > 1:
                self._n_bytes -= _size(self._kept.popitem(last=False)[1])


@cache
def formula_pictures() -> FormulaPictures:
    """Return the pictures of this process."""
    return FormulaPictures()


def _size(picture: FormulaPicture | None) -> int:
    return 1000 if picture is None else 1000 + picture.image.sizeInBytes()


class FormulaArtist:
    """The child that draws, started when it is needed; used on one thread."""

    def __init__(self) -> None:
        self._child = KeptChild(COMMAND)

    def draw(self, look: FormulaLook) -> FormulaPicture | None:
        """Return a picture; None for a formula that cannot be drawn within the limits."""
        values = asdict(look)
        ratio = values.pop("ratio")
        drawn = self._ask(values)
        return _picture(drawn, ratio) if drawn else None

    def close(self) -> None:
        """End the child."""
        self._child.close()

    def _ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        from app.chat.formulas.program import MAX_MEMORY, MAX_SECONDS  # late: no formula, no child

        try:
            return self._child.ask(request, MAX_MEMORY, MAX_SECONDS)
        except engine.ChildEnded as error:
            log.info("a formula is not drawn: %s", error)
        except OSError as error:
            log.warning("formulas cannot be drawn: %s", error)
        return {}


def _picture(drawn: dict[str, Any], ratio: float) -> FormulaPicture | None:
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
    return FormulaPicture(image, columns / ratio, rows / ratio, float(drawn["depth"]))
