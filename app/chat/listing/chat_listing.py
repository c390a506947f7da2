"""Presenter for the chat list: connects the list with the session, folders and search."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
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
    """Presenter for the rows, folders and search field."""

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
        self._n_awaited = 0  # searches to repeat after pending writes
        self._view = view
        self._wire_chats()
        self._wire_folders()
        view.search_requested.connect(self._search)
        view.hit_chosen.connect(self.open_hit)

    def set_finder(self, finder: ChatFinder) -> None:
        """Use this finder from now on, and search for any text already typed."""
        self._finder = finder
        finder.found.connect(self._show_hits)
        library = self._session.library
        finder.indexed.connect(self._search_all)
        library.all_read.connect(self._search_all)
        library.written.connect(finder.note)
        self._search(self._view.search.text())

    @Slot()
    def show(self) -> None:
        """Show the current chats."""
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
        """Open a hit's chat at the message that was found."""
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
        rows.pin_requested.connect(
            lambda ids, is_pinned: shelf.change(lambda s: s.with_pins(ids, is_pinned=is_pinned))
        )
        rows.moved.connect(lambda ids, name: shelf.change(lambda s: s.moved(ids, name)))
        rows.folder_requested.connect(self._add_folder)
        rows.folder_renamed.connect(lambda name, new: shelf.change(lambda s: s.renamed(name, new)))
        rows.folder_deleted.connect(self._delete_folder)
        rows.folder_toggled.connect(
            lambda name, is_open: shelf.change(lambda s: s.opened(name, is_open=is_open))
        )

    @Slot(object)
    def _add_folder(self, ids: list[str]) -> None:
        name = free_name(self._shelf.current)
        self._shelf.change(lambda shelf: shelf.moved(ids, name))
        self._view.list.edit_folder(name)

    @Slot(str)
    def _delete_folder(self, name: str) -> None:
        before = next((f for f in self._shelf.current.folders if f.name == name), None)
        if before is None:
            return
        self._shelf.change(lambda shelf: shelf.without_folder(name))
        text = tr("The folder “{name}” was deleted. Its chats are still in the list.").format(
            name=name
        )

        def undo() -> None:
            self._shelf.change(lambda shelf: shelf.with_back(before))

        self.noticed.emit(Notice(text, action=tr("Undo"), on_action=undo))

    @Slot(str)
    def _search(self, typed: str) -> None:
        if self._finder is not None and typed.strip():
            self._finder.find(typed)
            library = self._session.library
            if not library.is_written:  # search again, to find new messages as well
                self._n_awaited += 1
                library.when_written(self._search_again)
        elif self._finder is not None:
            self._finder.drop()

    def _search_again(self) -> None:
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
        if self._view.search.text().strip():
            self._search(self._view.search.text())

    @Slot(object)
    def _explain_damage(self, damaged: DamagedChat) -> None:
        self.noticed.emit(
            Notice(
                tr("{name} cannot be opened: {why}.").format(
                    name=damaged.path.name, why=damaged.why
                ),
                tr(
                    "The file is left unchanged. If you replace it with a backup, that is read at"
                    " the next start."
                ),
                "warning",
                tr("Show in folder"),
                lambda: reveal(damaged.path),
            )
        )


def free_name(shelf: Shelf) -> str:
    """Return an unused name for a new folder."""
    name, number = tr("New folder"), 2
    while name in shelf.names:
        name, number = tr("New folder {n}").format(n=number), number + 1
    return name


class ChatListing(QObject):
    """All parts of the chat list.

    Args:
        shelf: file with the folders.
        old_index: search index of earlier versions, to be deleted.
        is_titling: returns whether the model generates titles.
    """

    noticed = Signal(object)  # Notice

    def __init__(
        self,
        session: ChatSession,
        client: EngineClient,
        chats: ChatPresenter,
        view: ChatList,
        shelf: Path,
        old_index: Path,
        is_titling: Callable[[], bool],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self._session, self._chats, self._view, self._old_index = session, chats, view, old_index
        self._shelf = ShelfStore(shelf, self)
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
        """Export and import, created on first use."""
        if self._exchange is None:
            from app.chat.exchange.dialogs import ChatExchange

            self._exchange = ChatExchange(self._session, self._view, self._chats.flush, self)
            self._exchange.noticed.connect(self.noticed)
        return self._exchange

    def go_on(self) -> None:
        """Start titling, importing old chats and indexing, now that the window is visible."""
        from app.chat.listing.titles import ChatTitler  # late: not needed for the first frame
        from app.chat.search import ChatFinder

        session = self._session
        self._titler = ChatTitler(
            self._client, self._is_titling, session.calls.offered, session.image_files, self
        )
        self._titler.titled.connect(self._session.entitle)
        self._session.answered.connect(self._titler.note_answer)
        self._session.deleted.connect(self._titler.forget)
        library = self._session.library
        library.go_on()
        self.finder = ChatFinder(library.store.database, self)
        self._presenter.set_finder(self.finder)
        self.finder.start()
        for suffix in ("", "-wal", "-shm"):
            with suppress(OSError):
                Path(f"{self._old_index}{suffix}").unlink(missing_ok=True)

    def close(self) -> None:
        """Write all changes, and stop the threads."""
        if self._titler is not None:
            self._titler.close()
        if self.finder is not None:
            self.finder.close()
        if self._exchange is not None:
            self._exchange.close()
        self._shelf.close()
