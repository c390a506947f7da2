"""The pictures of a chat's questions on paper, as large as they fit."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QSizeF, Qt, QUrl
from PySide6.QtGui import QTextCursor, QTextDocument, QTextImageFormat

from app.chat.pictures.child import PictureChild
from app.chat.pictures.picture import ChatPicture
from app.chat.pictures.sharing import PathOf
from engine import EngineError

MOST_SIDE: Final = 1600
"""Longest side of a picture in the file, in pixels."""

BOX: Final = QSizeF(420.0, 320.0)
"""Largest size on paper, in units of a document, of which an inch has 96."""


class PaperPictures:
    """Puts pictures into one document; used on one thread.

    Args:
        path_of: returns where a picture is.
    """

    def __init__(self, document: QTextDocument, path_of: PathOf) -> None:
        self._document, self._path_of = document, path_of
        self._child = PictureChild()

    def insert(self, cursor: QTextCursor, picture: ChatPicture) -> bool:
        """Insert a picture; return whether there is one."""
        path = self._path_of(picture)
        try:
            image = self._child.image(path, MOST_SIDE, picture.name)
        except EngineError:  # it is gone
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
        """End the child that reads."""
        self._child.close()
