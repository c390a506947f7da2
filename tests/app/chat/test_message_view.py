"""A message: the text that its copy button copies."""

import pytest
from pytestqt.qtbot import QtBot

from app.chat.message import Message
from app.chat.views.message_view import AnswerView, MessageView, UserView


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
