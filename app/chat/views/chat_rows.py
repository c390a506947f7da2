"""Model, delegate and view for the chat list."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from datetime import date
from functools import partial
from typing import Any, Final

from PySide6.QtCore import (
    QAbstractItemModel,
    QAbstractListModel,
    QByteArray,
    QItemSelection,
    QItemSelectionModel,
    QMimeData,
    QModelIndex,
    QObject,
    QPersistentModelIndex,
    QPoint,
    QSize,
    Qt,
    Signal,
    Slot,
)
from PySide6.QtGui import QAction, QColor, QFont, QIcon, QKeyEvent, QMouseEvent, QPainter
from PySide6.QtWidgets import (
    QAbstractItemDelegate,
    QAbstractItemView,
    QListView,
    QMenu,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QWidget,
)

from app.chat.listing.folders import ListContents, ListRow, RowKind, rows_of
from app.core.translation import tr, tr_n
from app.widgets.layout import scaled
from app.widgets.shortcuts import is_pressed
from app.widgets.text import caption_text, plain_tip
from app.widgets.theme import icon, px, theme
from engine import one_line

MIME: Final = "application/x-tandem-chats"
INDENT: Final = 14
HEADING_PIXELS: Final = 11

Index = QModelIndex | QPersistentModelIndex

_TOP: Final = QModelIndex()
_HERE: Final = {
    RowKind.CHAT: Qt.ItemFlag.ItemIsDragEnabled | Qt.ItemFlag.ItemIsEditable,
    RowKind.FOLDER: Qt.ItemFlag.ItemIsEditable,
    RowKind.DAMAGED: Qt.ItemFlag.NoItemFlags,
}


class ChatRowModel(QAbstractListModel):
    """Rows of `ListContents`; editing a row only emits a change request."""

    renamed = Signal(object, str)  # ListRow, new text
    moved = Signal(object, str)  # ids of chats, name of a folder or ""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.rows: list[ListRow] = []

    def set_contents(self, contents: ListContents) -> None:
        """Replace the rows if they differ."""
        rows = rows_of(contents, date.today())
        if rows != self.rows:
            self.beginResetModel()
            self.rows = rows
            self.endResetModel()

    def row_at(self, index: Index) -> ListRow | None:
        """Return the row at an index, or None."""
        return self.rows[index.row()] if index.isValid() else None

    def index_of(self, kind: RowKind, key: str) -> QModelIndex:
        """Return the index of a row, or an invalid index if the row is missing."""
        for number, row in enumerate(self.rows):
            if row.kind is kind and row.key == key:
                return self.index(number)
        return QModelIndex()

    def rowCount(self, parent: Index = _TOP) -> int:
        return 0 if parent.isValid() else len(self.rows)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        row = self.row_at(index)
        if row is None:
            return None
        if role == Qt.ItemDataRole.DisplayRole:
            return _shown_text(row)
        if role == Qt.ItemDataRole.EditRole:
            return row.text
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip(_tip(row))
        if role == Qt.ItemDataRole.AccessibleTextRole:
            return _spoken(row)
        if role == Qt.ItemDataRole.DecorationRole:
            return _sign(row)
        if role == Qt.ItemDataRole.ForegroundRole:
            return _colour(row)
        if role == Qt.ItemDataRole.FontRole and row.kind is RowKind.HEADING:
            return _heading_font()
        return None

    def setData(self, index: Index, value: Any, role: int = Qt.ItemDataRole.EditRole) -> bool:
        row = self.row_at(index)
        text = str(value).strip()
        if row is None or role != Qt.ItemDataRole.EditRole or not text or text == row.text:
            return False
        self.renamed.emit(row, text)
        return True

    def flags(self, index: Index) -> Qt.ItemFlag:
        row = self.row_at(index)
        if row is None or row.kind is RowKind.HEADING:  # like a drop between chats
            return Qt.ItemFlag.ItemIsDropEnabled
        usual = Qt.ItemFlag.ItemIsEnabled | Qt.ItemFlag.ItemIsSelectable
        return usual | Qt.ItemFlag.ItemIsDropEnabled | _HERE[row.kind]

    def supportedDragActions(self) -> Qt.DropAction:
        return Qt.DropAction.MoveAction

    def supportedDropActions(self) -> Qt.DropAction:
        return Qt.DropAction.MoveAction

    def mimeTypes(self) -> list[str]:
        return [MIME]

    def mimeData(self, indexes: Sequence[QModelIndex]) -> QMimeData:
        rows = (self.row_at(index) for index in indexes)
        ids = [row.key for row in rows if row is not None and row.kind is RowKind.CHAT]
        data = QMimeData()
        data.setData(MIME, QByteArray(json.dumps(ids).encode()))
        return data

    def dropMimeData(
        self, data: QMimeData, action: Qt.DropAction, row: int, column: int, parent: Index
    ) -> bool:
        """Request a move into the folder at the drop position, or out of all folders."""
        if not data.hasFormat(MIME):
            return False
        ids = json.loads(bytes(data.data(MIME).data()))
        target = parent.row() if parent.isValid() else row
        self.moved.emit(ids, self.folder_at(target))
        return True

    def folder_at(self, number: int) -> str:
        """Return the name of the folder that a row is or belongs to; "" if there is none."""
        for row in reversed(self.rows[: number + 1] if number >= 0 else []):
            if row.kind is RowKind.FOLDER:
                return row.key
            if not row.is_inside:
                break
        return ""


class RowDelegate(QStyledItemDelegate):
    """Delegate that indents chats in folders."""

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        super().paint(painter, _indented(option, index), index)

    def updateEditorGeometry(
        self, editor: QWidget, option: QStyleOptionViewItem, index: Index
    ) -> None:
        """Make the editor as high as the row, as its frame makes it taller than the text."""
        row = _indented(option, index)
        super().updateEditorGeometry(editor, row, index)
        has_sign = index.data(Qt.ItemDataRole.DecorationRole) is not None
        left = editor.geometry().left() if has_sign else row.rect.left()
        editor.setGeometry(row.rect.adjusted(left - row.rect.left(), 0, 0, 0))


def keys_of(rows: Collection[ListRow], kind: RowKind) -> list[str]:
    """Return the keys of all rows of this kind."""
    return [row.key for row in rows if row.kind is kind]


def _indented(option: QStyleOptionViewItem, index: Index) -> QStyleOptionViewItem:
    model: QAbstractItemModel = index.model()
    row = model.row_at(index) if isinstance(model, ChatRowModel) else None
    if row is None or not row.is_inside:
        return option
    moved = QStyleOptionViewItem(option)
    moved.rect = option.rect.adjusted(px(INDENT), 0, 0, 0)
    return moved


def _shown_text(row: ListRow) -> str:
    text = one_line(row.text)
    return f"{text} · {row.n_inside}" if row.kind is RowKind.FOLDER else text


def _tip(row: ListRow) -> str:
    if row.damaged is not None:
        return tr("This file cannot be opened: {why}.").format(why=row.damaged.why)
    if row.kind is not RowKind.CHAT:
        return ""
    when = time.strftime("%c", time.localtime(row.when))
    busy = "\n" + tr("An answer is being written here.") if row.is_answered else ""
    return f"{row.text}\n{when}{busy}"


def _spoken(row: ListRow) -> str:
    text = one_line(row.text)
    if row.kind is RowKind.FOLDER:
        state = tr("open") if row.is_open else tr("closed")
        n_chats = tr_n("{n} chat", "{n} chats", row.n_inside)
        return tr("Folder {name}, {chats}, {state}").format(name=text, chats=n_chats, state=state)
    return tr("{title}, answer in progress").format(title=text) if row.is_answered else text


def _sign(row: ListRow) -> QIcon | None:
    if row.kind is RowKind.FOLDER:
        return icon("chevron-down" if row.is_open else "chevron-right", theme().muted)
    return icon("dot", theme().accent) if row.is_answered else None


def _colour(row: ListRow) -> QColor | None:
    if row.kind is RowKind.HEADING:
        return QColor(theme().muted)
    return QColor(theme().danger) if row.kind is RowKind.DAMAGED else None


def _heading_font() -> QFont:
    font = QFont()
    font.setPixelSize(px(HEADING_PIXELS))
    return font


ICON_PIXELS = 14


class ChatRowsView(QListView):
    """List of chats, folders and damaged files; it only emits change requests."""

    chosen = Signal(str)
    renamed = Signal(str, str)  # id of a chat, title
    delete_requested = Signal(object)  # ids of chats
    export_requested = Signal(object, str)  # ids of chats; suffix of several files, or ""
    import_requested = Signal()
    pin_requested = Signal(object, bool)  # ids of chats, whether to pin them
    moved = Signal(object, str)  # ids of chats, name of a folder or ""
    folder_requested = Signal(object)  # ids of the chats to put into a new folder
    folder_renamed = Signal(str, str)
    folder_deleted = Signal(str)
    folder_toggled = Signal(str, bool)  # folder name, whether to expand it
    damaged_chosen = Signal(object)  # DamagedChat
    reveal_requested = Signal(object)  # DamagedChat

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._contents = ListContents()
        self._waiting: ListContents | None = None  # contents to show after editing
        self.row_model = ChatRowModel(self)
        self.row_model.renamed.connect(self._on_renamed)
        self.row_model.moved.connect(self.moved)
        self.setModel(self.row_model)
        self.setItemDelegate(RowDelegate(self))
        self.setAccessibleName(tr("Chats"))
        self.setUniformItemSizes(True)
        scaled(self, self._set_icon_size, ICON_PIXELS)
        self.setSpacing(1)
        self.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        self.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setTextElideMode(Qt.TextElideMode.ElideRight)
        self.setDragDropMode(QAbstractItemView.DragDropMode.DragDrop)
        self.setDefaultDropAction(Qt.DropAction.MoveAction)
        self.setDropIndicatorShown(True)
        self.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        self.customContextMenuRequested.connect(self._open_menu)
        self.clicked.connect(self._on_clicked)

    @property
    def selected_rows(self) -> list[ListRow]:
        """The selected rows, from top to bottom."""
        numbers = sorted(index.row() for index in self.selectedIndexes())
        return [self.row_model.rows[number] for number in numbers]

    def show_contents(self, contents: ListContents) -> None:
        """Show these chats; keep a multiple selection, or else select the open chat."""
        if self.state() == QAbstractItemView.State.EditingState:
            self._waiting = contents
            return
        selected, at = set(keys_of(self.selected_rows, RowKind.CHAT)), self._current()
        is_other = contents.current != self._contents.current
        self._contents = contents
        self.row_model.set_contents(contents)
        if len(selected) < 2 or is_other:
            selected = {contents.current}
        self._select(selected, at)

    def edit_folder(self, name: str) -> None:
        """Start editing a folder's name."""
        index = self.row_model.index_of(RowKind.FOLDER, name)
        if index.isValid():
            self.setCurrentIndex(index)
            self.setFocus()
            self.edit(index)

    def menu_for(self, row: ListRow | None) -> QMenu:
        """Return the context menu for a row, for all selected chats, or for the list itself."""
        menu = QMenu(self)
        if row is not None and row.kind is RowKind.CHAT:
            self._add_chat_actions(menu, row)
        elif row is not None and row.kind is RowKind.FOLDER:
            self._add_folder_actions(menu, row)
        elif row is not None and row.damaged is not None:
            _add(menu, tr("Show in folder"), lambda: self.reveal_requested.emit(row.damaged))
            return menu
        if not menu.isEmpty():
            menu.addSeparator()
        _add(menu, tr("New folder"), lambda: self.folder_requested.emit([]))
        _add(menu, tr("Import chats…"), self.import_requested.emit)
        return menu

    def _add_chat_actions(self, menu: QMenu, row: ListRow) -> None:
        ids = keys_of(self.selected_rows, RowKind.CHAT)
        ids = ids if row.key in ids else [row.key]
        if len(ids) == 1:
            index = self.row_model.index_of(RowKind.CHAT, row.key)
            rename = _add(menu, tr("Rename"), lambda: self.edit(index))
            rename.setIcon(icon("edit"))
        is_pinned = self._contents.shelf.pinned.issuperset(ids)
        text = tr("Unpin") if is_pinned else tr("Pin")
        _add(menu, text, lambda: self.pin_requested.emit(ids, not is_pinned))
        self._add_folder_menu(menu, ids)
        self._add_export(menu, ids)
        n = len(ids)
        text = tr("Delete") if n == 1 else tr_n("Delete {n} chat", "Delete {n} chats", n)
        delete = _add(menu, text, lambda: self.delete_requested.emit(ids))
        delete.setIcon(icon("delete", theme().danger))

    def _add_folder_menu(self, menu: QMenu, ids: list[str]) -> None:
        shelf = self._contents.shelf
        into = menu.addMenu(tr("Move to folder"))
        places = {shelf.folder_of(chat_id) for chat_id in ids}
        for name in shelf.names:
            action = _add(into, name, partial(self.moved.emit, ids, name))
            action.setEnabled(places != {name})
        if shelf.names:
            into.addSeparator()
        _add(into, tr("New folder"), lambda: self.folder_requested.emit(ids))
        _add(into, tr("No folder"), lambda: self.moved.emit(ids, "")).setEnabled(places != {""})

    def _add_export(self, menu: QMenu, ids: list[str]) -> None:
        if len(ids) == 1:
            _add(menu, tr("Export…"), lambda: self.export_requested.emit(ids, ""))
            return
        from app.chat.export import FORMATS  # late: not needed for the first frame

        kinds = menu.addMenu(tr_n("Export {n} chat", "Export {n} chats", len(ids)))
        for suffix, name in FORMATS.items():
            _add(kinds, tr(name), partial(self.export_requested.emit, ids, suffix))

    def _add_folder_actions(self, menu: QMenu, row: ListRow) -> None:
        text = tr("Close") if row.is_open else tr("Open")
        _add(menu, text, lambda: self.folder_toggled.emit(row.key, not row.is_open))
        index = self.row_model.index_of(RowKind.FOLDER, row.key)
        _add(menu, tr("Rename"), lambda: self.edit(index)).setIcon(icon("edit"))
        delete = _add(
            menu, tr("Delete folder, keep its chats"), lambda: self.folder_deleted.emit(row.key)
        )
        delete.setIcon(icon("delete", theme().danger))

    def _set_icon_size(self, pixels: int) -> None:
        self.setIconSize(QSize(pixels, pixels))

    def _current(self) -> ListRow | None:
        return self.row_model.row_at(self.currentIndex())

    def _select(self, chat_ids: set[str], at: ListRow | None) -> None:
        rows = self.row_model
        selection = QItemSelection()
        for chat_id in chat_ids:
            index = rows.index_of(RowKind.CHAT, chat_id)
            if index.isValid():
                selection.select(index, index)
        current = rows.index_of(at.kind, at.key) if at is not None and self.hasFocus() else None
        if current is None or not current.isValid():
            current = selection.indexes()[0] if selection.indexes() else QModelIndex()
        model, flag = self.selectionModel(), QItemSelectionModel.SelectionFlag
        model.setCurrentIndex(current, flag.NoUpdate)
        model.select(selection, flag.ClearAndSelect)

    def _open(self, row: ListRow | None) -> None:
        if row is None:
            return
        if row.kind is RowKind.CHAT:
            self.chosen.emit(row.key)
        elif row.kind is RowKind.FOLDER:
            self.folder_toggled.emit(row.key, not row.is_open)
        elif row.damaged is not None:
            self.damaged_chosen.emit(row.damaged)

    @Slot(QModelIndex)
    def _on_clicked(self, index: QModelIndex) -> None:
        if len(self.selectedIndexes()) <= 1:  # else the user is selecting chats
            self._open(self.row_model.row_at(index))

    @Slot(object, str)
    def _on_renamed(self, row: ListRow, text: str) -> None:
        signal = self.renamed if row.kind is RowKind.CHAT else self.folder_renamed
        signal.emit(row.key, text)

    @Slot(QPoint)
    def _open_menu(self, position: QPoint) -> None:
        menu = self.menu_for(self.row_model.row_at(self.indexAt(position)))
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.popup(self.viewport().mapToGlobal(position))

    def closeEditor(self, editor: QWidget, hint: QAbstractItemDelegate.EndEditHint) -> None:
        super().closeEditor(editor, hint)
        contents, self._waiting = self._waiting, None
        if contents is not None:
            self.show_contents(contents)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        row = self._current()
        if self.state() == QAbstractItemView.State.EditingState:
            super().keyPressEvent(event)
        elif is_pressed("delete-chat", event):
            self._delete_selected()
        elif is_pressed("open-chat", event):
            self._open(row)
        elif is_pressed("rename-chat", event):
            self.edit(self.currentIndex())
        elif row is not None and row.kind is RowKind.FOLDER and is_pressed("open-folder", event):
            self.folder_toggled.emit(row.key, True)
        elif row is not None and row.kind is RowKind.FOLDER and is_pressed("close-folder", event):
            self.folder_toggled.emit(row.key, False)
        else:
            super().keyPressEvent(event)

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:
        """Treat the second click like the first, so that it toggles a folder again."""
        self.mousePressEvent(event)

    def _delete_selected(self) -> None:
        rows = self.selected_rows
        if ids := keys_of(rows, RowKind.CHAT):
            self.delete_requested.emit(ids)
        elif names := keys_of(rows, RowKind.FOLDER):
            self.folder_deleted.emit(names[0])


def _add(menu: QMenu, text: str, act: Callable[[], object]) -> QAction:
    action = menu.addAction(caption_text(text))
    action.triggered.connect(lambda _=False: act())
    return action
