"""Tables of whole rows, which hide columns for which there is no room."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QObject
from PySide6.QtGui import QStandardItem, QStandardItemModel
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.widgets.row_table import GOOD_NAME, MIN_NAME, RowTable

HEADERS = ("Name", "Size", "Quantisation", "Longest context", "Speed here", "Last used")
ROUNDS = 4
"""Turns of the event loop in which a table of another width must come to rest."""


class _Fits(QObject):
    """Counter of the times that a table has been asked to fit its columns."""

    def __init__(self, table: RowTable) -> None:
        super().__init__(table)
        self.n = 0
        table.horizontalHeader().sectionResized.connect(self._count)

    def _count(self) -> None:
        self.n += 1


def _table(qtbot: QtBot, n_rows: int) -> RowTable:
    model = QStandardItemModel(0, len(HEADERS))
    model.setHorizontalHeaderLabels(HEADERS)
    for number in range(n_rows):
        texts = (f"model {number} with a long name", "4.4 GB", "Q4_K_M", "32 768", "12 tok/s", "-")
        model.appendRow([QStandardItem(text) for text in texts])
    table = RowTable("Models")
    model.setParent(table)
    table.setModel(model)
    table.set_headers((5, 2, 3, 4))
    qtbot.addWidget(table)
    return table


@pytest.mark.parametrize("n_rows", [0, 3])
def test_columns_come_to_rest_at_every_width(n_rows: int, qtbot: QtBot) -> None:
    """Columns without room were shown and hidden in turns, which took a core for good."""
    table = _table(qtbot, n_rows)
    table.resize(900, 300)
    table.show()
    fits, restless = _Fits(table), []
    for width in range(320, 860):
        table.resize(width, 300)
        for _ in range(ROUNDS):
            fits.n = 0
            QApplication.processEvents()
        if fits.n:
            restless.append(width)
    assert not restless


def test_columns_without_room_are_hidden_and_come_back(qtbot: QtBot) -> None:
    table = _table(qtbot, 3)
    table.resize(900, 300)
    table.show()
    for width in (1400, 700, 500, 300, 1400):
        table.resize(width, 300)
        QApplication.processEvents()
        shown = [column for column in range(len(HEADERS)) if not table.isColumnHidden(column)]
        widths = [table.columnWidth(column) for column in shown]
        assert widths[0] >= MIN_NAME
        assert 1 in shown  # it is none of those that may go
        if len(shown) > 2:
            assert widths[0] >= GOOD_NAME
        assert (len(shown) == len(HEADERS)) == (width == 1400)
