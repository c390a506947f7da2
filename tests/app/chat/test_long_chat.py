"""A chat that becomes long while it is open shows its last turns, and earlier ones on request."""

from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.chat.conversation import Conversation
from app.chat.message import Message
from app.chat.views.chat_view import ChatView
from app.chat.views.message_column import MOST_SHOWN


def test_turns_that_are_added_push_out_the_oldest(qtbot: QtBot, qapp: QApplication) -> None:
    view = ChatView()
    qtbot.addWidget(view)
    view.resize(800, 600)
    view.show()
    chat = Conversation()
    view.show_chat(chat)
    for number in range(100):
        role = "assistant" if number % 2 else "user"
        growing = chat.add(Message(role, f"turn {number}"))
        view.show_path(growing)
        view.close_answer(growing.id)
    qtbot.waitUntil(lambda: not view._more.isActive())
    assert [shown.message for shown in view.shown] == chat.messages[-MOST_SHOWN:]
