"""The rows of the list of chats as Qt's views want them, and how they are drawn and dragged."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from datetime import date
from typing import Any, Final

from PySide6.QtCore import (
    QAbstractItemModel,
    QAbstractListModel,
    QByteArray,
    QMimeData,
    QModelIndex,
    QObject,
    QPersistentModelIndex,
    Qt,
    Signal,
)
from PySide6.QtGui import QColor, QFont, QIcon, QPainter
from PySide6.QtWidgets import QStyledItemDelegate, QStyleOptionViewItem, QWidget

from app.chat.listing.rows import ListContents, ListRow, RowKind, rows_of
from app.core.scale import px
from app.core.translation import tr, tr_n
from app.widgets.text import plain_tip
from app.widgets.theme import icon, theme
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
    """Rows of `ListContents`; it asks for changes and makes none."""

    renamed = Signal(object, str)  # ListRow, new text
    moved = Signal(object, str)  # ids of chats, name of a folder or ""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.rows: list[ListRow] = []

    def set_contents(self, contents: ListContents) -> None:
        """Show other contents, if they differ from those shown."""
        rows = rows_of(contents, date.today())
        if rows != self.rows:
            self.beginResetModel()
            self.rows = rows
            self.endResetModel()

    def row_at(self, index: Index) -> ListRow | None:
        """Return the row of an index."""
        return self.rows[index.row()] if index.isValid() else None

    def index_of(self, kind: RowKind, key: str) -> QModelIndex:
        """Return the index of a row; an invalid one if it is not shown."""
        for number, row in enumerate(self.rows):
            if row.kind is kind and row.key == key:
                return self.index(number)
        return QModelIndex()

    # Qt

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
        if row is None:
            return Qt.ItemFlag.ItemIsDropEnabled
        if row.kind is RowKind.HEADING:  # a drop on one is like a drop between its chats
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
        """Ask for a move into the folder at the place of the drop, or out of all folders."""
        if not data.hasFormat(MIME):
            return False
        ids = json.loads(bytes(data.data(MIME).data()))
        target = parent.row() if parent.isValid() else row
        self.moved.emit(ids, self.folder_at(target))
        return True

    def folder_at(self, number: int) -> str:
        """Return the name of the folder in which a row lies, or which it is; "" for none."""
        for row in reversed(self.rows[: number + 1] if number >= 0 else []):
            if row.kind is RowKind.FOLDER:
                return row.key
            if not row.is_inside:
                break
        return ""


class RowDelegate(QStyledItemDelegate):
    """Drawing of the rows: chats in a folder are indented."""

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        super().paint(painter, _indented(option, index), index)

    def updateEditorGeometry(
        self, editor: QWidget, option: QStyleOptionViewItem, index: Index
    ) -> None:
        """Give the editor the height of the row: that of its text leaves none for the frame."""
        row = _indented(option, index)
        super().updateEditorGeometry(editor, row, index)
        has_sign = index.data(Qt.ItemDataRole.DecorationRole) is not None
        left = editor.geometry().left() if has_sign else row.rect.left()
        editor.setGeometry(row.rect.adjusted(left - row.rect.left(), 0, 0, 0))


def keys_of(rows: Collection[ListRow], kind: RowKind) -> list[str]:
    """Return the keys of the rows of one kind."""
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
    """Return what a screen reader says."""
    text = one_line(row.text)
    if row.kind is RowKind.FOLDER:
        state = tr("open") if row.is_open else tr("closed")
        n_chats = tr_n("{n} chat", "{n} chats", row.n_inside)
        return tr("Folder {name}, {chats}, {state}").format(name=text, chats=n_chats, state=state)
    return tr("{title}, is being answered").format(title=text) if row.is_answered else text


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
