"""A chat that becomes long while open shows its last messages, and earlier ones on request."""

import pytest
from PySide6.QtCore import QPoint
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.chat.conversation import Conversation
from app.chat.message import Message
from app.chat.views.chat_view import ChatView
from app.chat.views.message_column import MAX_SHOWN, N_SHOWN, TOP_PIXELS
from tests.helpers.shell_driver import WAIT_MS


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
    qtbot.waitUntil(lambda: not view._more.is_active, timeout=WAIT_MS)
    assert [shown.message for shown in view.shown] == chat.messages[-MAX_SHOWN:]


@pytest.fixture
def view(qtbot: QtBot) -> ChatView:
    made = ChatView()
    qtbot.addWidget(made)
    made.resize(700, 500)
    made.show()
    return made


def chat_of(n_messages: int) -> Conversation:
    """Return a chat whose messages have different heights."""
    chat = Conversation()
    for number in range(n_messages):
        role = "assistant" if number % 2 else "user"
        chat.add(Message(role, f"turn {number}\n\n" + "more\n\n```\ncode\n```\n" * (number % 5)))
    return chat


def settled(qtbot: QtBot, view: ChatView) -> None:
    qtbot.waitUntil(lambda: not view._more.is_active, timeout=WAIT_MS)


def height_of(view: ChatView, message: Message) -> int:
    """Return the distance of a message from the view's top."""
    (found,) = [shown for shown in view.shown if shown.message is message]
    return found.mapTo(view.viewport(), QPoint()).y()


@pytest.mark.parametrize("number", [0, 3, 700, 1500, 1990])
def test_a_message_that_is_looked_for_is_at_the_top(
    qtbot: QtBot, view: ChatView, number: int
) -> None:
    """It stays there while the messages around it are created."""
    chat = chat_of(2000)
    view.show_chat(chat)
    view.show_message(chat.messages[number].id)
    qtbot.wait(1)
    heights = set()
    while view._more.is_active:
        heights.add(height_of(view, chat.messages[number]))
        qtbot.wait(1)
    heights.add(height_of(view, chat.messages[number]))
    assert heights == {TOP_PIXELS}
    assert len(view.shown) <= N_SHOWN * 2
    view.show_message(12345)
    assert height_of(view, chat.messages[number]) in heights, "there is no such message"


def test_scrolling_leads_through_all_messages_with_few_at_a_time(
    qtbot: QtBot, view: ChatView
) -> None:
    chat = chat_of(4 * MAX_SHOWN)
    view.show_chat(chat)
    settled(qtbot, view)
    bar, seen = view.verticalScrollBar(), set[int]()
    for direction in (-1, 1):
        seen.clear()
        for _ in range(2000):
            bar.setValue(bar.value() + direction * 900)
            settled(qtbot, view)
            seen |= {shown.message.id for shown in view.shown}
            assert len(view.shown) <= MAX_SHOWN + 2 * N_SHOWN
            if bar.value() == (0 if direction < 0 else bar.maximum()):
                break
        assert seen == {message.id for message in chat.tree}
    assert view.shown[-1].message is chat.messages[-1]


def test_what_is_seen_stays_while_messages_far_away_go(qtbot: QtBot, view: ChatView) -> None:
    chat = chat_of(4 * MAX_SHOWN)
    view.show_chat(chat)
    settled(qtbot, view)
    bar = view.verticalScrollBar()
    for _ in range(80):
        bar.setValue(bar.value() - 300)
        first = next(s for s in view.shown if s.geometry().bottom() > bar.value())
        before = height_of(view, first.message)
        while view._more.is_active:
            qtbot.wait(1)
            assert height_of(view, first.message) == before
    assert view.shown[-1].message is not chat.messages[-1], "the end was removed from the column"


def test_another_version_far_above_shows_its_branch_there(qtbot: QtBot, view: ChatView) -> None:
    chat = chat_of(200)
    chat.add(Message("assistant", "Another."), 1)
    for number in range(100):
        chat.add(Message("assistant" if number % 2 else "user", f"other {number}"))
    view.show_chat(chat)
    view.show_message(chat.messages[1].id)
    settled(qtbot, view)
    question = chat.messages[0]
    before = height_of(view, question)
    chat.tree.choose(2)
    view.show_path()
    assert [shown.message.id for shown in view.shown[:2]] == [1, 2]
    settled(qtbot, view)
    assert height_of(view, question) == before
    assert [shown.message for shown in view.shown] == chat.messages[: len(view.shown)]
    assert len(view.shown) >= N_SHOWN


def test_a_question_from_far_above_leads_to_its_answer_at_the_end(
    qtbot: QtBot, view: ChatView
) -> None:
    chat = chat_of(200)
    view.show_chat(chat)
    view.show_message(1)
    settled(qtbot, view)
    chat.add(Message("user", "And now?"))
    growing = chat.add(Message("assistant", "Well"))
    view.show_path(growing)
    settled(qtbot, view)
    assert view.shown[-1].message is growing
    bar = view.verticalScrollBar()
    qtbot.waitUntil(lambda: bar.value() == bar.maximum() > 0)
