"""The repositories that a search has found."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QModelIndex, QSortFilterProxyModel, Qt, Signal, Slot
from PySide6.QtGui import QStandardItem, QStandardItemModel
from PySide6.QtWidgets import QVBoxLayout, QWidget

from app.core.translation import tr
from app.models.downloads.hub.client import FoundRepo
from app.models.downloads.texts import result_cells, result_headers
from app.models.library.texts import LibraryCell
from app.widgets.row_table import RowTable
from app.widgets.text import row_item

ORDER = Qt.ItemDataRole.UserRole
KEY = Qt.ItemDataRole.UserRole + 1


def row_of(cells: Sequence[LibraryCell], key: str) -> list[QStandardItem]:
    """Return the items of a row; `key` says what it stands for."""
    items = []
    for cell in cells:
        item = row_item(cell.text, cell.tip)
        item.setData(cell.order, ORDER)
        item.setData(key, KEY)
        items.append(item)
    return items


class ResultsView(QWidget):
    """Table of repositories, in the order of the hub until a header is clicked."""

    chosen = Signal(str)  # repository

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._rows = QStandardItemModel(0, len(result_headers()), self)
        self._rows.setHorizontalHeaderLabels(list(result_headers()))
        self._sorted = QSortFilterProxyModel(self)
        self._sorted.setSortRole(ORDER)
        self._sorted.setSourceModel(self._rows)
        self.table = RowTable(tr("Repositories"))
        self.table.setModel(self._sorted)
        self.table.setSortingEnabled(True)
        self.table.set_headers()
        self.table.chosen.connect(self._on_chosen)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self.table)

    def show_found(self, found: Sequence[FoundRepo]) -> None:
        """Show these repositories in place of others, and select the first."""
        self._rows.setRowCount(0)
        for one in found:
            self._rows.appendRow(row_of(result_cells(one), one.repo))
        self.table.sortByColumn(-1, Qt.SortOrder.AscendingOrder)
        if found:
            self.table.setCurrentIndex(self._sorted.index(0, 0))

    @Slot(QModelIndex)
    def _on_chosen(self, index: QModelIndex) -> None:
        self.chosen.emit(str(index.siblingAtColumn(0).data(KEY)))
