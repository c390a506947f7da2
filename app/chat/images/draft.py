"""The images attached to drafts."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

from PySide6.QtCore import QObject, Signal, Slot
from PySide6.QtWidgets import QApplication, QInputDialog, QWidget

import engine  # names used only in this module load on first access
from app.chat.conversation import Conversation
from app.chat.images.album import ImageAlbum
from app.chat.images.files import reads_images
from app.chat.message import MAX_IMAGE_NAME, ChatImage
from app.chat.session import ChatSession
from app.core.engine_client import EngineClient
from app.core.notice import Notice
from app.core.translation import tr, tr_n
from engine import EngineError, one_line

if TYPE_CHECKING:
    from PySide6.QtGui import QImage

PASTED: Final = "pasted.png"
"""Name given to an image from the clipboard."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    key: str
    chat: Conversation
    name: str
    more: str


class DraftImages(QObject):
    """The images in each chat's draft; once loaded, they are stored in the chat."""

    noticed = Signal(object)  # Notice
    changed = Signal()

    def __init__(
        self, session: ChatSession, client: EngineClient, album: ImageAlbum, parent: QObject
    ) -> None:
        super().__init__(parent)
        self._session, self._client, self._album = session, client, album
        self._waiting: dict[str, _Waiting] = {}
        self._numbers = count()
        album.changed.connect(self.changed)
        session.deleted.connect(self._forget)

    @property
    def pictures(self) -> tuple[ChatImage, ...]:
        """The loaded images in the open chat's draft."""
        return self._session.current.draft_pictures

    @property
    def n_tokens(self) -> int:
        """Number of tokens in `pictures`, not counting images whose token count is unknown."""
        return sum(self._album.n_tokens(picture) or 0 for picture in self.pictures)

    def add_files(self, paths: Sequence[Path]) -> None:
        """Add image files, up to the chat's limit."""
        for path in paths[: self._room(len(paths))]:
            self._add(path, path.name)

    def add_pasted(self, source: bytes | QImage) -> None:
        """Add an image from the clipboard."""
        if self._room(1):
            self._add(source, PASTED)

    def add_pages(self, path: Path) -> None:
        """Add the pages of a PDF, up to the chat's limit."""
        if self._room(1):
            self._add_page(self._session.current, path, 1)

    def ready(self) -> tuple[ChatImage, ...] | None:
        """Return the images to send; if they cannot be sent, show a notice and return None."""
        if waiting := self._waiting_here():
            name = one_line(waiting[0].name, MAX_IMAGE_NAME)
            text = tr("{name} is still being read.").format(name=name)
            self.noticed.emit(Notice(text, tr("Send again in a moment.")))
            return None
        if self.pictures and self._lacks_vision:
            self._warn_no_vision()
            return None
        return self.pictures

    def clear(self) -> None:
        """Clear the images in the open chat's draft after sending."""
        if self.pictures:
            self._session.set_draft_pictures(())

    def chips(self) -> list[QWidget]:
        """Create chips for the open chat's draft."""
        if not self.pictures and not self._waiting_here():
            return []
        from app.chat.views.chips import ImageChip, WaitingChip  # late: rarely needed

        made = list[QWidget]()
        for group in _groups(self.pictures):
            chip = ImageChip(group, self._album, is_refused=self._lacks_vision)
            chip.removed.connect(self._remove)
            chip.pages_wanted.connect(self._choose_pages)
            made.append(chip)
        for one in self._waiting_here():
            waiting = WaitingChip(one.key, one.name, one.more)
            waiting.removed.connect(self._stop)
            made.append(waiting)
        return made

    def close(self) -> None:
        """Cancel all reading."""
        self._waiting.clear()
        self._album.close()

    @property
    def _lacks_vision(self) -> bool:
        return self._client.model is not None and not reads_images(self._client.model)

    def _waiting_here(self) -> list[_Waiting]:
        return [one for one in self._waiting.values() if one.chat is self._session.current]

    def _n_left(self, chat: Conversation) -> int:
        used = sum(len(message.pictures) for message in chat.messages) + len(chat.draft_pictures)
        return engine.MAX_IMAGES - used

    def _room(self, n: int) -> int:
        room = max(0, self._n_left(self._session.current) - len(self._waiting_here()))
        if n > room:
            text = tr("A chat can have at most {n} images.").format(n=engine.MAX_IMAGES)
            self.noticed.emit(Notice(text, kind="warning"))
        return min(n, room)

    def _add(self, source: Path | bytes | QImage, name: str) -> None:
        chat = self._session.current
        key = self._wait(chat, name, tr("reading…"))
        self._album.reader.add(chat.id, source, name, partial(self._take, key))
        self.changed.emit()

    def _add_page(self, chat: Conversation, path: Path, number: int, n_pages: int = 0) -> None:
        more = tr("page {n} of {total}").format(n=number, total=n_pages) if n_pages else ""
        key = self._wait(chat, path.name, more or tr("reading…"))
        self._album.reader.add_page(chat.id, path, number, partial(self._take_page, key, path))
        self.changed.emit()

    def _wait(self, chat: Conversation, name: str, more: str) -> str:
        key = f"picture-{next(self._numbers)}"
        self._waiting[key] = _Waiting(key, chat, name, more)
        return key

    def _take(self, key: str, found: ChatImage | EngineError) -> None:
        if (waiting := self._waiting.pop(key, None)) is None:
            return  # it has been removed
        if isinstance(found, EngineError):
            self.noticed.emit(Notice.of(found))
        else:
            self._keep(waiting.chat, found)
        self.changed.emit()

    def _take_page(self, key: str, path: Path, found: tuple[ChatImage, int] | EngineError) -> None:
        if (waiting := self._waiting.pop(key, None)) is None:
            return
        if isinstance(found, EngineError):
            self.noticed.emit(Notice.of(found))
            self.changed.emit()
            return
        (picture, n_pages), chat = found, waiting.chat
        self._keep(chat, picture)
        if picture.page == n_pages:
            self.changed.emit()
        elif self._n_left(chat) > 0:
            self._add_page(chat, path, picture.page + 1, n_pages)
        else:
            text = tr("{name} has {n} pages; the first {most} are attached.").format(
                name=one_line(path.name, MAX_IMAGE_NAME), n=n_pages, most=picture.page
            )
            hint = tr("A chat can have at most {n} images.").format(n=engine.MAX_IMAGES)
            self.noticed.emit(Notice(text, hint))
            self.changed.emit()

    def _keep(self, chat: Conversation, picture: ChatImage) -> None:
        if picture not in chat.draft_pictures:
            self._session.set_draft_pictures((*chat.draft_pictures, picture), chat)
        if self._lacks_vision and chat is self._session.current:
            self._warn_no_vision()

    def _warn_no_vision(self) -> None:
        assert self._client.model is not None
        text = tr("{model} cannot read images: no mmproj file is loaded with it.").format(
            model=one_line(self._client.model.info.name, MAX_IMAGE_NAME)
        )
        hint = tr("Put the model's mmproj file into the same folder and reload the model.")
        n = len(self.pictures)
        take_away = tr_n("Remove the image", "Remove the images", n)
        remove = partial(self._remove, self.pictures)
        chat = self._session.current.id
        self.noticed.emit(Notice(text, hint, "warning", take_away, remove, chat=chat))

    @Slot(object)
    def _remove(self, pictures: Sequence[ChatImage]) -> None:
        kept = tuple(picture for picture in self.pictures if picture not in pictures)
        self._session.set_draft_pictures(kept)
        self.changed.emit()

    @Slot(object)
    def _choose_pages(self, pictures: Sequence[ChatImage]) -> None:
        first, last = pictures[0].page, pictures[-1].page
        title = tr("Choose pages of {name}").format(name=one_line(pictures[0].name, MAX_IMAGE_NAME))
        label = tr("Pages, for example 1-3, 7:")
        over = QApplication.activeWindow()
        text, is_wanted = QInputDialog.getText(over, title, label, text=f"{first}-{last}")
        if is_wanted:
            self.keep_pages(pictures, pages_in(text))

    def keep_pages(self, pictures: Sequence[ChatImage], pages: Container[int]) -> None:
        """Remove a document's images except those of `pages`, unless none would be left."""
        others = [picture for picture in pictures if picture.page not in pages]
        if len(others) < len(pictures):
            self._remove(others)
        else:
            text = tr("The document has no pages with these numbers.")
            self.noticed.emit(Notice(text, kind="warning"))

    @Slot(str)
    def _stop(self, key: str) -> None:
        self._waiting.pop(key, None)
        self.changed.emit()

    @Slot(str)
    def _forget(self, chat_id: str) -> None:
        for one in [one for one in self._waiting.values() if one.chat.id == chat_id]:
            del self._waiting[one.key]


def pages_in(text: str) -> set[int]:
    """Return the page numbers given by a text such as "1-3, 7"."""
    found = set[int]()
    for first, last in re.findall(r"(\d{1,5})(?:\s*[-–]\s*(\d{1,5}))?", text):
        found.update(range(int(first), int(last or first) + 1))
    return found


def _groups(pictures: Sequence[ChatImage]) -> list[tuple[ChatImage, ...]]:
    def key(one: tuple[int, ChatImage]) -> tuple[str, int]:
        number, picture = one
        return picture.name, 0 if picture.page else number + 1

    grouped = groupby(enumerate(pictures), key)
    return [tuple(picture for _, picture in group) for _, group in grouped]
