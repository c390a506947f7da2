"""What the views of messages ask about pictures: their pixels, and what stands below them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from PySide6.QtCore import QObject, Signal
from PySide6.QtGui import QImage
from PySide6.QtWidgets import QApplication

import engine  # for names that are resolved when they are used
from app.chat.pictures.picture import ChatPicture, sees
from app.chat.session import ChatSession
from app.core.engine_client import EngineClient
from app.core.notice import Notice
from app.core.translation import tr, tr_n
from engine import EngineError, atomic_write

if TYPE_CHECKING:
    from app.chat.pictures.desk import PictureDesk


MOST_SIDE: Final = 4096
"""Longest side of a picture that is shown large or copied, in pixels; saved is all of it."""


class PictureAlbum(QObject):
    """The pictures of the open chat, as the loaded model sees them."""

    noticed = Signal(object)  # Notice
    changed = Signal()  # another model is loaded, so that captions differ
    enlarged = Signal(object, int)  # pictures that are wanted large, number of the first one

    def __init__(self, session: ChatSession, client: EngineClient, parent: QObject) -> None:
        super().__init__(parent)
        self._session, self._client = session, client
        self._desk: PictureDesk | None = None
        for change in (client.loaded, client.unloaded, client.lost):
            change.connect(self.changed)

    @property
    def desk(self) -> PictureDesk:
        """The reader of pictures, made when the first one is there."""
        if self._desk is None:
            from app.chat.pictures.desk import PictureDesk  # late: many chats have no picture

            self._desk = PictureDesk(self._session.library.pictures, self)
        return self._desk

    def close(self) -> None:
        """End all reading."""
        if self._desk is not None:
            self._desk.close()

    @property
    def sees(self) -> bool:
        """Whether the loaded model may see pictures."""
        return sees(self._client.model)

    def path(self, picture: ChatPicture) -> Path:
        """Return where a picture of the open chat is."""
        return self._session.library.pictures.path(self._session.current, picture)

    def show(
        self, picture: ChatPicture, side: int, then: Callable[[QImage | EngineError], None]
    ) -> None:
        """Call `then` with a picture of the open chat whose sides have at most `side` pixels."""
        self.desk.show(self.path(picture), side, picture.title, then)

    def copy(self, picture: ChatPicture) -> None:
        """Put a picture on the clipboard."""

        def take(found: QImage | EngineError) -> None:
            if isinstance(found, QImage):
                QApplication.clipboard().setImage(found)
            else:
                self._tell(found)

        self.show(picture, MOST_SIDE, take)

    def n_tokens(self, picture: ChatPicture) -> int | None:
        """Return the tokens of a picture for the loaded model; None where that is unknown."""
        model = self._client.model
        if model is None or model.sight is None:
            return None
        try:
            return model.sight.n_tokens(picture.width, picture.height)
        except engine.TooNarrow:
            return None

    def caption(self, picture: ChatPicture) -> str:
        """Return what stands below a picture: "1024 x 768, 391 tokens"."""
        if (n := self.n_tokens(picture)) is not None:
            return f"{picture.size}, {tr_n('{n} token', '{n} tokens', n)}"
        if self._client.model is not None and not sees(self._client.model):
            return tr("{size}, not seen by this model").format(size=picture.size)
        return picture.size

    def enlarge(self, pictures: Sequence[ChatPicture], at: int) -> None:
        """Ask for pictures to be shown large, one at a time, beginning with one of them."""
        self.enlarged.emit(pictures, at)

    def save_as(self, picture: ChatPicture, target: Path) -> None:
        """Write a picture's file to another place; a notice tells why that failed."""
        self.desk.run(partial(_copy, self.path(picture), target), self._tell)

    def _tell(self, error: EngineError | None) -> None:
        if error is not None:
            self.noticed.emit(Notice.of(error))


def _copy(source: Path, target: Path) -> None:
    with atomic_write(target) as file:
        file.write(source.read_bytes())
