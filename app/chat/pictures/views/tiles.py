"""Pictures in the bubble of a question: a click, Enter or Space shows one large."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from PySide6.QtCore import QMargins, QRectF, QSize, Qt, Signal, Slot
from PySide6.QtGui import QColor, QImage, QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QAbstractButton, QVBoxLayout, QWidget
from shiboken6 import isValid

from app.chat.pictures.album import PictureAlbum
from app.chat.pictures.picture import ChatPicture
from app.chat.pictures.views.viewer import fitting, paint_picture
from app.core.translation import tr, tr_n
from app.widgets.layout import GAP, FlowBox
from app.widgets.text import ElidedLabel, set_tip
from app.widgets.theme import px, theme
from engine import EngineError

BOX: Final = QSize(220, 165)
"""Largest size of a picture in a bubble; a narrow bubble has smaller ones."""

MOST_TOKENS: Final = 9999
"""Number of tokens for which a caption has room, whatever model is loaded."""

FRAME: Final = 3
"""Room for the frame that shows the focus, in pixels."""


class PictureTile(QAbstractButton):
    """A small picture that can be pressed."""

    def __init__(self, picture: ChatPicture, album: PictureAlbum, parent: QWidget) -> None:
        super().__init__(parent)
        self._picture, self._album = picture, album
        self.image: QImage | None = None
        self._note = ""
        box = QSize(px(BOX.width()), px(BOX.height()))
        self._size = fitting(picture.width, picture.height, box)
        self.setFixedSize(self._size.grownBy(QMargins(*[px(FRAME)] * 4)))
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        set_tip(self, picture.title)
        side = round(max(self._size.width(), self._size.height()) * self.devicePixelRatioF())
        album.show(picture, side, self._take)

    def set_caption(self, caption: str) -> None:
        """Tell people who cannot see the picture what stands below it."""
        self.setAccessibleName(
            tr("Picture {name}, {caption}. Press to enlarge.").format(
                name=self._picture.title, caption=caption
            )
        )

    def _take(self, found: QImage | EngineError) -> None:
        if not isValid(self):  # the view is gone by now
            return
        if isinstance(found, QImage):
            self.image = found
        else:
            self._note = tr("This picture is gone.")
            set_tip(self, found.message)
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        frame = px(FRAME)
        area = QRectF(self.rect()).adjusted(frame, frame, -frame, -frame)
        paint_picture(painter, area, self.image, self._note)
        if self.hasFocus():
            painter.setPen(QPen(QColor(theme().accent), 2))
            painter.drawRoundedRect(QRectF(self.rect()).adjusted(1, 1, -1, -1), px(8), px(8))
        painter.end()


class _Captioned(QWidget):
    """A picture with its size and tokens below it."""

    pressed = Signal()

    def __init__(self, picture: ChatPicture, album: PictureAlbum, parent: QWidget) -> None:
        super().__init__(parent)
        self._picture, self._album = picture, album
        self.tile = PictureTile(picture, album, self)
        self.tile.clicked.connect(self.pressed)
        self.caption = ElidedLabel()
        self.caption.setProperty("role", "muted")
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(2)
        column.addWidget(self.tile)
        column.addWidget(self.caption)
        widest = self._in_words(f"{picture.size}, {tr_n('{n} token', '{n} tokens', MOST_TOKENS)}")
        self.caption.setMinimumWidth(self.caption.fontMetrics().horizontalAdvance(widest))
        self.refresh()

    @Slot()
    def refresh(self) -> None:
        """Show what the loaded model makes of it."""
        text = self._in_words(self._album.caption(self._picture))
        self.caption.set_full_text(text)
        self.tile.set_caption(text)

    def _in_words(self, caption: str) -> str:
        if not self._picture.page:
            return caption
        return tr("Page {n}: {caption}").format(n=self._picture.page, caption=caption)


class PictureTiles(FlowBox):
    """The pictures of a message."""

    def __init__(
        self, pictures: Sequence[ChatPicture], album: PictureAlbum, parent: QWidget
    ) -> None:
        super().__init__(parent)
        self.tiles = [_Captioned(picture, album, self) for picture in pictures]
        for at, tile in enumerate(self.tiles):
            tile.pressed.connect(partial(album.enlarge, pictures, at))
        self.set_widgets(self.tiles)
        album.changed.connect(self.refresh)

    @property
    def ideal_width(self) -> int:
        """Width in pixels with all of them in a row."""
        return sum(tile.sizeHint().width() for tile in self.tiles) + GAP * (len(self.tiles) - 1)

    @Slot()
    def refresh(self) -> None:
        """Show what the loaded model makes of them."""
        for tile in self.tiles:
            tile.refresh()
