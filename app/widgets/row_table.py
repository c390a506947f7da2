"""A table of whole rows, of which Enter and a double click choose one."""

from __future__ import annotations

from PySide6.QtCore import QModelIndex, Qt, Signal, Slot
from PySide6.QtGui import QKeyEvent, QResizeEvent
from PySide6.QtWidgets import QHeaderView, QTableView

from app.widgets.shortcuts import is_pressed
from app.widgets.sizes import scaled

ROW_HEIGHT = 30
LEAST_NAME = 220
"""Least width of the column of names, in pixels; below it the table scrolls sideways."""


class RowTable(QTableView):
    """Table whose first column, of names, takes what the others leave.

    Args:
        name: its name for screen readers.
    """

    chosen = Signal(QModelIndex)

    def __init__(self, name: str) -> None:
        super().__init__()
        self.doubleClicked.connect(self.chosen)
        self.setAccessibleName(name)
        self.setShowGrid(False)
        self.setTabKeyNavigation(False)
        self.verticalHeader().hide()
        scaled(self, self.verticalHeader().setDefaultSectionSize, ROW_HEIGHT)
        self.setEditTriggers(QTableView.EditTrigger.NoEditTriggers)
        self.setSelectionBehavior(QTableView.SelectionBehavior.SelectRows)
        self.setSelectionMode(QTableView.SelectionMode.SingleSelection)

    def set_headers(self) -> None:
        """Lay out the columns; to be called once there is a model."""
        header = self.horizontalHeader()
        header.setDefaultAlignment(Qt.AlignmentFlag.AlignLeft)
        header.setSectionResizeMode(QHeaderView.ResizeMode.ResizeToContents)
        header.setSectionResizeMode(0, QHeaderView.ResizeMode.Interactive)
        header.setMinimumSectionSize(60)
        header.sectionResized.connect(self.fit_names)

    @Slot()
    def fit_names(self) -> None:
        """Give the names what the other columns leave."""
        header = self.horizontalHeader()
        others = header.length() - header.sectionSize(0)
        width = max(LEAST_NAME, self.viewport().width() - others)
        if width != header.sectionSize(0):
            header.resizeSection(0, width)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.fit_names()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if is_pressed("open-selected", event) and self.currentIndex().isValid():
            self.chosen.emit(self.currentIndex())
        else:
            super().keyPressEvent(event)
