"""The list of chats as a whole: its presenter, folders, search, titles, export and import."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal

from app.chat.listing.folders import ShelfStore
from app.chat.listing.presenter import ListPresenter
from app.chat.presenter import ChatPresenter
from app.chat.session import ChatSession
from app.chat.views.chat_list import ChatList
from app.core.engine_client import EngineClient

if TYPE_CHECKING:
    from app.chat.exchange.presenter import ChatExchange
    from app.chat.listing.titles import ChatTitler
    from app.chat.search.finder import ChatFinder


@dataclass(frozen=True, slots=True)
class ListPlaces:
    """Files that belong to the list of chats.

    Attributes:
        old_index: index of the chats that earlier versions made, which is deleted.
        shelf: file of the folders of chats.
    """

    old_index: Path
    shelf: Path


class ChatListing(QObject):
    """All parts of the list of chats.

    Args:
        chats: opens and deletes chats.
        is_titling: whether the model is to name chats.
    """

    noticed = Signal(object)  # Notice

    def __init__(
        self,
        session: ChatSession,
        client: EngineClient,
        chats: ChatPresenter,
        view: ChatList,
        places: ListPlaces,
        is_titling: Callable[[], bool],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._session, self._chats, self._view, self._places = session, chats, view, places
        self._shelf = ShelfStore(places.shelf, self)
        self._presenter = ListPresenter(session, chats, self._shelf, view, self)
        self.finder: ChatFinder | None = None
        self._exchange: ChatExchange | None = None
        self._titler: ChatTitler | None = None
        self._client, self._is_titling = client, is_titling
        view.list.export_requested.connect(lambda *what: self.exchange.export(*what))
        view.list.import_requested.connect(lambda: self.exchange.bring_in())
        self._presenter.noticed.connect(self.noticed)

    @property
    def exchange(self) -> ChatExchange:
        """Export and import, made when they are first asked for."""
        if self._exchange is None:
            from app.chat.exchange.presenter import ChatExchange

            self._exchange = ChatExchange(self._session, self._view, self._chats.flush, self)
            self._exchange.noticed.connect(self.noticed)
        return self._exchange

    def go_on(self) -> None:
        """Do what the window's first picture does not need, on a thread."""
        from app.chat.listing.titles import ChatTitler  # late, like what this imports
        from app.chat.search.finder import ChatFinder

        session = self._session
        self._titler = ChatTitler(
            self._client, self._is_titling, session.calls.offered, session.picture_files, self
        )
        self._titler.titled.connect(self._session.entitle)
        self._session.answered.connect(self._titler.note_answer)
        self._session.deleted.connect(self._titler.forget)
        library = self._session.library
        library.go_on()
        self.finder = ChatFinder(library.database, self)
        self._presenter.set_finder(self.finder)
        self.finder.start()
        for suffix in ("", "-wal", "-shm"):
            with suppress(OSError):
                Path(f"{self._places.old_index}{suffix}").unlink(missing_ok=True)

    def close(self) -> None:
        """Write what is not written, and end all work."""
        if self._titler is not None:
            self._titler.close()
        if self.finder is not None:
            self.finder.close()
        if self._exchange is not None:
            self._exchange.close()
        self._shelf.close()
