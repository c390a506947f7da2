"""Images for message views: their captions, and their export along with a chat."""

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

import engine  # names used only in this module load on first access
from app.chat.images.files import reads_images
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
"""Maximum side length of an image in the viewer or on the clipboard, in pixels."""


class ImageAlbum(QObject):
    """The open chat's images, with captions for the loaded model."""

    noticed = Signal(object)  # Notice
    changed = Signal()  # the model, and thus the captions
    enlarged = Signal(object, int)  # images for the viewer, index of the one to show first

    def __init__(self, session: ChatSession, client: EngineClient, parent: QObject) -> None:
        super().__init__(parent)
        self._session, self._client = session, client
        self._reader: ChatImageReader | None = None
        for change in (client.loaded, client.unloaded, client.lost):
            change.connect(self.changed)

    @property
    def reader(self) -> ChatImageReader:
        """The image reader, created on first use."""
        if self._reader is None:
            from app.chat.images.child import ChatImageReader  # late: many chats have no images

            self._reader = ChatImageReader(self._session.library.store.images, self)
        return self._reader

    def close(self) -> None:
        """Stop the reader."""
        if self._reader is not None:
            self._reader.close()

    @property
    def reads_images(self) -> bool:
        """Whether the loaded model may be able to read images."""
        return reads_images(self._client.model)

    def path(self, picture: ChatImage) -> Path:
        """Return the path of an image in the open chat."""
        return self._session.library.store.images.path(self._session.current, picture)

    def show(
        self, picture: ChatImage, side: int, then: Callable[[QImage | EngineError], None]
    ) -> None:
        """Call `then` with an image in the open chat, scaled down to `side` pixels."""
        self.reader.show(self.path(picture), side, picture.title, then)

    def copy(self, picture: ChatImage) -> None:
        """Copy an image to the clipboard."""

        def take(found: QImage | EngineError) -> None:
            if isinstance(found, QImage):
                QApplication.clipboard().setImage(found)
            else:
                self._report(found)

        self.show(picture, MAX_SIDE, take)

    def n_tokens(self, picture: ChatImage) -> int | None:
        """Return how many tokens the loaded model needs for an image; None if unknown."""
        model = self._client.model
        if model is None or model.vision is None:
            return None
        try:
            return model.vision.n_tokens(picture.width, picture.height)
        except engine.TooNarrow:
            return None

    def caption(self, picture: ChatImage) -> str:
        """Return an image's caption, such as "1024 x 768, 391 tokens"."""
        if (n := self.n_tokens(picture)) is not None:
            return f"{picture.size}, {tr_n('{n} token', '{n} tokens', n)}"
        if self._client.model is not None and not reads_images(self._client.model):
            return tr("{size}, ignored by this model").format(size=picture.size)
        return picture.size

    def enlarge(self, pictures: Sequence[ChatImage], at: int) -> None:
        """Request the image viewer, starting with image `at`."""
        self.enlarged.emit(pictures, at)

    def save_as(self, picture: ChatImage, target: Path) -> None:
        """Copy an image file to `target`; a notice reports failure."""
        self.reader.run(partial(_copy, self.path(picture), target), self._report)

    def _report(self, error: EngineError | None) -> None:
        if error is not None:
            self.noticed.emit(Notice.of(error))


def _copy(source: Path, target: Path) -> None:
    with atomic_write(target) as file:
        file.write(source.read_bytes())


PathOf = Callable[[ChatImage], Path]
"""Function that returns the path of an image, whether or not the file exists."""

NAME: Final = "picture_files"
"""JSON key for an exported chat's images, which are stored as base64 by file name."""

TYPES: Final = {
    ".png": "image/png", ".jpg": "image/jpeg", ".webp": "image/webp", ".gif": "image/gif",
    ".bmp": "image/bmp",
}  # fmt: skip


def nowhere(_: ChatImage) -> Path:
    """Return a path where no image exists."""
    return Path()


def image_files(chat: Conversation, path_of: PathOf) -> dict[str, str]:
    """Return a chat's existing image files as base64 by name (raises OSError)."""
    files = {picture.file: path_of(picture) for picture in chat.all_images()}
    return {
        name: b64encode(path.read_bytes()).decode("ascii")
        for name, path in files.items()
        if path.is_file()
    }


def take_files(chat: Conversation, files: object, folder: ImageFolder) -> None:
    """Store an imported chat's images (raises OSError).

    Args:
        files: result of `image_files`, not yet validated.
    """
    wanted = {picture.file for picture in chat.all_images()}
    for name, text in files.items() if isinstance(files, Mapping) else ():
        if name not in wanted or not isinstance(text, str):
            continue
        try:
            made, had = folder.put(chat.id, b64decode(text, validate=True))
        except ValueError:  # not an image
            continue
        if made != name and not had:
            folder.remove(chat.id, made)


def in_html(picture: ChatImage, path_of: PathOf) -> str:
    """Return an image as HTML with a data URL (raises OSError)."""
    path, title = path_of(picture), escape(picture.title)
    if not path.is_file():
        return f"<p>[{title}]</p>"
    data = b64encode(path.read_bytes()).decode("ascii")
    return f'<p><img alt="{title}" src="data:{TYPES[path.suffix]};base64,{data}"></p>'


def in_markdown(picture: ChatImage, beside: str) -> str:
    """Return Markdown for an image in folder `beside`, or only its title if `beside` is ""."""
    title = "".join(c for c in picture.title if c not in "[]\\")
    return f"![{title}]({quote(beside)}/{picture.file})" if beside else f"[{title}]"


def write_beside(chat: Conversation, path_of: PathOf, folder: Path) -> None:
    """Write the images of the messages on screen into a folder (raises OSError)."""
    shown = {picture.file: picture for message in chat.messages for picture in message.pictures}
    for name, picture in shown.items():
        if (path := path_of(picture)).is_file():
            folder.mkdir(exist_ok=True)
            write_for_others(folder / name, path.read_bytes())


def write_for_others(path: Path, data: bytes) -> None:
    """Write a file atomically, with default permissions because it is meant for sharing."""
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
