"""Chips of pictures that shall go with the next message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from PySide6.QtCore import QSize, Signal
from PySide6.QtGui import QImage
from shiboken6 import isValid

from app.chat.attachments.views.chips import FileChip
from app.chat.pictures.album import PictureAlbum
from app.chat.pictures.picture import ChatPicture
from app.chat.pictures.views.viewer import PictureCanvas, fitting
from app.core.translation import tr, tr_n
from app.widgets.buttons import IconButton, button
from app.widgets.theme import px, set_role
from engine import EngineError

BOX: Final = QSize(64, 44)
"""Largest size of the picture on a chip."""


class PictureChip(FileChip):
    """Chip of a picture, or of all pages of a document; the cross takes it away."""

    removed = Signal(object)  # the pictures
    pages_wanted = Signal(object)  # the pictures, of which a person wants to choose some

    def __init__(
        self, pictures: Sequence[ChatPicture], album: PictureAlbum, *, is_refused: bool
    ) -> None:
        first = pictures[0]
        name = first.name if first.page else first.title
        super().__init__(name, _details(pictures, album))
        if is_refused:
            set_role(self.more, "danger")
        size = fitting(first.width, first.height, QSize(px(BOX.width()), px(BOX.height())))
        self.canvas = PictureCanvas(size)
        self.row.insertWidget(0, self.canvas)
        if len(pictures) > 1:
            choose = button(
                tr("Choose pages…"), "chip",
                tr("Choose pages of {name}").format(name=self.name.text()),
            )  # fmt: skip
            choose.clicked.connect(lambda: self.pages_wanted.emit(tuple(pictures)))
            self.row.addWidget(choose)
        remove = IconButton("close", tr("Remove {name}").format(name=self.name.text()), size=12)
        remove.clicked.connect(lambda: self.removed.emit(tuple(pictures)))
        self.row.addWidget(remove)
        side = round(max(size.width(), size.height()) * self.devicePixelRatioF())
        album.show(first, side, self._take)

    def _take(self, found: QImage | EngineError) -> None:
        if isValid(self) and isinstance(found, QImage):
            self.canvas.set_image(found)


class WaitingChip(FileChip):
    """Chip of a picture that is being read; the cross ends that."""

    removed = Signal(str)

    def __init__(self, key: str, name: str, more: str) -> None:
        super().__init__(name, more)
        remove = IconButton("close", tr("Remove {name}").format(name=self.name.text()), size=12)
        remove.clicked.connect(lambda: self.removed.emit(key))
        self.row.addWidget(remove)


def _details(pictures: Sequence[ChatPicture], album: PictureAlbum) -> str:
    """Return what a chip says behind the name: "1024 x 768, 391 tokens", or of several pages."""
    if not pictures[0].page:
        return album.caption(pictures[0])
    parts = [tr_n("{n} page as a picture", "{n} pages as pictures", len(pictures))]
    numbers = [album.n_tokens(picture) for picture in pictures]
    if None not in numbers:
        total = sum(n for n in numbers if n)
        parts.append(tr_n("{n} token", "{n} tokens", total))
    elif not album.sees:
        parts.append(tr("not seen by this model"))
    return " · ".join(parts)
