"""The panel of the chats: a search field, a button for a new chat, the list or what was found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from PySide6.QtCore import Qt, QTimer, Signal, Slot
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QLineEdit, QStackedWidget, QVBoxLayout, QWidget

from app.chat.listing.rows import ListContents
from app.chat.views.chat_rows import ChatRowsView
from app.core.translation import tr, tr_n
from app.widgets.buttons import button
from app.widgets.layout import scaled
from app.widgets.shortcuts import is_pressed, with_keys
from app.widgets.text import label, set_tip
from app.widgets.theme import theme_signals

if TYPE_CHECKING:
    from app.chat.search.index import Hit
    from app.chat.views.hit_list import HitList

SEARCH_MS = 120
MIN_WIDTH = 144
STEPS = {"previous-hit": -1, "next-hit": 1, "hits-back": -5, "hits-on": 5}
"""Rows by which shortcuts in the search field move the current hit."""


class ChatList(QWidget):
    """List of the chats with a search field; it only asks for changes and makes none."""

    new_requested = Signal()
    search_requested = Signal(str)  # what is typed; "" once the search is over
    hit_chosen = Signal(object)  # Hit
    search_left = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "panel")
        scaled(self, self.setMinimumWidth, MIN_WIDTH)
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self._contents = ListContents()
        self._is_chosen_when_found, self._is_final = False, True
        self._searched = ""  # what the shown hits were found for
        self.search = _Search(self)
        self._set_up_search()
        new = button(tr("New chat"))
        set_tip(new, with_keys(tr("New chat"), "new-chat"))
        new.clicked.connect(self.new_requested)
        self.list = ChatRowsView(self)
        self._hits: HitList | None = None
        self._pages = QStackedWidget()
        self._pages.addWidget(self.list)
        self._status = label(role="muted")
        self._status.setWordWrap(True)
        self._status.hide()
        layout = QVBoxLayout(self)
        layout.setContentsMargins(12, 12, 12, 8)
        layout.setSpacing(8)
        layout.addWidget(self.search)
        layout.addWidget(new)
        layout.addWidget(self._status)
        layout.addWidget(self._pages, 1)
        theme_signals().changed.connect(self._pages.update)

    @property
    def hits(self) -> HitList:
        """The list of what was found, made for the first search."""
        if self._hits is None:
            from app.chat.views.hit_list import HitList  # late: not needed for the first picture

            self._hits = HitList(self)
            self._hits.chosen.connect(self.hit_chosen)
            self._pages.addWidget(self._hits)
        return self._hits

    def show_contents(self, contents: ListContents) -> None:
        """Show the chats, with the open one selected."""
        self._contents = contents
        self.list.show_contents(contents)
        self._show_status()

    def show_hits(self, typed: str, hits: Sequence[Hit], *, is_final: bool = True) -> None:
        """Show what was found for a search, unless something else is typed by now.

        Args:
            is_final: whether all chats were searched; else more may be found in a moment.
        """
        if typed != self.search.text() or not typed.strip():
            return
        is_other, self._searched = typed != self._searched, typed
        self._pages.setCurrentWidget(self.hits)
        if is_other or list(hits) != self.hits.hits:
            self.hits.show_hits(hits)
        self._show_status()
        self._is_final = is_final
        if self._is_chosen_when_found and (hits or is_final):
            self._is_chosen_when_found = False
            self.hits.choose_current()

    def shown_titles(self) -> list[str]:
        """Return the texts of all rows from the top, headings in capitals."""
        return [row.text for row in self.list.row_model.rows]

    @Slot()
    def focus_search(self) -> None:
        self.search.setFocus()
        self.search.selectAll()

    def _set_up_search(self) -> None:
        search = self.search
        search.setClearButtonEnabled(True)
        search.setPlaceholderText(tr("Search chats"))
        search.setAccessibleName(tr("Search chats"))
        tip = tr("Up and Down go through what is found, Enter opens it.")
        set_tip(search, f"{with_keys(tr('Search all chats'), 'search-chats')}. {tip}")
        scaled(search, search.setMinimumHeight, 32)
        search.returnPressed.connect(self._choose_hit)
        search.escaped.connect(self._leave_search)
        search.stepped.connect(lambda n_rows: self.hits.step(n_rows))
        self._search_timer = QTimer(self, singleShot=True, interval=SEARCH_MS)
        self._search_timer.timeout.connect(self._ask)
        search.textChanged.connect(self._on_typed)

    @Slot()
    def _on_typed(self) -> None:
        self._is_chosen_when_found = False
        if self.search.text().strip():
            self._search_timer.start()
        else:
            self._search_timer.stop()
            self._searched = ""
            self._pages.setCurrentWidget(self.list)
            self._show_status()
            self.search_requested.emit("")

    @Slot()
    def _ask(self) -> None:
        self._search_timer.stop()
        self.search_requested.emit(self.search.text())

    @Slot()
    def _choose_hit(self) -> None:
        """Open the current hit, if need be once it is found."""
        typed = self.search.text()
        is_shown = bool(typed == self._searched and (self._is_final or self.hits.hits))
        if typed.strip() and is_shown:
            self.hits.choose_current()
        elif typed.strip():
            self._is_chosen_when_found = True
            self._ask()

    @Slot()
    def _leave_search(self) -> None:
        self.search.clear()
        self.search_left.emit()

    def _show_status(self) -> None:
        """Say what the list does not show by itself."""
        n, texts = self._contents.n_unread, []
        if self._searched and not self.hits.hits:
            texts.append(tr("No chats match."))
        if self._searched and self.hits.is_cut:
            n_shown = len(self.hits.hits)
            texts.append(tr("The first {n} are shown.").format(n=n_shown))
        if n:
            texts.append(
                tr_n("{n} chat is still being read.", "{n} chats are still being read.", n)
            )
        self._status.setText(" ".join(texts))
        self._status.setVisible(bool(texts))


class _Search(QLineEdit):
    """Search field that reports Esc, and the keys that go through the hits."""

    escaped = Signal()
    stepped = Signal(int)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        n_rows = next((n for name, n in STEPS.items() if is_pressed(name, event)), 0)
        if is_pressed("leave-search", event):
            self.escaped.emit()
        elif n_rows:
            self.stepped.emit(n_rows)
        else:
            super().keyPressEvent(event)
