"""The dialog with the whole header of a model file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from PySide6.QtCore import QSortFilterProxyModel, Qt
from PySide6.QtGui import QStandardItemModel
from PySide6.QtWidgets import (
    QDialog,
    QHeaderView,
    QLineEdit,
    QTableView,
    QTabWidget,
    QVBoxLayout,
    QWidget,
)

from app.core.engine_sentences import translated
from app.core.translation import tr, tr_n
from app.widgets.text import label, row_item
from engine import one_line

if TYPE_CHECKING:
    from engine import Inspection


class DetailsDialog(QDialog):
    """Shows metadata and tensors of a file, with a search over both."""

    def __init__(self, inspection: Inspection, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setWindowTitle(one_line(inspection.info.name, 100))
        self.resize(760, 560)
        self.search = QLineEdit()
        self.search.setPlaceholderText(tr("Search"))
        self.search.setAccessibleName(tr("Search the header"))
        self.metadata = _table(tr("Metadata"), (tr("Key"), tr("Value")), inspection.metadata)
        self.tensors = _table(
            tr("Tensors"),
            (tr("Name"), tr("Type"), tr("Shape")),
            ((t.name, t.type, " × ".join(map(str, t.shape))) for t in inspection.tensors),
        )
        tabs = QTabWidget()
        tabs.addTab(self.metadata, tr("Metadata"))
        tabs.addTab(self.tensors, tr_n("{n} tensor", "{n} tensors", len(inspection.tensors)))
        tabs.tabBar().setAccessibleName(tr("Parts of the header"))
        layout = QVBoxLayout(self)
        layout.addWidget(self.search)
        layout.addWidget(tabs, 1)
        for warning in inspection.warnings:
            text = label(translated(warning), "warn")
            text.setWordWrap(True)
            layout.addWidget(text)
        for table in (self.metadata, self.tensors):
            self.search.textChanged.connect(_filter_of(table).setFilterFixedString)


def _table(name: str, headers: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> QTableView:
    """Return a table that can be filtered and copied from."""
    model = QStandardItemModel(0, len(headers))
    model.setHorizontalHeaderLabels(list(headers))
    for texts in rows:
        model.appendRow([row_item(text, text) for text in texts])
    shown = QSortFilterProxyModel()
    shown.setSourceModel(model)
    shown.setFilterKeyColumn(-1)
    shown.setFilterCaseSensitivity(Qt.CaseSensitivity.CaseInsensitive)
    table = QTableView()
    table.setModel(shown)
    model.setParent(table)  # Qt's views do not own what they show
    shown.setParent(table)
    table.setAccessibleName(name)
    table.setShowGrid(False)
    table.setTabKeyNavigation(False)
    table.verticalHeader().hide()
    table.setEditTriggers(QTableView.EditTrigger.NoEditTriggers)
    header = table.horizontalHeader()
    header.setHighlightSections(False)
    header.setDefaultAlignment(Qt.AlignmentFlag.AlignLeft)
    header.setSectionResizeMode(QHeaderView.ResizeMode.ResizeToContents)
    header.setStretchLastSection(True)
    return table


def _filter_of(table: QTableView) -> QSortFilterProxyModel:
    model = table.model()
    assert isinstance(model, QSortFilterProxyModel)
    return model
