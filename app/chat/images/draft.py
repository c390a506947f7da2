"""The pictures of the message that is being written: added, read, counted and taken away."""

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

import engine  # for names that are resolved when they are used
from app.chat.conversation import Conversation
from app.chat.images.album import ImageAlbum
from app.chat.images.files import sees
from app.chat.message import MAX_IMAGE_NAME, ChatImage
from app.chat.session import ChatSession
from app.core.engine_client import EngineClient
from app.core.notice import Notice
from app.core.translation import tr, tr_n
from engine import EngineError, one_line

if TYPE_CHECKING:
    from PySide6.QtGui import QImage

PASTED: Final = "pasted.png"
"""Name of a picture that comes without one."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A picture, or the next page of a document, that is being read.

    Attributes:
        more: how far it is.
    """

    key: str
    chat: Conversation
    name: str
    more: str


class DraftImages(QObject):
    """The pictures of the drafts, each chat's own; the chats keep those that are read."""

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
        """The pictures of the open chat's draft that are read."""
        return self._session.current.draft_pictures

    @property
    def n_tokens(self) -> int:
        """Number of tokens of those of the open chat, as far as it is known."""
        return sum(self._album.n_tokens(picture) or 0 for picture in self.pictures)

    def add_files(self, paths: Sequence[Path]) -> None:
        """Add the pictures of files, as many as a chat may have."""
        for path in paths[: self._room(len(paths))]:
            self._add(path, path.name)

    def add_pasted(self, source: bytes | QImage) -> None:
        """Add a picture of the clipboard."""
        if self._room(1):
            self._add(source, PASTED)

    def add_pages(self, path: Path) -> None:
        """Add the pages of a document, as many as a chat may have."""
        if self._room(1):
            self._add_page(self._session.current, path, 1)

    def ready(self) -> tuple[ChatImage, ...] | None:
        """Return the pictures to send now; None, and say why, if that is not possible."""
        if waiting := self._waiting_here():
            name = one_line(waiting[0].name, MAX_IMAGE_NAME)
            text = tr("{name} is still being read.").format(name=name)
            self.noticed.emit(Notice(text, tr("Send again in a moment.")))
            return None
        if self.pictures and self._client.model is not None and not sees(self._client.model):
            self._tell_blind()
            return None
        return self.pictures

    def clear(self) -> None:
        """Forget the pictures of the open chat's draft, which were sent."""
        if self.pictures:
            self._session.set_draft_pictures(())

    def chips(self) -> list[QWidget]:
        """Return new chips of the open chat's draft."""
        if not self.pictures and not self._waiting_here():
            return []
        from app.chat.views.chips import ImageChip, WaitingChip  # late: seldom wanted

        model, made = self._client.model, list[QWidget]()
        is_refused = model is not None and not sees(self._client.model)
        for group in _groups(self.pictures):
            chip = ImageChip(group, self._album, is_refused=is_refused)
            chip.removed.connect(self._remove)
            chip.pages_wanted.connect(self._choose_pages)
            made.append(chip)
        for one in self._waiting_here():
            waiting = WaitingChip(one.key, one.name, one.more)
            waiting.removed.connect(self._stop)
            made.append(waiting)
        return made

    def close(self) -> None:
        """End the reading."""
        self._waiting.clear()
        self._album.close()

    # inside

    def _waiting_here(self) -> list[_Waiting]:
        return [one for one in self._waiting.values() if one.chat is self._session.current]

    def _n_left(self, chat: Conversation) -> int:
        used = sum(len(message.pictures) for message in chat.messages) + len(chat.draft_pictures)
        return engine.MAX_IMAGES - used

    def _room(self, n: int) -> int:
        """Return how many of n pictures the open chat may have; say so if they are fewer."""
        room = max(0, self._n_left(self._session.current) - len(self._waiting_here()))
        if n > room:
            text = tr("A chat takes at most {n} pictures.").format(n=engine.MAX_IMAGES)
            self.noticed.emit(Notice(text, kind="warning"))
        return min(n, room)

    def _add(self, source: Path | bytes | QImage, name: str) -> None:
        chat = self._session.current
        key = self._wait(chat, name, tr("reading…"))
        self._album.desk.add(chat.id, source, name, partial(self._take, key))
        self.changed.emit()

    def _add_page(self, chat: Conversation, path: Path, number: int, n_pages: int = 0) -> None:
        more = tr("page {n} of {total}").format(n=number, total=n_pages) if n_pages else ""
        key = self._wait(chat, path.name, more or tr("reading…"))
        self._album.desk.add_page(chat.id, path, number, partial(self._take_page, key, path))
        self.changed.emit()

    def _wait(self, chat: Conversation, name: str, more: str) -> str:
        key = f"picture-{next(self._numbers)}"
        self._waiting[key] = _Waiting(key, chat, name, more)
        return key

    def _take(self, key: str, found: ChatImage | EngineError) -> None:
        if (waiting := self._waiting.pop(key, None)) is None:
            return  # it was taken away meanwhile
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
            text = tr("{name} has {n} pages; the first {most} go with the message.").format(
                name=one_line(path.name, MAX_IMAGE_NAME), n=n_pages, most=picture.page
            )
            hint = tr("A chat takes at most {n} pictures.").format(n=engine.MAX_IMAGES)
            self.noticed.emit(Notice(text, hint))
            self.changed.emit()

    def _keep(self, chat: Conversation, picture: ChatImage) -> None:
        if picture not in chat.draft_pictures:
            self._session.set_draft_pictures((*chat.draft_pictures, picture), chat)
        model = self._client.model
        if model is not None and not sees(self._client.model) and chat is self._session.current:
            self._tell_blind()

    def _tell_blind(self) -> None:
        """Say that the model cannot see, what helps, and offer to go on without pictures."""
        assert self._client.model is not None
        text = tr("{model} cannot see pictures: no mmproj file is loaded with it.").format(
            model=one_line(self._client.model.info.name, MAX_IMAGE_NAME)
        )
        hint = tr("Put the mmproj file published with the model beside it, and load it again.")
        n = len(self.pictures)
        take_away = tr_n("Remove the picture", "Remove the pictures", n)
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
        """Ask which pages of a document go with the message."""
        first, last = pictures[0].page, pictures[-1].page
        title = tr("Choose pages of {name}").format(name=one_line(pictures[0].name, MAX_IMAGE_NAME))
        label = tr("Pages, such as 1-3, 7:")
        over = QApplication.activeWindow()
        text, is_wanted = QInputDialog.getText(over, title, label, text=f"{first}-{last}")
        if is_wanted:
            self.keep_pages(pictures, pages_in(text))

    def keep_pages(self, pictures: Sequence[ChatImage], pages: Container[int]) -> None:
        """Take away the pictures of a document's other pages, unless none would be left."""
        others = [picture for picture in pictures if picture.page not in pages]
        if len(others) < len(pictures):
            self._remove(others)
        else:
            text = tr("No page of the document has one of these numbers.")
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
    """Return the numbers in a text such as "1-3, 7"."""
    found = set[int]()
    for first, last in re.findall(r"(\d{1,5})(?:\s*[-–]\s*(\d{1,5}))?", text):
        found.update(range(int(first), int(last or first) + 1))
    return found


def _groups(pictures: Sequence[ChatImage]) -> list[tuple[ChatImage, ...]]:
    """Return pictures one by one, but the pages of a document together."""

    def key(one: tuple[int, ChatImage]) -> tuple[str, int]:
        number, picture = one
        return picture.name, 0 if picture.page else number + 1

    grouped = groupby(enumerate(pictures), key)
    return [tuple(picture for _, picture in group) for _, group in grouped]
