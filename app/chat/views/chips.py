"""Chips for files and images in drafts and messages, and the images in a bubble."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from PySide6.QtCore import QMargins, QRectF, QSize, Qt, Signal, Slot
from PySide6.QtGui import QColor, QImage, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import (
    QAbstractButton,
    QFrame,
    QHBoxLayout,
    QMenu,
    QPushButton,
    QVBoxLayout,
    QWidget,
)
from shiboken6 import isValid

from app.chat.attachments.files import DraftFile, FilePart
from app.chat.images.album import ImageAlbum
from app.chat.message import Attachment, ChatImage
from app.chat.views.image_viewer import ImageCanvas, fitting, paint_image
from app.core.translation import tr, tr_n
from app.core.units import decimal_size
from app.widgets.buttons import IconButton, button
from app.widgets.layout import GAP, FlowBox
from app.widgets.text import ElidedLabel, caption_text, label, set_tip
from app.widgets.theme import px, set_role, theme
from engine import EngineError, one_line

MAX_NAME: Final = 36
MAX_LISTED: Final = 30  # parts listed in the menu of a file that is too large
MAX_TIP: Final = 600


def details(n_bytes: int, n_tokens: int | None, part: int = 1, n_parts: int = 1) -> str:
    """Return a file's details, such as "part 2 of 3 · 12.3 kB · 3,100 tokens"."""
    parts = [tr("part {n} of {total}").format(n=part, total=n_parts)] if n_parts > 1 else []
    parts.append(decimal_size(n_bytes))
    if n_tokens:
        parts.append(tr_n("{n} token", "{n} tokens", n_tokens))
    return " · ".join(parts)


class FileChip(QFrame):
    """Chip for a file in a message."""

    def __init__(self, name: str, more: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "fileChip")
        shown = one_line(name, MAX_NAME)
        self.setAccessibleName(f"{shown}, {more}")
        self.name, self.more = label(shown), ElidedLabel(more)
        self.more.setProperty("role", "muted")
        self.row = QHBoxLayout(self)
        self.row.setContentsMargins(10, 4, 6, 4)
        self.row.setSpacing(6)
        self.row.addWidget(self.name)
        self.row.addWidget(self.more)

    def add_button(self, text: str, name: str, on_click: Callable[[], object]) -> QPushButton:
        """Add a button with accessible `name`, in which `{name}` stands for the file's name."""
        made = button(text, "chip", name.format(name=self.name.text()))
        made.clicked.connect(lambda: on_click())
        self.row.addWidget(made)
        return made

    def add_remove(self, on_click: Callable[[], object]) -> None:
        """Add a button that removes the file."""
        remove = IconButton("close", tr("Remove {name}").format(name=self.name.text()), size=12)
        remove.clicked.connect(lambda: on_click())
        self.row.addWidget(remove)


class DraftChip(FileChip):
    """Chip for a file in a draft."""

    removed = Signal(object)  # DraftFile
    part_chosen = Signal(object, object, int)  # DraftFile, all parts, number of a part, from 1
    pages_wanted = Signal(object)  # DraftFile whose pages to attach as images

    def __init__(
        self, file: DraftFile, parts: tuple[FilePart, ...], *, is_too_large: bool,
        can_show_pages: bool = False,
    ) -> None:  # fmt: skip
        known = file.file
        more = details(known.n_bytes, file.n_tokens, file.number, file.n_parts) if known else ""
        super().__init__(file.path.name, more or tr("reading…"))
        self.file, self._parts = file, parts
        set_tip(self, str(file.path))
        if is_too_large:
            set_role(self.more, "danger")
        if parts:
            self.choose = self.add_button(
                tr("Choose part…"), tr("Choose a part of {name}"), self._offer
            )
        if can_show_pages:
            name = tr("Attach the pages of {name} as images")
            self.add_button(tr("As images"), name, lambda: self.pages_wanted.emit(file))
        self.add_remove(lambda: self.removed.emit(file))

    def menu(self) -> QMenu:
        """Return the menu to choose a part."""
        menu = QMenu(self)
        text = self.file.file.text if self.file.file else ""
        for number, part in enumerate(self._parts[:MAX_LISTED], 1):
            begins = one_line(text[part.start : part.start + 200], 40)
            title = tr("Part {n} of {total} · {tokens} tokens · {begins}").format(
                n=number, total=len(self._parts), tokens=part.n_tokens, begins=begins
            )
            action = menu.addAction(caption_text(title, 100))
            action.triggered.connect(
                lambda _=False, n=number: self.part_chosen.emit(self.file, self._parts, n)
            )
        return menu

    def _offer(self) -> None:
        self.menu().popup(self.choose.mapToGlobal(self.choose.rect().bottomLeft()))


def message_chips(files: Sequence[Attachment], parent: QWidget) -> FlowBox:
    """Return the chips for the files of a sent message."""
    box = FlowBox(parent)
    chips = []
    for file in files:
        more = details(file.n_bytes, file.n_tokens, file.part, file.n_parts)
        chip = FileChip(file.name, more)
        set_tip(chip, file.text[:MAX_TIP])
        chips.append(chip)
    box.set_widgets(chips)
    return box


CHIP_BOX: Final = QSize(64, 44)
"""Maximum size of the image on a chip."""


class ImageChip(FileChip):
    """Chip for an image, or for all pages of a document."""

    removed = Signal(object)  # the images
    pages_wanted = Signal(object)  # the images of all pages, to choose some

    def __init__(
        self, pictures: Sequence[ChatImage], album: ImageAlbum, *, is_refused: bool
    ) -> None:
        first = pictures[0]
        name = first.name if first.page else first.title
        super().__init__(name, _details(pictures, album))
        if is_refused:
            set_role(self.more, "danger")
        size = fitting(
            first.width, first.height, QSize(px(CHIP_BOX.width()), px(CHIP_BOX.height()))
        )
        self.canvas = ImageCanvas(size)
        self.row.insertWidget(0, self.canvas)
        if len(pictures) > 1:
            self.add_button(
                tr("Choose pages…"), tr("Choose pages of {name}"),
                lambda: self.pages_wanted.emit(tuple(pictures)),
            )  # fmt: skip
        self.add_remove(lambda: self.removed.emit(tuple(pictures)))
        side = round(max(size.width(), size.height()) * self.devicePixelRatioF())
        album.show(first, side, self._take)

    def _take(self, found: QImage | EngineError) -> None:
        if isValid(self) and isinstance(found, QImage):
            self.canvas.set_image(found)


class WaitingChip(FileChip):
    """Chip for an image that is being read."""

    removed = Signal(str)

    def __init__(self, key: str, name: str, more: str) -> None:
        super().__init__(name, more)
        self.add_remove(lambda: self.removed.emit(key))


def _details(pictures: Sequence[ChatImage], album: ImageAlbum) -> str:
    if not pictures[0].page:
        return album.caption(pictures[0])
    parts = [tr_n("{n} page as an image", "{n} pages as images", len(pictures))]
    numbers = [album.n_tokens(picture) for picture in pictures]
    if None not in numbers:
        total = sum(n for n in numbers if n)
        parts.append(tr_n("{n} token", "{n} tokens", total))
    elif not album.reads_images:
        parts.append(tr("ignored by this model"))
    return " · ".join(parts)


TILE_BOX: Final = QSize(220, 165)
"""Maximum size of an image in a bubble."""

MAX_TOKENS: Final = 9999
"""Token count for which every caption has room, whatever model is loaded."""

FRAME: Final = 3
"""Width of the focus frame in pixels."""


class ImageTile(QAbstractButton):
    """A clickable thumbnail."""

    def __init__(self, picture: ChatImage, album: ImageAlbum, parent: QWidget) -> None:
        super().__init__(parent)
        self._picture, self._album = picture, album
        self.image: QImage | None = None
        self._note = ""
        box = QSize(px(TILE_BOX.width()), px(TILE_BOX.height()))
        self._size = fitting(picture.width, picture.height, box)
        self.setFixedSize(self._size.grownBy(QMargins(*[px(FRAME)] * 4)))
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        set_tip(self, picture.title)
        side = round(max(self._size.width(), self._size.height()) * self.devicePixelRatioF())
        album.show(picture, side, self._take)

    def set_caption(self, caption: str) -> None:
        """Add the caption to the accessible name."""
        self.setAccessibleName(
            tr("Image {name}, {caption}. Press to enlarge.").format(
                name=self._picture.title, caption=caption
            )
        )

    def _take(self, found: QImage | EngineError) -> None:
        if not isValid(self):  # the view has been deleted
            return
        if isinstance(found, QImage):
            self.image = found
        else:
            self._note = tr("This image is missing.")
            set_tip(self, found.message)
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        frame = px(FRAME)
        area = QRectF(self.rect()).adjusted(frame, frame, -frame, -frame)
        paint_image(painter, area, self.image, self._note)
        if self.hasFocus():
            painter.setPen(QPen(QColor(theme().accent), 2))
            painter.drawRoundedRect(QRectF(self.rect()).adjusted(1, 1, -1, -1), px(8), px(8))
        painter.end()


class _Captioned(QWidget):
    pressed = Signal()

    def __init__(self, picture: ChatImage, album: ImageAlbum, parent: QWidget) -> None:
        super().__init__(parent)
        self._picture, self._album = picture, album
        self.tile = ImageTile(picture, album, self)
        self.tile.clicked.connect(self.pressed)
        self.caption = ElidedLabel()
        self.caption.setProperty("role", "muted")
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(2)
        column.addWidget(self.tile)
        column.addWidget(self.caption)
        widest = self._in_words(f"{picture.size}, {tr_n('{n} token', '{n} tokens', MAX_TOKENS)}")
        self.caption.setMinimumWidth(self.caption.fontMetrics().horizontalAdvance(widest))
        self.refresh()

    @Slot()
    def refresh(self) -> None:
        text = self._in_words(self._album.caption(self._picture))
        self.caption.set_full_text(text)
        self.tile.set_caption(text)

    def _in_words(self, caption: str) -> str:
        if not self._picture.page:
            return caption
        return tr("Page {n}: {caption}").format(n=self._picture.page, caption=caption)


class ImageTiles(FlowBox):
    """The images of a message."""

    def __init__(self, pictures: Sequence[ChatImage], album: ImageAlbum, parent: QWidget) -> None:
        super().__init__(parent)
        self.tiles = [_Captioned(picture, album, self) for picture in pictures]
        for at, tile in enumerate(self.tiles):
            tile.pressed.connect(partial(album.enlarge, pictures, at))
        self.set_widgets(self.tiles)
        album.changed.connect(self.refresh)

    @property
    def ideal_width(self) -> int:
        """Width in pixels of a single row with all images."""
        return sum(tile.sizeHint().width() for tile in self.tiles) + GAP * (len(self.tiles) - 1)

    @Slot()
    def refresh(self) -> None:
        """Update the captions for the loaded model."""
        for tile in self.tiles:
            tile.refresh()
