"""The image decoder's child process, and the reader that uses it on a thread."""

from __future__ import annotations

import logging
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from PySide6.QtCore import QBuffer, QObject
from PySide6.QtGui import QImage

import engine  # names used only in this module load on first access
from app.chat.images.program import MAX_MEMORY, MAX_SECONDS
from app.chat.message import MAX_IMAGE_NAME, ChatImage
from app.core.background import KeptChild, KeyedJobs
from app.core.translation import reason_of, tr
from engine import EngineError, image_bytes, one_line, program_command

if TYPE_CHECKING:
    from app.chat.images.files import ImageFolder

log = logging.getLogger(__name__)

COMMAND: Final = program_command("app.chat.images.program")


class ImageChild:
    """An image decoder in a child process that starts on demand; used by one thread at a time."""

    def __init__(self) -> None:
        self._child = KeptChild(COMMAND)

    def size(self, path: Path, name: str) -> tuple[int, int]:
        """Return an image's width and height, after decoding all of it.

        Raises:
            EngineError: it is unusable; the error message calls it `name`.
        """
        width, height = self._ask({"picture": str(path.absolute()), "side": 0}, name)["size"]
        return width, height

    def image(self, path: Path, side: int, name: str) -> QImage:
        """Return an image scaled down to `side` pixels (raises EngineError)."""
        answer = self._ask({"picture": str(path.absolute()), "side": side}, name)
        width, height = answer["shown"]
        pixels = b64decode(answer["pixels"])
        return QImage(pixels, width, height, 3 * width, QImage.Format.Format_RGB888).copy()

    def page(self, path: Path, number: int) -> tuple[bytes, int]:
        """Return a PDF page as a PNG file, and the number of pages (raises EngineError)."""
        answer = self._ask({"pdf": str(path.absolute()), "page": number}, path.name)
        return b64decode(answer["png"]), int(answer["n_pages"])

    def kill(self) -> None:
        """Kill the child and do not restart it. Thread-safe."""
        self._child.kill()

    def close(self) -> None:
        """Stop the child and close its pipes."""
        self._child.close()

    def _ask(self, request: Mapping[str, object], name: str) -> dict[str, Any]:
        try:
            answer = self._child.ask(request, MAX_MEMORY, MAX_SECONDS)
        except (engine.ChildEnded, OSError) as error:
            log.info("%s cannot be read: %s", one_line(name, MAX_IMAGE_NAME), error)
            raise refusal({"problem": "excess"}, name) from None
        if "problem" in answer:
            raise refusal(answer, name)
        return answer


def refusal(answer: Mapping[str, Any], name: str) -> EngineError:
    """Return the error for a problem that the child reported."""
    million, hint = 1_000_000, ""
    kind = answer["problem"]
    texts = {
        "none": tr("{name} is not an image that models can read."),
        "damaged": tr("{name} is damaged and cannot be opened."),
        "large": tr("{name} has {n} megapixels; the limit is {most}."),
        "bytes": tr("{name} is larger than 32 MiB, the limit for images."),
        "excess": tr("{name} cannot be read: it takes too much time or memory."),
        "unreadable": tr("{name} cannot be read: {why}."),
        "locked": tr("{name} is password-protected. Attach a copy without a password."),
        "no-pdf": tr("{name} is not a readable PDF."),
    }
    if kind == "none":
        hint = tr("PNG, JPEG, WebP, GIF and BMP files can be attached.")
    elif kind in ("large", "bytes", "excess"):
        hint = tr("Attach a smaller copy, or crop it to the relevant part.")
    text = texts[kind].format(
        name=one_line(name, MAX_IMAGE_NAME), why=answer.get("why", ""),
        n=answer.get("n_pixels", 0) // million, most=engine.MAX_PIXELS // million,
    )  # fmt: skip
    return EngineError(text, hint)


MAX_KEPT: Final = 64 << 20
"""Maximum size in bytes of the cache for decoded images."""

T = TypeVar("T")

Then = Callable[[T | EngineError], None]


class ChatImageReader(QObject):
    """Reader and cache for the images in chats, with a thread and a child process."""

    def __init__(self, folder: ImageFolder, parent: QObject) -> None:
        super().__init__(parent)
        self._folder = folder
        self._jobs = KeyedJobs("tandem-pictures", self)
        self._numbers = count()
        self._child = ImageChild()
        self._kept: OrderedDict[tuple[str, int], QImage] = OrderedDict()

    def add(
        self, chat_id: str, source: Path | bytes | QImage, name: str, then: Then[ChatImage]
    ) -> None:
        """Store an image for a chat: a file, a file's bytes, or an image from the clipboard."""
        self.run(lambda: self._add(chat_id, source, name), then)

    def add_page(
        self, chat_id: str, path: Path, number: int, then: Then[tuple[ChatImage, int]]
    ) -> None:
        """Store a PDF page as an image; `then` also gets the number of pages."""
        self.run(lambda: self._add_page(chat_id, path, number), then)

    def show(self, path: Path, side: int, name: str, then: Then[QImage]) -> None:
        """Call `then` with an image scaled down to `side` pixels; errors call the image `name`."""
        if (known := self._kept.get((str(path), side))) is not None:
            self._kept.move_to_end((str(path), side))
            then(known)
            return

        def keep(found: QImage | EngineError) -> None:
            if isinstance(found, QImage):
                self._keep(path, side, found)
            then(found)

        self.run(lambda: self._child.image(path, side, name), keep)

    def run(self, work: Callable[[], T], then: Then[T]) -> None:
        """Call `work` on the thread, and `then` with its result."""
        found: list[T] = []

        def report(error: Exception | None) -> None:
            if found:
                then(found[0])
            elif isinstance(error, EngineError):
                then(error)
            elif error is not None:
                log.error("an image could not be stored", exc_info=error)
                text = tr("The image could not be stored: {why}.")
                then(EngineError(text.format(why=reason_of(error))))

        self._jobs.run(str(next(self._numbers)), lambda: found.append(work()), report)

    def close(self) -> None:
        """Kill the child and stop the thread."""
        self._child.kill()
        self._jobs.close()
        self._child.close()

    def _keep(self, path: Path, side: int, image: QImage) -> None:
        self._kept[str(path), side] = image
        while len(self._kept) > 1 and sum(i.sizeInBytes() for i in self._kept.values()) > MAX_KEPT:
            self._kept.popitem(last=False)

    # on the thread

    def _add(self, chat_id: str, source: Path | bytes | QImage, name: str) -> ChatImage:
        if isinstance(source, Path):
            self._child.size(source, name)  # do not copy an unusable file
            source = image_bytes(source)
        data = _png(source) if isinstance(source, QImage) else source
        return self._put(chat_id, data, name)

    def _add_page(self, chat_id: str, path: Path, number: int) -> tuple[ChatImage, int]:
        data, n_pages = self._child.page(path, number)
        return self._put(chat_id, data, path.name, number), n_pages

    def _put(self, chat_id: str, data: bytes, name: str, page: int = 0) -> ChatImage:
        try:
            file, had = self._folder.put(chat_id, data)
        except ValueError:
            raise refusal({"problem": "none"}, name) from None
        try:
            width, height = self._child.size(self._folder.own_path(chat_id, file), name)
        except EngineError:
            if not had:  # otherwise, a message may refer to it
                self._folder.remove(chat_id, file)
            raise
        return ChatImage(name, file, width, height, page)


def _png(image: QImage) -> bytes:
    buffer = QBuffer()
    buffer.open(QBuffer.OpenModeFlag.WriteOnly)
    image.save(buffer, "PNG")  # type: ignore[call-overload]  # the stub lacks devices
    return bytes(buffer.data().data())
