"""Versions and branches in the real window: none is lost, whatever else happens."""

from collections.abc import Sequence

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication, QMenu, QToolButton
from pytestqt.qtbot import QtBot

from app.chat.conversation import Conversation
from app.chat.views.answer_view import AnswerView
from app.chat.views.message_view import MessageView
from app.main import Shell
from tests.helpers.fake_host import Script
from tests.helpers.shell_driver import MODEL, MakeShell, answered, ask, banner, prompts, shown

HELLO = "Hello from the fake model."


def view_of(shell: Shell, text: str) -> MessageView:
    """Return the view of the message that starts with a text."""
    found = [v for v in shell.window.chat_view.shown if v.copied_text.startswith(text)]
    return found[-1]


def step(qtbot: QtBot, view: MessageView, text: str) -> None:
    """Choose an action in the menu of a message."""
    (more,) = [b for b in view.findChildren(QToolButton) if b.accessibleName().startswith("More ")]
    qtbot.mouseClick(more, Qt.MouseButton.LeftButton)
    qtbot.waitUntil(lambda: isinstance(QApplication.activePopupWidget(), QMenu))
    menu = QApplication.activePopupWidget()
    assert isinstance(menu, QMenu)
    (action,) = [action for action in menu.actions() if action.text() == text]
    action.trigger()
    menu.close()


def again(qtbot: QtBot, shell: Shell, script: Script, text: str, *, of: str) -> None:
    """Regenerate an answer with another text."""
    script.answer = text
    step(qtbot, view_of(shell, of), "Regenerate")
    qtbot.waitUntil(lambda: not shell.session.is_busy)


def other_version(qtbot: QtBot, view: MessageView, button: str) -> None:
    """Click one of the buttons next to 1/2."""
    name = f"{button} version"
    (found,) = [b for b in view.findChildren(QToolButton) if b.accessibleName() == name]
    qtbot.mouseClick(found, Qt.MouseButton.LeftButton)


def edit(qtbot: QtBot, view: MessageView, text: str, *keys: Qt.KeyboardModifier) -> None:
    """Edit a message and press Enter, with or without a modifier."""
    view.start_editing()
    assert view._editor is not None
    view._editor.edit.setPlainText(text)
    qtbot.keyClick(view._editor.edit, Qt.Key.Key_Return, *keys)


def marks(shell: Shell) -> list[str]:
    return [view.versions.text for view in shell.window.chat_view.shown]


def test_an_answer_that_is_given_again_stays_as_a_version(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    ask(qtbot, shell, "Thanks")
    again(qtbot, shell, script, "Another.", of="Hello")
    assert shown(shell) == ["Hi", HELLO, "Thanks", "Another."]
    again(qtbot, shell, script, "First anew.", of="Hello")
    assert shown(shell) == ["Hi", "First anew."]
    assert marks(shell) == ["", "2/2"]
    assert prompts(shell)[-1] == [("user", "Hi")]
    n_asked = len(prompts(shell))
    other_version(qtbot, view_of(shell, "First"), "Previous")
    assert shown(shell) == ["Hi", HELLO, "Thanks", "Another."], "immediately, and all after it"
    assert marks(shell) == ["", "1/2", "", "2/2"]
    other_version(qtbot, view_of(shell, "Another."), "Previous")
    assert shown(shell) == ["Hi", HELLO, "Thanks", HELLO]
    assert len(prompts(shell)) == n_asked
    ask(qtbot, shell, "Go on")
    assert [text for _, text in prompts(shell)[-1]][1::2] == ["Hello from the **fake** model."] * 2


def test_a_question_in_other_words_is_a_branch(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "First")
    ask(qtbot, shell, "Second")
    script.answer = "A better answer."
    edit(qtbot, view_of(shell, "First"), "Better")
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    assert shown(shell) == ["Better", "A better answer."]
    assert marks(shell) == ["2/2", ""]
    other_version(qtbot, view_of(shell, "Better"), "Previous")
    assert shown(shell) == ["First", HELLO, "Second", HELLO]
    assert marks(shell) == ["1/2", "", "", ""]


def everything(chat: Conversation) -> object:
    return chat.to_json()["messages"], chat.tree.chosen


def test_all_of_it_is_there_after_a_restart(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    again(qtbot, shell, script, "Another.", of="Hello")
    edit(qtbot, view_of(shell, "Hi"), "Hi there")
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    edit(qtbot, view_of(shell, "Another."), "Mine.", Qt.KeyboardModifier.ControlModifier)
    other_version(qtbot, view_of(shell, "Hi there"), "Previous")
    other_version(qtbot, view_of(shell, "Another."), "Previous")
    before = everything(shell.session.current)
    shell.window.close()
    shell = make_shell(model=MODEL)
    assert everything(shell.session.current) == before
    assert shown(shell) == ["Hi", HELLO]
    assert marks(shell) == ["1/2", "1/2"]
    other_version(qtbot, view_of(shell, "Hi"), "Next")
    assert shown(shell) == ["Hi there", "Mine."]
    ask(qtbot, shell, "Go on")
    assert prompts(shell)[-1] == [("user", "Hi there"), ("assistant", "Mine."), ("user", "Go on")]


def test_versions_by_keyboard(qtbot: QtBot, make_shell: MakeShell, script: Script) -> None:
    """Alt with an arrow key switches versions, and the buttons keep the focus."""
    shell = make_shell(model=MODEL)
    shell.window.activateWindow()
    qtbot.waitUntil(shell.window.isActiveWindow)
    ask(qtbot, shell, "Hi")
    for text in ("Second.", "Third."):
        script.answer = text
        key = Qt.KeyboardModifier.ControlModifier
        qtbot.keyClick(shell.window.composer.edit, Qt.Key.Key_R, key)
        qtbot.waitUntil(lambda: not shell.session.is_busy)
    view = shell.window.chat_view
    view.setFocus()
    qtbot.keyClick(view, Qt.Key.Key_Left, Qt.KeyboardModifier.AltModifier)
    assert shown(shell)[1] == "Second."
    switch = view.shown[1].versions
    assert switch._count.accessibleName() == "Version 2 of 3"
    switch._older.setFocus()
    qtbot.keyClick(switch._older, Qt.Key.Key_Space)
    assert shown(shell)[1] == HELLO
    switch = view.shown[1].versions
    assert not switch._older.isEnabled()
    qtbot.waitUntil(switch._newer.hasFocus)
    qtbot.keyClick(switch._newer, Qt.Key.Key_Right, Qt.KeyboardModifier.AltModifier)
    assert shown(shell)[1] == "Second."
    assert view.shown[1].versions._newer.hasFocus()


def undo(shell: Shell) -> None:
    assert shell.window.banner._action.text() == "Undo"
    shell.window.banner._action.click()


def test_an_answer_is_changed_in_its_place(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    script.answer = "<think>hm</think>\n\nOne.\n\nTwo."
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    ask(qtbot, shell, "Thanks")
    step(qtbot, view_of(shell, "One"), "Edit answer")
    view = view_of(shell, "One")
    assert view._editor is not None
    assert view._editor.edit.toPlainText() == "One.\n\nTwo."
    qtbot.keyClick(view._editor.edit, Qt.Key.Key_Return)
    qtbot.keyClicks(view._editor.edit, "Three.")
    qtbot.keyClick(view._editor.edit, Qt.Key.Key_Return, Qt.KeyboardModifier.ControlModifier)
    message = shell.session.current.messages[3]
    assert message.content == "<think>hm</think>\n\nOne.\n\nTwo.\nThree."
    view = view_of(shell, "One.\n\nTwo.\nThree.")
    assert isinstance(view, AnswerView)
    assert view.footer.figures.accessibleName().endswith("end of turn · edited")
    undo(shell)
    assert shown(shell)[3] == "One.\nTwo."
    assert not shell.session.current.messages[3].edited
    view = view_of(shell, "One.")
    view.start_editing()
    assert view._editor is not None
    qtbot.keyClick(view._editor.edit, Qt.Key.Key_Escape)
    assert view._editor is None
    assert shown(shell)[3] == "One.\nTwo."


@pytest.mark.parametrize(
    ("text", "name", "left"),
    [
        ("Second", "Delete message", ["First", HELLO, HELLO]),
        ("First", "Delete message", [HELLO, "Second", HELLO]),
        ("Second", "Delete this and all that follow", ["First", HELLO]),
        ("First", "Delete this and all that follow", []),
    ],
)
def test_a_message_goes_and_comes_back(
    qtbot: QtBot, make_shell: MakeShell, text: str, name: str, left: Sequence[str]
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "First")
    ask(qtbot, shell, "Second")
    before = everything(shell.session.current)
    step(qtbot, view_of(shell, text), name)
    assert shown(shell) == left
    assert shell.window.chat_view.isVisible() == bool(left)
    n = 4 - len(left)
    assert banner(shell) == (
        "The message was deleted." if "follow" not in name else f"{n} messages were deleted."
    )
    undo(shell)
    assert shown(shell) == ["First", HELLO, "Second", HELLO]
    assert everything(shell.session.current) == before
    step(qtbot, view_of(shell, text), name)
    shell.window.close()
    assert shown(make_shell()) == left


def test_the_other_version_is_shown_after_one_is_deleted(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    again(qtbot, shell, script, "Another.", of="Hello")
    step(qtbot, view_of(shell, "Another."), "Delete message")
    assert (shown(shell), marks(shell)) == (["Hi", HELLO], ["", ""])


def test_a_fork_is_a_chat_of_its_own(qtbot: QtBot, make_shell: MakeShell, script: Script) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "First")
    ask(qtbot, shell, "Second")
    first = shell.session.current
    step(qtbot, view_of(shell, "Hello"), "New chat from here")
    assert shell.session.current is not first
    assert shown(shell) == ["First", HELLO, "Second", HELLO]
    shell.chat_presenter.open_chat(first.id)
    step(qtbot, shell.window.chat_view.shown[1], "New chat from here")
    assert shown(shell) == ["First", HELLO]
    assert shell.session.current.shown_title == "First (fork)"
    ask(qtbot, shell, "Elsewhere")
    assert len(first.tree) == 4
    shell.window.close()
    assert len(make_shell().session.library.summaries) == 3


def test_text_that_is_typed_stays_with_its_chat_when_a_fork_opens(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "First")
    first = shell.session.current
    qtbot.keyClicks(shell.window.composer.edit, "half a question")
    step(qtbot, view_of(shell, "Hello"), "New chat from here")
    assert (first.draft, shell.session.current.draft) == ("half a question", "")
    assert shell.window.composer.text == ""


def test_undo_leaves_a_chat_deleted_that_was_deleted_since(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "First")
    edit(qtbot, view_of(shell, "Hello"), "Mine.", Qt.KeyboardModifier.ControlModifier)
    notice = shell.window.banner.notice
    assert notice is not None
    assert notice.on_action is not None
    shell.chat_presenter.delete_chats([shell.session.current.id])
    notice.on_action()
    assert shell.session.library.summaries == []
    shell.window.close()
    assert make_shell().session.library.summaries == []


def test_other_versions_are_seen_while_one_is_written(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    script.hold, script.hold_after, script.answer = True, 2, "Growing slowly."
    shell.session.regenerate()
    qtbot.waitUntil(lambda: shown(shell)[-1].strip() == "Growing")
    shell.session.choose(2)
    assert (shown(shell), marks(shell)) == (["Hi", HELLO], ["", "1/2"])
    assert answered(shell) == ["Hi"]
    shell.chat_presenter.send("And now?")
    assert banner(shell).startswith("The answer is still being written.")
    shell.session.stop()
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    assert shown(shell) == ["Hi", HELLO]
    shell.session.choose(3)
    assert shown(shell)[1].strip() == "Growing"
    message = shell.session.current.messages[1]
    assert message.stats is not None
    assert message.stats.reason == "cancelled"


def test_other_chats_are_read_and_written_while_one_answers(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Elsewhere")
    again(qtbot, shell, script, "Another.", of="Hello")
    other = shell.session.current
    shell.chat_presenter.new_chat()
    script.answer, script.chunk, script.pause_s = "word " * 200, 5, 0.005
    shell.chat_presenter.send("Go on")
    growing = shell.session.current
    assert answered(shell) == ["Go on"]
    qtbot.waitUntil(lambda: len(growing.messages[-1].content) > 20)
    shell.chat_presenter.open_chat(other.id)
    other_version(qtbot, view_of(shell, "Another."), "Previous")
    assert shown(shell) == ["Elsewhere", HELLO]
    step(qtbot, view_of(shell, "Elsewhere"), "Delete message")
    qtbot.keyClicks(shell.window.composer.edit, "later")
    shell.chat_presenter.new_chat()
    qtbot.keyClicks(shell.window.composer.edit, "much later")
    assert answered(shell) == ["Go on"]
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    shell.chat_presenter.open_chat(growing.id)
    assert shown(shell)[-1].strip() == ("word " * 200).strip()
    shell.window.close()
    shell = make_shell()
    found = [shell.session.find(chat.id) for chat in shell.session.library.summaries]
    drafts = {chat.draft: [m.content for m in chat.messages] for chat in found if chat}
    assert set(drafts) == {"", "later", "much later"}
    assert drafts[""] == ["Go on", "word " * 200]
    assert drafts["later"] == ["Hello from the **fake** model."]


def test_an_answer_that_is_written_can_be_deleted(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    script.hold, script.hold_after = True, 2
    shell.session.regenerate()
    qtbot.waitUntil(lambda: len(shown(shell)[-1]) > 1)
    step(qtbot, shell.window.chat_view.shown[0], "Delete this and all that follow")
    assert not shell.session.is_busy
    assert shell.session.current.is_empty
    script.hold = False
    ask(qtbot, shell, "Again")
    assert shown(shell) == ["Again", HELLO]


def test_a_chat_is_opened_at_a_message_of_any_version(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    again(qtbot, shell, script, "Another.", of="Hello")
    chat = shell.session.current.id
    shell.chat_presenter.new_chat()
    shell.session.open_at(chat, 2)
    assert shown(shell) == ["Hi", HELLO]
    shell.session.open_at(chat, 3)
    assert shown(shell) == ["Hi", "Another."]
    shell.session.open_at(chat, 99)
    assert shown(shell) == ["Hi", "Another."], "a deleted message"
