"""Messages that are created in small steps, so that the window stays responsive."""

import time
from collections.abc import Generator, Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PySide6.QtCore import QPoint
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.chat.conversation import Conversation
from app.chat.markdown import MarkdownStream, Piece, Portion, Table, parse, portions
from app.chat.markdown.cutting import MAX_LINES, MAX_PARSED, MAX_ROWS
from app.chat.message import Message
from app.chat.views.answer_view import AnswerView
from app.chat.views.chat_view import ChatView
from app.chat.views.code_view import CodeView
from app.chat.views.message_body import MessageBody
from app.chat.views.message_view import MAX_SHEET, UserView, sheets
from app.chat.views.prose_view import ProseView
from app.chat.views.table_view import GRID_ROWS, TableView
from app.core.process import spare_time as spare

STEP_S = 0.1
"""Limit of the CPU time of a step: ten times the usual, as tests share the machine."""

ROW = "| {0} | **b** {0} | some words |\n"
BLOCKS = [
    "# Title\n\n", "A *paragraph*\nof two lines.\n\n", "- a\n- b\n\n  more\n\n", "3. x\n4. y\n\n",
    "> quote\n> more\n\n", "***\n\n", "```py\nx = 1\n\ny = 2\n```\n", "    indented\n\n",
    "| a | b |\n|---|--:|\n| 1 | 2 |\n\n", "See[^1].\n\n[^1]: note\n\n    of two paragraphs\n\n",
    "$$\nx\n$$\n\n", "1. x\n\n   ```\n   code\n   ```\n\n", "line\n", "\n", "\r\n", "| a |\n", "2",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(BLOCKS), max_size=8).map("".join)


def rows(n: int) -> str:
    """Return a table with a number of rows below its head."""
    return "| a | b | c |\n|---|--:|---|\n" + "".join(ROW.format(y) for y in range(n))


def code(n: int) -> str:
    return "```python\n" + "".join(f"value_{y} = {y}  # text\n" for y in range(n)) + "```\n"


HUGE = "Begin.\n\n" + code(2000) + "A paragraph of words.\n\n" * 900 + rows(200) + "\nEnd."


def cut(text: str) -> list[Portion]:
    """Return the portions of a text."""
    steps: Generator[None, None, list[Portion]] = portions(text)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return list(end.value)


def pieces_of(found: Sequence[Portion]) -> list[Piece]:
    """Return the pieces of portions after their last steps."""
    result: list[Piece] = []
    for portion in found:
        steps = list(portion.steps())
        result += steps[-1] if portion.is_one else [piece for step in steps for piece in step]
    return result


@settings(deadline=None)
@given(TEXTS)
def test_portions_have_the_pieces_of_the_text(text: str) -> None:
    assert pieces_of(cut(text)) == parse(text)


@settings(deadline=None)
@given(TEXTS, st.integers(1, 40))
def test_portions_are_found_in_windows_of_any_size(text: str, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.chat.markdown.cutting.MAX_SCANNED", size)
        patch.setattr("app.chat.markdown.cutting.MAX_PARSED", size)
        patch.setattr("app.chat.markdown.cutting.MAX_PROSE", 3 * size)
        assert pieces_of(cut(text)) == parse(text)


def test_no_step_has_much_of_a_huge_text() -> None:
    found = cut(HUGE)
    assert pieces_of(found) == parse(HUGE)
    longest = max(len(source) for portion in found for source in portion.sources[1:])
    assert longest <= MAX_PARSED
    for portion in found:
        lines, n_rows = 0, 1
        for piece, *_ in portion.steps():
            if isinstance(piece, Table):
                assert len(piece.rows) - n_rows <= MAX_ROWS
                n_rows = len(piece.rows)
            elif portion.is_one:
                now = getattr(piece, "text", "").count("\n")
                assert now - lines <= MAX_LINES
                lines = now


@settings(deadline=None, max_examples=30)
@given(st.integers(30, 120), st.integers(1, 200), st.sampled_from(["", "\n- x", "\nx\n\ny\n"]))
def test_a_long_table_streams_as_it_is_parsed(n_rows: int, chunk: int, end: str) -> None:
    text, stream, done = rows(n_rows) + end, MarkdownStream(), list[Piece]()
    for at in range(0, len(text), chunk):
        done += stream.feed(text[at : at + chunk])
    assert done + stream.tail() == parse(text)
    assert len(stream._tail) < 80 * len(ROW) or not end


@pytest.fixture
def body(qtbot: QtBot) -> Iterator[MessageBody]:
    made = MessageBody()
    qtbot.addWidget(made)
    made.resize(600, 400)
    yield made
    made._timer.stop()


def made_of(text: str, *, from_end: bool = False) -> MessageBody:
    """Return the body of a text after all steps."""
    made = MessageBody()
    made.begin(text, from_end=from_end)
    while made.make_next():
        pass
    return made


def at_once(text: str) -> list[str]:
    made = MessageBody()
    made.set_text(text)
    return made.pieces_shown()


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(TEXTS, TEXTS, st.booleans())
def test_steps_end_in_the_same_picture_and_it_can_grow(
    qtbot: QtBot, text: str, more: str, from_end: bool
) -> None:
    made = made_of(text, from_end=from_end)
    qtbot.addWidget(made)
    assert made.pieces_shown() == at_once(text)
    made.append(more)
    made.flush()
    assert made.pieces_shown() == at_once(text + more)
    made._timer.stop()


def test_an_answer_goes_on_while_its_beginning_is_made(body: MessageBody) -> None:
    """As when a chat is opened while the model writes."""
    body.begin("One.\n\n```\nx\n```\nTwo", from_end=True)
    body.make_next()
    body.append(" and three.")
    assert "three" not in "".join(body.pieces_shown())
    while body.make_next():
        pass
    assert body.pieces_shown() == ["One.", "x", "Two and three."]


def test_the_end_is_there_first(body: MessageBody) -> None:
    body.begin(HUGE, from_end=True)
    while not body.pieces_shown():
        body.make_next()
    assert body.pieces_shown() == ["End."]
    body.make_next()
    body.set_text("Another text.")
    assert not body.make_next()
    assert body.pieces_shown() == ["Another text."]


@pytest.mark.parametrize("from_end", [False, True])
def test_no_step_of_a_huge_message_takes_long(body: MessageBody, from_end: bool) -> None:
    body.show()
    times = []
    body.begin(HUGE, from_end=from_end)
    while True:
        began = time.thread_time()
        is_over = not body.make_next()
        times.append(time.thread_time() - began)
        if is_over:
            break
    assert len(times) > 40
    assert max(times) < STEP_S
    shown = body.pieces_shown()
    assert shown[0] == "Begin."
    assert shown[1].count("\n") == 1999
    assert shown[-1] == "End."
    assert shown[-2].count("some words") == 200


class Clock:
    """CPU time that advances by a millisecond with each call."""

    def __init__(self) -> None:
        self.now = 0.0

    def thread_time(self) -> float:
        self.now += 0.001
        return self.now


def test_a_turn_has_few_steps(qtbot: QtBot, monkeypatch: pytest.MonkeyPatch) -> None:
    """The visible part of any message appears immediately and keeps its position."""
    clock = Clock()
    for module in ("app.chat.views.chat_view", "app.core.process.spare_time"):
        monkeypatch.setattr(f"{module}.time.thread_time", clock.thread_time)
    chat = Conversation()
    for number in range(6):
        chat.add(Message("assistant" if number % 2 else "user", HUGE))
    view = ChatView()
    qtbot.addWidget(view)
    view.resize(700, 500)
    view.show()
    n_steps: list[int] = []
    monkeypatch.setattr(view._column, "make_next", counted(view._column.make_next, n_steps))
    n_steps.append(0)
    view.show_chat(chat)
    assert 0 < n_steps[0] <= 41, "the chat opens with enough messages to fill the view"
    bar = view.verticalScrollBar()
    while view._more.is_active:
        n_steps.append(0)
        QApplication.processEvents()
        assert bar.value() == bar.maximum()
    assert max(n_steps[1:]) <= 2 * (spare.SLICE_S / 0.001 + 1), "processEvents may be two turns"
    assert len(n_steps) > 50
    assert [shown.message for shown in view.shown] == chat.messages
    assert not view._column._unmade


def counted(step: object, counts: list[int]) -> object:
    """Return a step that increments the last count."""

    def take() -> bool:
        counts[-1] += 1
        return bool(step())  # type: ignore[operator]

    return take


def test_what_is_read_stays_while_the_message_grows_above_it(
    qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.core.process.spare_time.SLICE_S", 0.0)  # one step at a time
    monkeypatch.setattr("app.chat.views.chat_view.AT_ONCE_S", 0.0)
    chat = Conversation()
    chat.add(Message("user", "Hi"))
    text = "".join(f"Part {n}.\n\n```\n{n}\n```\n\n" for n in range(60))
    chat.add(Message("assistant", text))
    view = ChatView()
    qtbot.addWidget(view)
    view.resize(700, 300)
    view.show()
    view.show_chat(chat)
    answer = view.shown[0]
    assert isinstance(answer, AnswerView)
    while len(answer.body.pieces_shown()) < 20:
        QApplication.processEvents()
    bar = view.verticalScrollBar()
    bar.setValue(bar.maximum() - 250)
    block = answer.body._views[-6]
    places = {block.mapTo(view.viewport(), QPoint()).y()}
    while view._more.is_active:
        QApplication.processEvents()
        places.add(block.mapTo(view.viewport(), QPoint()).y())
    assert len(places) == 1
    assert answer.body.pieces_shown() == at_once(text)
    assert len(view.shown) == 2


@pytest.mark.parametrize("text", ["", "short", "a\n" * 5000, "x" * 9000, "y" * 5000 + "\nz"])
def test_a_long_question_is_shown_in_parts(qtbot: QtBot, text: str) -> None:
    parts = list(sheets(text))
    assert all(len(part) <= MAX_SHEET for part in parts)
    assert text in ("\n".join(parts), "".join(parts), "".join(parts[:2]) + "\n" + parts[-1])
    for grows_up in (False, True):
        view = UserView(Message("user", text), grows_up=grows_up)
        qtbot.addWidget(view)
        while view.make_next():
            pass
        shown = [sheet.document().toPlainText() for sheet in view._sheets]
        assert shown == (parts if text else [])
        assert view.copied_text == text


def test_grids_of_a_long_table_have_the_same_columns(qtbot: QtBot) -> None:
    made = MessageBody()
    qtbot.addWidget(made)
    made.resize(600, 400)
    made.show()
    made.set_text(rows(3 * GRID_ROWS))
    (view,) = made._views
    assert isinstance(view, TableView)
    assert len(view._grids) == 4
    for width in (600, 300, 900):
        made.resize(width, 400)
        QApplication.processEvents()
        QApplication.processEvents()
        layout = view.document().documentLayout()
        for x in range(3):
            blocks = (grid.cellAt(0, x).firstCursorPosition().block() for grid in view._grids)
            assert len({layout.blockBoundingRect(block).left() for block in blocks}) == 1
    assert view.plain_text.count("some words") == 3 * GRID_ROWS


def test_a_row_that_becomes_a_list_takes_its_grid_along(qtbot: QtBot) -> None:
    made = MessageBody()
    qtbot.addWidget(made)
    made.set_text(rows(GRID_ROWS - 1) + "1")
    (view,) = made._views
    assert isinstance(view, TableView)
    assert len(view._grids) == 2
    made.append(". one\n")
    made.flush()
    assert made._views[0] is view
    assert len(view._grids) == 1
    assert made.pieces_shown() == at_once(rows(GRID_ROWS - 1) + "1. one\n")
    made._timer.stop()


def test_a_growing_table_lays_out_its_last_rows_only(
    body: MessageBody, monkeypatch: pytest.MonkeyPatch
) -> None:
    body.set_text(rows(200))
    (view,) = body._views
    assert isinstance(view, TableView)
    grids = list(view._grids)
    written: list[int] = []
    real = TableView._write_row

    def note(view: TableView, y: int, *rest: object) -> None:
        written.append(y)
        real(view, y, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(TableView, "_write_row", note)
    body.append("| new | row | x |\n")
    body.flush()
    assert written == [201]
    assert view._grids == grids
    assert len(body._stream.tail()[0].rows) == 202  # type: ignore[union-attr]
    assert len(body._stream._tail) < 40 * len(ROW), "complete rows are parsed once"


def test_long_code_is_coloured_between_events(qtbot: QtBot) -> None:
    made = MessageBody()
    qtbot.addWidget(made)
    made.show()
    made.set_text(code(400))
    (view,) = made._views
    assert isinstance(view, CodeView)
    document = view._text.document()

    def is_coloured(line: int) -> bool:
        return bool(document.findBlockByNumber(line).layout().formats())

    qtbot.waitUntil(lambda: is_coloured(399), timeout=20_000)
    assert all(map(is_coloured, range(400)))
    made.append("\n```python\nx = 1\n")
    made.flush()
    assert view.plain_text.count("\n") == 399
    made._timer.stop()


def test_sheets_and_answers_are_prose(qtbot: QtBot) -> None:
    """Incomplete portions are hidden."""
    made = MessageBody()
    qtbot.addWidget(made)
    made.show()
    made.begin(rows(60) + "\nafter")
    while not made._views:
        made.make_next()
        hidden = [view for view in made.findChildren(TableView) if view not in made._views]
        assert not any(view.isVisible() for view in hidden)
    assert made._views[0].isVisible()
    while made.make_next():
        pass
    assert isinstance(made._views[-1], ProseView)
