"""A chat that becomes long while it is open shows its last turns, and earlier ones on request."""

from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.chat.conversation import Conversation
from app.chat.message import Message
from app.chat.views.chat_view import MOST_SHOWN, N_SHOWN, ChatView


def test_turns_that_are_added_push_out_the_oldest(qtbot: QtBot, qapp: QApplication) -> None:
    view = ChatView()
    qtbot.addWidget(view)
    view.resize(800, 600)
    view.show()
    chat = Conversation()
    view.show_chat(chat)
    for number in range(100):
        role = "assistant" if number % 2 else "user"
        chat.add(Message(role, f"turn {number}"))
        view.add_message(number)
        view.close_answer(number)
    assert [shown.message for shown in view.shown] == chat.messages[-MOST_SHOWN:]
    assert view._earlier.isVisible()
    view.show_earlier()
    qtbot.waitUntil(lambda: not view._more.isActive())
    assert [shown.message for shown in view.shown] == chat.messages[-MOST_SHOWN - N_SHOWN :]
    chat.truncate(98)
    view.cut(98)
    assert view.shown[-1].message is chat.messages[-1]
    chat.add(Message("user", "again"))
    view.add_message(98)
    assert [shown.message for shown in view.shown] == chat.messages[-MOST_SHOWN:]
