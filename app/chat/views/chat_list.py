"""The panel of the chats: a search field, a button for a new chat, and the list by day."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import date, timedelta

from PySide6.QtCore import QPoint, Qt, QTimer, Signal, Slot
from PySide6.QtGui import QAction, QColor, QFont, QKeyEvent
from PySide6.QtWidgets import (
    QAbstractItemView,
    QLineEdit,
    QListWidget,
    QListWidgetItem,
    QMenu,
    QVBoxLayout,
    QWidget,
)

from app.chat.conversation import Conversation, DamagedChat
from app.scale import px
from app.theme import icon, theme, theme_signals
from app.widgets.buttons import button
from app.widgets.shortcuts import is_pressed, with_keys
from app.widgets.sizes import scaled
from app.widgets.text import label, list_item, set_tip

ID = Qt.ItemDataRole.UserRole
DAMAGED = Qt.ItemDataRole.UserRole + 1
SEARCH_MS = 150
MIN_WIDTH = 144


class ChatList(QWidget):
    """List of the chats with a search field; it only asks for changes and makes none."""

    new_requested = Signal()
    chosen = Signal(str)
    renamed = Signal(str, str)
    delete_requested = Signal(str)
    export_requested = Signal(str)
    import_requested = Signal()
    damaged_chosen = Signal(object)  # DamagedChat
    reveal_requested = Signal(object)  # DamagedChat
    search_left = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "panel")
        scaled(self, self.setMinimumWidth, MIN_WIDTH)
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self._chats: Sequence[Conversation] = ()
        self._damaged: Sequence[DamagedChat] = ()
        self._current = ""
        self.search = _Search(self)
        self.search.setClearButtonEnabled(True)
        self.search.setPlaceholderText("Search chats")
        self.search.setAccessibleName("Search chats")
        set_tip(
            self.search,
            with_keys("Search chats", "search-chats")
            + ". Enter opens the first match, Esc leaves the search.",
        )
        scaled(self.search, self.search.setMinimumHeight, 32)
        self.search.returnPressed.connect(self._choose_first)
        self.search.escaped.connect(self._leave_search)
        self._search_timer = QTimer(self, singleShot=True, interval=SEARCH_MS)
        self._search_timer.timeout.connect(self.refresh)
        self.search.textChanged.connect(self._search_timer.start)
        new = button("New chat")
        set_tip(new, with_keys("New chat", "new-chat"))
        new.clicked.connect(self.new_requested)
        self.list = _List(self)
        self.list.setAccessibleName("Chats")
        self.list.itemActivated.connect(self._choose)
        self.list.itemClicked.connect(self._choose)
        self.list.itemChanged.connect(self._on_edited)
        self.list.delete_pressed.connect(self._delete_selected)
        self.list.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        self.list.customContextMenuRequested.connect(self._open_menu)
        self._nothing = label("No chats match.", "muted")
        self._nothing.setWordWrap(True)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(12, 12, 12, 8)
        layout.setSpacing(8)
        layout.addWidget(self.search)
        layout.addWidget(new)
        layout.addWidget(self._nothing)
        layout.addWidget(self.list, 1)
        theme_signals().changed.connect(self.refresh)
        self.refresh()

    def set_chats(
        self, chats: Sequence[Conversation], current: str, damaged: Sequence[DamagedChat] = ()
    ) -> None:
        """Show the chats, with the open one selected, and below them the damaged files."""
        self._chats, self._current, self._damaged = chats, current, damaged
        self.refresh()

    def shown_titles(self) -> list[str]:
        """Return the texts of all rows from the top, headings in capitals."""
        return [self.list.item(row).text() for row in range(self.list.count())]

    @Slot()
    def refresh(self) -> None:
        words = self.search.text()
        found = [chat for chat in self._chats if chat.matches(words)]
        found.sort(key=lambda chat: chat.updated, reverse=True)
        self._nothing.setVisible(bool(words) and not found)
        self.list.blockSignals(True)
        self.list.clear()
        heading, today = "", date.today()
        for chat in found:
            if (group := day_group(chat.updated, today)) != heading:
                heading = group
                self.list.addItem(_heading(group))
            item = _row(chat)
            self.list.addItem(item)
            if chat.id == self._current:
                self.list.setCurrentItem(item)
        self._add_damaged(words)
        self.list.blockSignals(False)

    def _add_damaged(self, words: str) -> None:
        """Add the damaged files; a search, which cannot read them, leaves them out."""
        if self._damaged and not words.strip():
            self.list.addItem(_heading("DAMAGED"))
            for damaged in self._damaged:
                self.list.addItem(_damaged_row(damaged))

    @Slot()
    def focus_search(self) -> None:
        self.search.setFocus()
        self.search.selectAll()

    @Slot()
    def _choose_first(self) -> None:
        self.refresh()
        items = (self.list.item(row) for row in range(self.list.count()))
        first = next((item for item in items if item.data(ID)), None)
        if self.search.text() and first is not None:
            self._choose(first)

    @Slot()
    def _leave_search(self) -> None:
        self.search.clear()
        self.search_left.emit()

    @Slot(QListWidgetItem)
    def _choose(self, item: QListWidgetItem) -> None:
        if item.data(ID):
            self.chosen.emit(item.data(ID))
        elif item.data(DAMAGED):
            self.damaged_chosen.emit(item.data(DAMAGED))

    @Slot(QListWidgetItem)
    def _on_edited(self, item: QListWidgetItem) -> None:
        chat_id, title = item.data(ID), item.text()
        # the receiver fills the list again, which must not happen inside the item's own signal
        QTimer.singleShot(0, self, lambda: self._rename(chat_id, title))

    def _rename(self, chat_id: str, title: str) -> None:
        if title.strip():
            self.renamed.emit(chat_id, title)
        else:
            self.refresh()

    @Slot()
    def _delete_selected(self) -> None:
        item = self.list.currentItem()
        if item is not None and item.data(ID):
            self.delete_requested.emit(item.data(ID))

    @Slot(QPoint)
    def _open_menu(self, position: QPoint) -> None:
        item = self.list.itemAt(position)
        menu = QMenu(self)
        if item is None:
            menu.addAction("Import chat…").triggered.connect(self.import_requested)
        elif item.data(ID):
            rename = QAction(icon("edit"), "Rename", menu)
            rename.triggered.connect(lambda: self.list.editItem(item))
            export = QAction("Export…", menu)
            export.triggered.connect(lambda: self.export_requested.emit(item.data(ID)))
            bring = QAction("Import chat…", menu)
            bring.triggered.connect(self.import_requested)
            delete = QAction(icon("delete", theme().danger), "Delete", menu)
            delete.triggered.connect(lambda: self.delete_requested.emit(item.data(ID)))
            menu.addActions([rename, export, bring, delete])
        elif item.data(DAMAGED):
            show = QAction("Show in folder", menu)
            show.triggered.connect(lambda: self.reveal_requested.emit(item.data(DAMAGED)))
            menu.addAction(show)
        else:
            return
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.popup(self.list.viewport().mapToGlobal(position))


class _Search(QLineEdit):
    """Search field that reports Esc."""

    escaped = Signal()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if is_pressed("leave-search", event):
            self.escaped.emit()
        else:
            super().keyPressEvent(event)


class _List(QListWidget):
    """List whose F2 key renames and Del key deletes."""

    delete_pressed = Signal()

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.setEditTriggers(QAbstractItemView.EditTrigger.EditKeyPressed)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setTextElideMode(Qt.TextElideMode.ElideRight)
        self.setSpacing(1)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if is_pressed("delete-chat", event):
            self.delete_pressed.emit()
        else:
            super().keyPressEvent(event)


def day_group(when: float, today: date) -> str:
    """Return the heading for a chat last changed at `when` (seconds since the epoch)."""
    day = date.fromtimestamp(when) if when >= 0 else date.min
    if day >= today:
        return "TODAY"
    if day == today - timedelta(days=1):
        return "YESTERDAY"
    return "THIS WEEK" if day > today - timedelta(days=7) else "EARLIER"


def _heading(text: str) -> QListWidgetItem:
    item = list_item(text)
    item.setFlags(Qt.ItemFlag.NoItemFlags)
    font = QFont()
    font.setPixelSize(px(11))
    item.setFont(font)
    item.setForeground(QColor(theme().muted))
    return item


def _damaged_row(damaged: DamagedChat) -> QListWidgetItem:
    item = list_item(damaged.path.name, f"This file cannot be opened: {damaged.why}.")
    item.setData(DAMAGED, damaged)
    item.setForeground(QColor(theme().danger))
    return item


def _row(chat: Conversation) -> QListWidgetItem:
    when = time.strftime("%c", time.localtime(chat.updated))
    item = list_item(chat.shown_title, f"{chat.shown_title}\n{when}")
    item.setData(ID, chat.id)
    item.setFlags(item.flags() | Qt.ItemFlag.ItemIsEditable)
    return item
