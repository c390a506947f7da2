"""A message: the text that its copy button copies."""

import pytest
from pytestqt.qtbot import QtBot

from app.chat.message import AnswerStats, Message
from app.chat.views.answer_view import AnswerView
from app.chat.views.message_view import MessageView, UserView


@pytest.mark.parametrize(
    ("kind", "role", "copied"),
    [(UserView, "user", "<think>a</think>b"), (AnswerView, "assistant", "b")],
)
def test_a_question_is_copied_whole_and_an_answer_without_its_thoughts(
    qtbot: QtBot, kind: type[MessageView], role: str, copied: str
) -> None:
    view = kind(Message(role, "<think>a</think>b"))
    qtbot.addWidget(view)
    assert view.copied_text == copied


def test_the_footer_keeps_the_speed_where_there_is_little_room(qtbot: QtBot) -> None:
    """Its tooltip has the rest, and below some width the buttons move under it."""
    stats = AnswerStats("length", 412, 61.84, 0.31, 500, 99, 77, 2.2)
    view = AnswerView(Message("assistant", "Hi", stats))
    qtbot.addWidget(view)
    view.set_last(True)
    view.close_answer()
    figures, buttons = view.footer.figures, view.footer.buttons
    view.show()
    for width, is_below in ((900, False), (524, False), (280, True)):
        view.resize(width, 200)
        qtbot.waitUntil(lambda: (buttons.y() > figures.y()) is is_below)  # noqa: B023
        assert figures.text().startswith("61.8 tok/s")
        assert figures.fontMetrics().horizontalAdvance(figures.text()) <= figures.width()
        is_whole = figures.text().endswith("max tokens")
        assert ("77 of 99 draft tokens" in figures.toolTip()) is not is_whole
        assert "max tokens" in figures.text()
