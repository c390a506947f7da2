"""Task lists, footnotes, links and tables of answers, on screen."""

import pytest
from PySide6.QtCore import QPoint, QUrl
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QApplication, QMenu
from pytestqt.qtbot import QtBot

from app.chat.markdown import TextLine, TextSpan, parse
from app.chat.views.message_body import MessageBody
from app.chat.views.prose_view import ProseView, ask_to_open
from app.chat.views.table_view import TableView
from tests.helpers.fake_host import Script
from tests.helpers.shell_driver import MODEL, MakeShell, ask


@pytest.fixture
def body(qtbot: QtBot) -> MessageBody:
    made = MessageBody()
    qtbot.addWidget(made)
    made.resize(500, 400)
    made.show()
    return made


def lines(text: str) -> list[TextLine]:
    return [piece for piece in parse(text) if isinstance(piece, TextLine)]


def test_task_boxes_are_part_of_the_marker() -> None:
    found = lines(
        "- [ ] open\n- [x] *done*\n- [X] also\n1. [ ] first\n\n[ ] no item\n\n- [y] no box"
    )
    assert [line.marker for line in found] == ["☐", "☑", "☑", "1. ☐", "", "•"]
    assert found[0].spans == (TextSpan("open"),)
    assert found[1].spans == (TextSpan("done", italic=True),)
    assert "".join(span.text for span in found[4].spans) == "[ ] no item"


def test_footnotes_stay_where_they_were_written() -> None:
    found = lines("See[^1] and[^note].\n\n[^1]: The *note*.\n\n    More of it.\n\nAfter, [^a-z]+.")
    assert [span.note for span in found[0].spans if span.note] == ["1", "note"]
    assert [(line.note, line.marker) for line in found] == [
        ("", ""),
        ("1", "1"),
        ("1", ""),
        ("", ""),
    ]
    assert found[3].spans == (TextSpan("After, [^a-z]+."),)


def test_numbers_of_a_long_list_are_not_cut_off(body: MessageBody) -> None:
    body.set_text("\n".join(f"{n}. x" for n in range(98, 1003, 450)))
    sheet = body.findChild(ProseView)
    assert isinstance(sheet, ProseView)
    block = sheet.document().begin()
    while block.isValid():
        form = block.blockFormat()
        assert form.leftMargin() + form.textIndent() >= 0, block.text()
        block = block.next()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("see https://a.b/c.", "https://a.b/c"), ("(http://a.b/c_(d))", "http://a.b/c_(d)"),
        ("www.a.org/x?y=1&z", "http://www.a.org/x?y=1&z"), ("**https://a.b**", "https://a.b"),
        ("https://a.b/c_d_e", "https://a.b/c_d_e"), ("<https://a.b>", "https://a.b"),
        ("`https://a.b`", ""), ("ftp://a.b", ""), ("https://", ""), ("me@www.a.b", ""),
        ("www.", ""),
        ("javascript://https:", ""), ("```\nhttps://a.b\n```", ""), ("file:///x", ""),
    ],
)  # fmt: skip
def test_bare_addresses_are_links(text: str, address: str) -> None:
    found = [span.href for line in lines(text) for span in line.spans if span.href]
    assert found == ([address] if address else [])
    shown = "".join(span.text for line in lines(text) for span in line.spans)
    assert shown == text.strip("*`<>").strip() or "```" in text, "nothing is lost"


def choices(menu: QMenu) -> dict[str, object]:
    return {action.text(): action for action in menu.actions() if action.text()}


def test_a_click_shows_where_a_link_leads_and_asks(
    qtbot: QtBot, qapp: QApplication, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(QDesktopServices, "openUrl", lambda url: opened.append(url.toString()))
    parent = ProseView()
    qtbot.addWidget(parent)
    parent.write(lines("[https://bank.example](https://evil.example/?a&b)"))  # type: ignore[arg-type]
    parent.anchorClicked.emit(QUrl("https://evil.example/?a&b"))
    assert opened == [], "it asks first"
    (menu,) = parent.findChildren(QMenu)
    texts = [action.text() for action in menu.actions() if not action.isSeparator()]
    assert texts == ["https://evil.example/?a&&b", "Open in browser", "Copy address"]
    actions = {action.text(): action for action in menu.actions()}
    actions["Copy address"].trigger()
    assert qapp.clipboard().text() == "https://evil.example/?a&b"
    actions["Open in browser"].trigger()
    assert opened == ["https://evil.example/?a&b"]
    menu.close()


@pytest.mark.parametrize("address", ["file:///etc/passwd", "javascript:x", "app:y", "note"])
def test_nothing_but_the_web_is_asked_for(qtbot: QtBot, address: str) -> None:
    parent = ProseView()
    qtbot.addWidget(parent)
    assert ask_to_open(QUrl(address), QPoint(), parent) is None


WIDE = (
    "| " + " | ".join(f"column {n} of many" for n in range(12)) + " |\n" + "|---" * 12 + "|\n"
    + ("| " + " | ".join("a few words" for _ in range(12)) + " |\n") * 3
)  # fmt: skip


def test_a_wide_table_scrolls_in_its_place(qtbot: QtBot, body: MessageBody) -> None:
    body.set_text(f"before\n\n{WIDE}\nafter")
    qtbot.waitUntil(lambda: body._views[1].height() > 100 and body._views[1].width() > 400)
    table = body._views[1]
    assert isinstance(table, TableView)
    assert table.width() <= body.width()
    bar = table.horizontalScrollBar()
    assert bar.maximum() > 200
    assert bar.value() == 0, "it starts at its first column"
    rows = table.document().size().height()
    assert table.viewport().height() >= rows, "the scroll bar covers no row"
    assert table.height() < 6 * 40, "short cells do not wrap"


def test_a_narrow_table_does_not_scroll(qtbot: QtBot, body: MessageBody) -> None:
    body.set_text("| a | b |\n|---|---|\n| 1 | " + "words " * 60 + "|")
    (table,) = body._views
    assert isinstance(table, TableView)
    qtbot.waitUntil(lambda: table.width() > 400)
    assert table.horizontalScrollBar().maximum() == 0, "long cells wrap if there is room"
    assert table.height() > 80


def test_a_growing_table_writes_only_what_is_new(
    body: MessageBody, monkeypatch: pytest.MonkeyPatch
) -> None:
    body.set_text("| a | b |\n|---|--:|\n" + "| one | two |\n" * 50)
    (table,) = body._views
    assert isinstance(table, TableView)
    written: list[int] = []
    real = TableView._write_row

    def note(view: TableView, y: int, *rest: object) -> None:
        written.append(y)
        real(view, y, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(TableView, "_write_row", note)
    for text in ("| thr", "ee | **fo", "ur** |\n"):
        body.append(text)
        body.flush()
    assert body._views == [table]
    assert set(written) == {51}
    assert body.pieces_shown()[0].endswith("three\nfour\n") or "four" in body.pieces_shown()[0]


def test_a_table_that_becomes_text_again_goes(body: MessageBody) -> None:
    """Its second line may be the start of another one."""
    body.set_text("| a | b |\n|---|---|")
    assert isinstance(body._views[0], TableView)
    body.append("-x")
    body.flush()
    assert body.pieces_shown() == ["| a | b |\n|---|---|-x"]


def test_a_click_on_a_reference_scrolls_to_its_footnote(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    script.answer = (
        "See[^1].\n\n" + "A paragraph.\n\n" * 80 + "[^1]: The note.\n\n" + "End.\n\n" * 40
    )
    script.chunk = 200
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    view = shell.window.chat_view
    bar = view.verticalScrollBar()
    qtbot.waitUntil(lambda: bar.maximum() > 1000)
    bar.setValue(0)
    answer = view.last_answer()
    assert answer is not None
    prose = answer.body._views[0]
    assert isinstance(prose, ProseView)
    prose.anchorClicked.emit(QUrl("note:1"))
    place = prose.note_place("1")
    assert place is not None
    seen = prose.mapTo(view.viewport(), place.center()).y()
    assert 0 <= seen <= view.viewport().height()
