"""A table of whole rows, of which Enter and a double click choose one."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QModelIndex, Qt, Signal, Slot
from PySide6.QtGui import QKeyEvent, QResizeEvent, QShowEvent
from PySide6.QtWidgets import QHeaderView, QTableView

from app.core.scale import px
from app.widgets.shortcuts import is_pressed
from app.widgets.sizes import scaled

ROW_HEIGHT = 30
GOOD_NAME = 290
"""Width of the column of names for which other columns are hidden, in pixels."""
LEAST_NAME = 140
"""Least width of the column of names, in pixels; below it the table scrolls sideways."""


class RowTable(QTableView):
    """Table whose first column, of names, takes what the others leave.

    Args:
        name: its name for screen readers.
    """

    chosen = Signal(QModelIndex)

    def __init__(self, name: str) -> None:
        super().__init__()
        self._droppable: Sequence[int] = ()
        self._is_fitting = False
        self.doubleClicked.connect(self.chosen)
        self.setAccessibleName(name)
        self.setShowGrid(False)
        self.setWordWrap(False)
        self.setTextElideMode(Qt.TextElideMode.ElideMiddle)  # models differ at the end, too
        self.setTabKeyNavigation(False)
        self.verticalHeader().hide()
        scaled(self, self.verticalHeader().setDefaultSectionSize, ROW_HEIGHT)
        self.setEditTriggers(QTableView.EditTrigger.NoEditTriggers)
        self.setSelectionBehavior(QTableView.SelectionBehavior.SelectRows)
        self.setSelectionMode(QTableView.SelectionMode.SingleSelection)

    def set_headers(self, droppable: Sequence[int] = ()) -> None:
        """Lay out the columns; to be called once there is a model.

        Args:
            droppable: columns to hide where there is too little room for all, the first one first.
        """
        self._droppable = droppable
        header = self.horizontalHeader()
        header.setDefaultAlignment(Qt.AlignmentFlag.AlignLeft)
        header.setHighlightSections(False)  # bold names would be wider
        header.setSectionResizeMode(QHeaderView.ResizeMode.ResizeToContents)
        header.setSectionResizeMode(0, QHeaderView.ResizeMode.Interactive)
        header.setMinimumSectionSize(60)
        header.sectionResized.connect(self.fit_names)

    @Slot()
    def fit_names(self) -> None:
        """Give the names what the other columns leave, and hide columns if that is too little."""
        if self._is_fitting or not self.isVisible():  # it resizes columns, which asks for it again
            return
        self._is_fitting = True
        room = self.viewport().width() - self._drop_columns()
        self.horizontalHeader().resizeSection(0, max(px(LEAST_NAME), room))
        self._is_fitting = False

    def _drop_columns(self) -> int:
        """Hide the columns for which there is no room, and return the width of those that stay."""
        header = self.horizontalHeader()
        # not `sectionSizeHint`: it is 0 for a hidden column, which would be shown again
        widths = [
            max(
                self.sizeHintForColumn(column),
                header.sectionSizeFromContents(column).width(),
                header.minimumSectionSize(),
            )
            for column in range(1, header.count())
        ]
        room = self.viewport().width() - px(GOOD_NAME)
        for column in self._droppable:
            is_dropped = sum(widths) > room
            self.setColumnHidden(column, is_dropped)
            if is_dropped:
                widths[column - 1] = 0
        return sum(widths)

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.fit_names()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.fit_names()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if is_pressed("open-selected", event) and self.currentIndex().isValid():
            self.chosen.emit(self.currentIndex())
        else:
            super().keyPressEvent(event)
