"""The presenter of the list of chats: connects it with the session, the folders and the search."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal, Slot

from app.chat.chat_presenter import ChatPresenter
from app.chat.conversation import DamagedChat
from app.chat.listing.folders import ListContents, Shelf, ShelfStore
from app.chat.session import ChatSession
from app.chat.views.chat_list import ChatList
from app.core.engine_client import EngineClient
from app.core.notice import Notice
from app.core.translation import tr
from app.widgets.text import reveal

if TYPE_CHECKING:
    from app.chat.exchange.dialogs import ChatExchange
    from app.chat.listing.titles import ChatTitler
    from app.chat.search import ChatFinder, Hit


class ListPresenter(QObject):
    """Connection of the list of chats with all that it shows and asks for.

    Args:
        chats: opens and deletes chats.
    """

    noticed = Signal(object)  # Notice

    def __init__(
        self,
        session: ChatSession,
        chats: ChatPresenter,
        shelf: ShelfStore,
        view: ChatList,
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._session, self._chats, self._shelf = session, chats, shelf
        self._finder: ChatFinder | None = None
        self._n_awaited = 0  # searches that are made again once all is written
        self._view = view
        self._wire_chats()
        self._wire_folders()
        view.search_requested.connect(self._search)
        view.hit_chosen.connect(self.open_hit)

    def set_finder(self, finder: ChatFinder) -> None:
        """Search with this from now on, also for what is typed already."""
        self._finder = finder
        finder.found.connect(self._show_hits)
        library = self._session.library
        finder.indexed.connect(self._search_all)
        library.all_read.connect(self._search_all)
        library.written.connect(finder.note)
        self._search(self._view.search.text())

    @Slot()
    def show(self) -> None:
        """Show the chats as they are now."""
        session, library = self._session, self._session.library
        self._view.show_contents(
            ListContents(
                chats=library.summaries,
                shelf=self._shelf.current,
                damaged=library.damaged,
                current=session.current.id,
                answered=frozenset(written.chat.id for written in session.answers),
                n_unread=len(library.unread),
            )
        )

    @Slot(object)
    def open_hit(self, hit: Hit) -> None:
        """Open a chat at the message that was found."""
        self._chats.flush()
        if hit.is_title:
            self._session.open_chat(hit.chat_id)
        else:
            self._session.open_at(hit.chat_id, hit.message_id)

    def _wire_chats(self) -> None:
        session, rows = self._session, self._view.list
        self._view.new_requested.connect(self._chats.new_chat)
        rows.chosen.connect(self._chats.open_chat)
        rows.renamed.connect(session.rename)
        rows.delete_requested.connect(self._chats.delete_chats)
        rows.damaged_chosen.connect(self._explain_damage)
        rows.reveal_requested.connect(lambda damaged: reveal(damaged.path))
        session.chats_changed.connect(self.show)
        session.opened.connect(self.show)
        session.answers_changed.connect(self.show)

    def _wire_folders(self) -> None:
        rows, shelf = self._view.list, self._shelf
        shelf.changed.connect(self.show)
        shelf.noticed.connect(self.noticed)
        rows.pin_requested.connect(self._pin)
        rows.moved.connect(self._move)
        rows.folder_requested.connect(self._add_folder)
        rows.folder_renamed.connect(self._rename_folder)
        rows.folder_deleted.connect(self._delete_folder)
        rows.folder_toggled.connect(self._toggle_folder)

    # folders

    @Slot(object, bool)
    def _pin(self, ids: list[str], is_pinned: bool) -> None:
        self._shelf.change(lambda shelf: shelf.with_pins(ids, is_pinned=is_pinned))

    @Slot(object, str)
    def _move(self, ids: list[str], name: str) -> None:
        self._shelf.change(lambda shelf: shelf.moved(ids, name))

    @Slot(object)
    def _add_folder(self, ids: list[str]) -> None:
        """Add a folder with chats, and have its name typed."""
        name = free_name(self._shelf.current)
        self._shelf.change(lambda shelf: shelf.moved(ids, name))
        self._view.list.edit_folder(name)

    @Slot(str, str)
    def _rename_folder(self, name: str, new: str) -> None:
        self._shelf.change(lambda shelf: shelf.renamed(name, new))

    @Slot(str)
    def _delete_folder(self, name: str) -> None:
        """Delete a folder; its chats stay, and a notice offers to undo it."""
        before = next((f for f in self._shelf.current.folders if f.name == name), None)
        if before is None:
            return
        self._shelf.change(lambda shelf: shelf.without_folder(name))
        text = tr("The folder “{name}” was deleted. Its chats are in the list.").format(name=name)

        def undo() -> None:
            self._shelf.change(lambda shelf: shelf.with_back(before))

        self.noticed.emit(Notice(text, action=tr("Undo"), on_action=undo))

    @Slot(str, bool)
    def _toggle_folder(self, name: str, is_open: bool) -> None:
        self._shelf.change(lambda shelf: shelf.opened(name, is_open=is_open))

    # search

    @Slot(str)
    def _search(self, typed: str) -> None:
        if self._finder is not None and typed.strip():
            self._finder.find(typed)
            library = self._session.library
            if not library.is_written:  # a message that was sent just now is found, too
                self._n_awaited += 1
                library.when_written(self._search_again)
        elif self._finder is not None:
            self._finder.drop()

    def _search_again(self) -> None:
        """Search for what is typed now, in chats that were being written."""
        self._n_awaited -= 1
        typed = self._view.search.text()
        if self._finder is not None and typed.strip():
            self._finder.find(typed)

    @Slot(str, object)
    def _show_hits(self, typed: str, hits: list[Hit]) -> None:
        library = self._session.library
        if any(hit.chat_id not in library for hit in hits):
            library.look_again()
        is_current = self._finder is not None and self._finder.is_current
        is_final = is_current and not (self._n_awaited or library.unread)
        shown = [hit for hit in hits if hit.chat_id in library]
        self._view.show_hits(typed, shown, is_final=is_final)

    @Slot()
    def _search_all(self) -> None:
        """Search again once all chats are read or indexed."""
        if self._view.search.text().strip():
            self._search(self._view.search.text())

    # damaged files

    @Slot(object)
    def _explain_damage(self, damaged: DamagedChat) -> None:
        """Say what is wrong with a file, and offer to show it."""
        self.noticed.emit(
            Notice(
                tr("{name} cannot be opened: {why}.").format(
                    name=damaged.path.name, why=damaged.why
                ),
                tr("The file stays as it is. A backup in its place is read at the next start."),
                "warning",
                tr("Show in folder"),
                lambda: reveal(damaged.path),
            )
        )


def free_name(shelf: Shelf) -> str:
    """Return a name for a new folder that none has yet."""
    name, number = tr("New folder"), 2
    while name in shelf.names:
        name, number = tr("New folder {n}").format(n=number), number + 1
    return name


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
            from app.chat.exchange.dialogs import ChatExchange

            self._exchange = ChatExchange(self._session, self._view, self._chats.flush, self)
            self._exchange.noticed.connect(self.noticed)
        return self._exchange

    def go_on(self) -> None:
        """Do what the window's first picture does not need, on a thread."""
        from app.chat.listing.titles import ChatTitler  # late, like what this imports
        from app.chat.search import ChatFinder

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
