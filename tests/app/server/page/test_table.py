"""The table of requests stays cheap, however many there are, and shows all of each text."""

from dataclasses import replace
from typing import Any

import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.server.page.log_view import MAX_SHOWN, ShownRequest
from app.server.page.request_table import CLIENT, ROUTE, RequestRows, RequestTable
from tests.helpers.server_views import WRITING


@pytest.fixture
def table(qtbot: QtBot) -> RequestTable:
    made = RequestTable()
    qtbot.addWidget(made)
    made.resize(380, 400)
    made.show()
    return made


def requests(newest: int) -> tuple[ShownRequest, ...]:
    """Return as many requests as are shown, of which the oldest have the longest texts."""
    return tuple(
        replace(
            WRITING, number=newest - at, n_tokens=40 * at * at, tokens_per_s=at * 7.7,
            client=f"192.168.1.{at}", phase="writing" if at < 8 else "ended",
        )
        for at in range(MAX_SHOWN)
    )  # fmt: skip


def test_a_look_at_many_requests_asks_for_few_texts(
    table: RequestTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qt would ask for those of all rows to find the widest: 35 ms each second."""
    asked, data = 0, RequestRows.data

    def counted(self: RequestRows, *args: Any) -> Any:
        nonlocal asked
        asked += 1
        return data(self, *args)

    monkeypatch.setattr(RequestRows, "data", counted)
    for newest in (1000, 1003):
        asked = 0
        table.show_requests(requests(newest))
        QApplication.processEvents()
        assert 0 < asked < 2000  # some 15 rows are seen


def test_columns_have_room_for_their_widest_text(table: RequestTable) -> None:
    table.show_requests(requests(1000))
    for column in range(table.rows.columnCount()):
        if column != ROUTE:  # which gets the rest
            assert table.columnWidth(column) >= table.sizeHintForColumn(column)
    table.show_requests(requests(1000)[:1])
    assert table.isColumnHidden(CLIENT)
    assert table.columnWidth(ROUTE) >= table.sizeHintForColumn(ROUTE)


def test_rows_follow_what_requests_do(table: RequestTable) -> None:
    table.show_requests(requests(1000))
    table.selectRow(3)
    ended = replace(requests(1000)[3], phase="ended", status=499)
    table.show_requests((*requests(1000)[:3], ended, *requests(1000)[4:]))
    status = table.rows.index(3, 2)
    assert status.data() == "499"
    assert table.selectionModel().isRowSelected(3)
