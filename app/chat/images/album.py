"""What the views of messages ask about pictures: their pixels, and what stands below them."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from stat import S_IMODE
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from PySide6.QtCore import QObject, Signal
from PySide6.QtGui import QImage
from PySide6.QtWidgets import QApplication

import engine  # for names that are resolved when they are used
from app.chat.images.files import sees
from app.chat.message import ChatImage
from app.chat.session import ChatSession
from app.core.engine_client import EngineClient
from app.core.notice import Notice
from app.core.translation import tr, tr_n
from engine import EngineError, atomic_write

if TYPE_CHECKING:
    from app.chat.conversation import Conversation
    from app.chat.images.child import ChatImageReader
    from app.chat.images.files import ImageFolder

MAX_SIDE: Final = 4096
"""Longest side of a picture that is shown large or copied, in pixels; saved is all of it."""


class ImageAlbum(QObject):
    """The pictures of the open chat, as the loaded model sees them."""

    noticed = Signal(object)  # Notice
    changed = Signal()  # another model is loaded, so that captions differ
    enlarged = Signal(object, int)  # pictures that are wanted large, number of the first one

    def __init__(self, session: ChatSession, client: EngineClient, parent: QObject) -> None:
        super().__init__(parent)
        self._session, self._client = session, client
        self._desk: ChatImageReader | None = None
        for change in (client.loaded, client.unloaded, client.lost):
            change.connect(self.changed)

    @property
    def desk(self) -> ChatImageReader:
        """The reader of pictures, made when the first one is there."""
        if self._desk is None:
            from app.chat.images.child import ChatImageReader  # late: many chats have no picture

            self._desk = ChatImageReader(self._session.library.pictures, self)
        return self._desk

    def close(self) -> None:
        """End all reading."""
        if self._desk is not None:
            self._desk.close()

    @property
    def sees(self) -> bool:
        """Whether the loaded model may see pictures."""
        return sees(self._client.model)

    def path(self, picture: ChatImage) -> Path:
        """Return where a picture of the open chat is."""
        return self._session.library.pictures.path(self._session.current, picture)

    def show(
        self, picture: ChatImage, side: int, then: Callable[[QImage | EngineError], None]
    ) -> None:
        """Call `then` with a picture of the open chat whose sides have at most `side` pixels."""
        self.desk.show(self.path(picture), side, picture.title, then)

    def copy(self, picture: ChatImage) -> None:
        """Put a picture on the clipboard."""

        def take(found: QImage | EngineError) -> None:
            if isinstance(found, QImage):
                QApplication.clipboard().setImage(found)
            else:
                self._tell(found)

        self.show(picture, MAX_SIDE, take)

    def n_tokens(self, picture: ChatImage) -> int | None:
        """Return the tokens of a picture for the loaded model; None where that is unknown."""
        model = self._client.model
        if model is None or model.vision is None:
            return None
        try:
            return model.vision.n_tokens(picture.width, picture.height)
        except engine.TooNarrow:
            return None

    def caption(self, picture: ChatImage) -> str:
        """Return what stands below a picture: "1024 x 768, 391 tokens"."""
        if (n := self.n_tokens(picture)) is not None:
            return f"{picture.size}, {tr_n('{n} token', '{n} tokens', n)}"
        if self._client.model is not None and not sees(self._client.model):
            return tr("{size}, not seen by this model").format(size=picture.size)
        return picture.size

    def enlarge(self, pictures: Sequence[ChatImage], at: int) -> None:
        """Ask for pictures to be shown large, one at a time, beginning with one of them."""
        self.enlarged.emit(pictures, at)

    def save_as(self, picture: ChatImage, target: Path) -> None:
        """Write a picture's file to another place; a notice tells why that failed."""
        self.desk.run(partial(_copy, self.path(picture), target), self._tell)

    def _tell(self, error: EngineError | None) -> None:
        if error is not None:
            self.noticed.emit(Notice.of(error))


def _copy(source: Path, target: Path) -> None:
    with atomic_write(target) as file:
        file.write(source.read_bytes())


PathOf = Callable[[ChatImage], Path]
"""Function that returns where a picture is, whether or not there is such a file."""

NAME: Final = "picture_files"
"""Name in an exported chat's JSON of the pictures: their files by name, as base64."""

TYPES: Final = {
    ".png": "image/png", ".jpg": "image/jpeg", ".webp": "image/webp", ".gif": "image/gif",
    ".bmp": "image/bmp",
}  # fmt: skip


def nowhere(_: ChatImage) -> Path:
    """Return a path where no picture is."""
    return Path()


def picture_files(chat: Conversation, path_of: PathOf) -> dict[str, str]:
    """Return the files of a chat's pictures by name, as base64; those that are gone are left out.

    Raises:
        OSError: one cannot be read.
    """
    files = {picture.file: path_of(picture) for picture in chat.all_pictures()}
    return {
        name: b64encode(path.read_bytes()).decode("ascii")
        for name, path in files.items()
        if path.is_file()
    }


def take_files(chat: Conversation, files: object, folder: ImageFolder) -> None:
    """Keep the pictures of an imported chat.

    Args:
        files: what `picture_files` has returned, or anything that a stranger has written there.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    wanted = {picture.file for picture in chat.all_pictures()}
    for name, text in files.items() if isinstance(files, Mapping) else ():
        if name not in wanted or not isinstance(text, str):
            continue
        try:
            made, had = folder.put(chat.id, b64decode(text, validate=True))
        except ValueError:  # no picture
            continue
        if made != name and not had:
            folder.remove(chat.id, made)


def in_html(picture: ChatImage, path_of: PathOf) -> str:
    """Return a picture as HTML that has all of it.

    Raises:
        OSError: it cannot be read.
    """
    path, title = path_of(picture), escape(picture.title)
    if not path.is_file():
        return f"<p>[{title}]</p>"
    data = b64encode(path.read_bytes()).decode("ascii")
    return f'<p><img alt="{title}" src="data:{TYPES[path.suffix]};base64,{data}"></p>'


def in_markdown(picture: ChatImage, beside: str) -> str:
    """Return a picture as Markdown.

    Args:
        beside: name of the folder in which its file is; "" for none.
    """
    title = "".join(c for c in picture.title if c not in "[]\\")
    return f"![{title}]({quote(beside)}/{picture.file})" if beside else f"[{title}]"


def write_beside(chat: Conversation, path_of: PathOf, folder: Path) -> None:
    """Write the pictures that a chat shows into a folder.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    shown = {picture.file: picture for message in chat.messages for picture in message.pictures}
    for name, picture in shown.items():
        if (path := path_of(picture)).is_file():
            folder.mkdir(exist_ok=True)
            write_for_others(folder / name, path.read_bytes())


def write_for_others(path: Path, data: bytes) -> None:
    """Write a file as a whole, with the permissions that new files have: it is to be passed on.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    is_new = not path.exists()
    if is_new:
        path.touch()
    try:
        mode = S_IMODE(path.stat().st_mode)
        with atomic_write(path) as file:
            file.write(data)
        path.chmod(mode)
    except BaseException:
        if is_new:
            path.unlink(missing_ok=True)
        raise
