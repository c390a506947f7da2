"""The rows of the list of chats and their order."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from pathlib import Path

from app.chat.conversation import ChatSummary, DamagedChat
from app.chat.listing.folders import ListContents, RowKind, Shelf, rows_of

TODAY = date(2026, 11, 22)


def chat(name: str, days_ago: int) -> ChatSummary:
    noon = datetime.combine(TODAY - timedelta(days=days_ago), datetime.min.time())
    return ChatSummary(name, name.title(), noon.timestamp() + 3600)


CHATS = [chat("old", 40), chat("new", 0), chat("week", 3), chat("day", 1)]


def texts(contents: ListContents) -> list[str]:
    return [row.text for row in rows_of(contents, TODAY)]


def test_chats_by_day_newest_first() -> None:
    assert texts(ListContents(CHATS)) == [
        "TODAY", "New", "YESTERDAY", "Day", "THIS WEEK", "Week", "EARLIER", "Old",
    ]  # fmt: skip


def test_pinned_chats_come_first_then_folders_with_theirs() -> None:
    shelf = Shelf().moved(["day", "old", "gone"], "Work").with_folder("Empty")
    shelf = shelf.with_pins(["old"], is_pinned=True)
    contents = ListContents(CHATS, shelf)
    assert texts(contents) == [
        "PINNED", "Old", "FOLDERS", "Work", "Day", "Empty", "TODAY", "New", "THIS WEEK", "Week",
    ]  # fmt: skip
    rows = {row.text: row for row in rows_of(contents, TODAY)}
    assert rows["Day"].is_inside
    assert not rows["Old"].is_inside
    assert rows["Work"].n_inside == 1
    closed = ListContents(CHATS, shelf.opened("Work", is_open=False))
    assert "Day" not in texts(closed)
    assert not next(row for row in rows_of(closed, TODAY) if row.text == "Work").is_open


def test_answered_chats_are_marked_and_damaged_files_are_last() -> None:
    damaged = DamagedChat(Path("/x/broken.json"), "it contains no intact chat")
    rows = rows_of(ListContents(CHATS[:2], damaged=[damaged], answered={"old"}), TODAY)
    assert [row.key for row in rows if row.is_answered] == ["old"]
    assert [row.text for row in rows[-2:]] == ["DAMAGED", "broken.json"]
    assert rows[-1].kind is RowKind.DAMAGED


def test_a_chat_without_a_title_and_times_out_of_range() -> None:
    assert texts(ListContents([ChatSummary("a", "", -5.0)])) == ["EARLIER", "New chat"]
