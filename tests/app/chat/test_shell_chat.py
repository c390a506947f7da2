"""The window with a scripted engine: asking, stopping, editing, saving."""

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QDoubleSpinBox
from pytestqt.qtbot import QtBot

from app.chat.store import ChatStore
from app.chat.views.message_view import UserView
from app.core.notice import Notice
from app.core.paths import chats_dir
from engine import AnswerRequest, ContextOverflow, EngineError, OutOfDeviceMemory, TokenText
from tests.helpers.fake_host import Script, model_info
from tests.helpers.shell_driver import MODEL, MakeShell, ask, banner, host_of, prompts, shown


def test_enter_sends_and_the_answer_appears_with_its_footer(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi there")
    assert shown(shell) == ["Hi there", "Hello from the fake model."]
    answer = shell.window.chat_view.last_answer()
    assert answer is not None
    footer = "61.8 tok/s · 8 tokens · 0.31 s to first token · end of turn"
    assert answer.footer.figures.accessibleName() == footer
    assert shell.window.composer.text == ""


def test_shift_enter_starts_a_line_and_sends_nothing(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    edit = shell.window.composer.edit
    edit.setPlainText("one")
    edit.moveCursor(edit.textCursor().MoveOperation.End)
    qtbot.keyClick(edit, Qt.Key.Key_Return, Qt.KeyboardModifier.ShiftModifier)
    qtbot.keyClicks(edit, "two")
    assert shell.window.composer.text == "one\ntwo"
    assert prompts(shell) == []


def test_without_a_model_the_draft_stays_and_a_sentence_says_so(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell()
    shell.window.composer.edit.setPlainText("Hi")
    qtbot.keyClick(shell.window.composer.edit, Qt.Key.Key_Return)
    assert shell.window.composer.text == "Hi"
    assert banner(shell).startswith("No model is loaded")


def test_html_in_an_answer_is_shown_as_it_was_written(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    script.answer = 'a <b>bold</b> <img src="file:///etc/passwd"> <script>x()</script>\n\n<p>T'
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "<i>mine</i>")
    assert shown(shell) == ["<i>mine</i>", script.answer.replace("\n\n", "\n")]


def test_esc_stops_and_keeps_what_was_written(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    script.hold, script.hold_after = True, 3
    shell.window.composer.edit.setPlainText("Hi")
    qtbot.keyClick(shell.window.composer.edit, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: shown(shell)[1:] == ["Hello from t"])
    qtbot.keyClick(shell.window.composer.edit, Qt.Key.Key_Escape)
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    message = shell.session.current.messages[-1]
    assert message.content == "Hello from t"
    assert message.stats is not None
    assert message.stats.reason == "cancelled"


def test_regenerate_replaces_the_last_answer(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    script.answer = "Another one."
    qtbot.keyClick(shell.window, Qt.Key.Key_R, Qt.KeyboardModifier.ControlModifier)
    qtbot.waitUntil(lambda: shown(shell) == ["Hi", "Another one."] and not shell.session.is_busy)
    assert prompts(shell) == [[("user", "Hi")], [("user", "Hi")]]


def test_editing_a_turn_drops_what_followed_and_asks_again(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "First")
    ask(qtbot, shell, "Second")
    view = shell.window.chat_view.shown[0]
    assert isinstance(view, UserView)
    view.start_editing()
    assert view._editor is not None
    view._editor.edit.setPlainText("Better")
    qtbot.keyClick(view._editor.edit, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    assert shown(shell) == ["Better", "Hello from the fake model."]
    assert prompts(shell)[-1] == [("user", "Better")]


def test_events_of_an_answer_that_was_replaced_are_dropped(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    host_of(shell).send(2, TokenText(" GHOST", (1,)))
    host_of(shell).send(77, TokenText(" GHOST", (1,)))
    qtbot.waitUntil(lambda: not shell.client._inbox._timer.isActive())
    assert "GHOST" not in shell.session.current.messages[-1].content


def test_a_restart_brings_the_chats_and_the_draft_back(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Remember me")
    shell.window.composer.edit.setPlainText("not yet sent")
    shell.window.close()
    again = make_shell()
    assert shown(again) == ["Remember me", "Hello from the fake model."]
    assert again.window.composer.text == "not yet sent"
    assert again.window.chat_list.shown_titles() == ["TODAY", "Remember me"]


def test_a_corrupt_chat_does_not_keep_the_window_from_opening(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    chats_dir().mkdir(parents=True)
    (chats_dir() / "broken.json").write_text('{"id": "broken", "title": ')
    (chats_dir() / "list.json").write_text("[1, 2]")
    shell = make_shell(model=MODEL)
    assert banner(shell) == "2 chats could not be read. Their files will stay unchanged."
    ask(qtbot, shell, "Hi")
    assert (chats_dir() / "broken.json").exists()


def test_a_full_disk_is_said_once_and_the_chat_goes_on(
    qtbot: QtBot, make_shell: MakeShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = make_shell(model=MODEL)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("app.chat.store.put_chat", full)
    ask(qtbot, shell, "Hi")
    assert "No space left on device" in banner(shell)
    assert shown(shell) == ["Hi", "Hello from the fake model."]
    assert shell.session.current.id in shell.session.library


def test_an_error_while_answering_keeps_the_reply_so_far(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    script.answer_error = OutOfDeviceMemory("cuda:1", 1 << 30, 0, "for the next token")
    ask(qtbot, shell, "Hi")
    assert shown(shell) == ["Hi", "Hello from the fake model."]
    assert banner(shell).startswith("cuda:1 has 0.00 GiB free")
    script.answer_error = None
    ask(qtbot, shell, "And now?")
    assert shown(shell)[-1] == "Hello from the fake model."


def test_a_full_context_offers_to_drop_the_oldest_and_goes_on_where_it_ended(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    script.reason = "context"
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    notice = shell.window.banner.notice
    assert notice is not None
    assert notice.action == "Drop the oldest and continue"
    script.answer, script.reason = " More.", "stop"
    shell.window.banner._action.click()
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    assert shown(shell) == ["Hi", "Hello from the fake model. More."]
    last = host_of(shell).commands[-1]
    assert isinstance(last, AnswerRequest)
    assert last.continue_last
    assert last.sampling.on_overflow == "shift"
    assert shell.window.sampling.params.on_overflow == "stop", "other chats are unchanged"
    shell.chat_presenter.new_chat()
    ask(qtbot, shell, "Hi again")
    last = host_of(shell).commands[-1]
    assert isinstance(last, AnswerRequest)
    assert last.sampling.on_overflow == "stop"


def test_an_answer_that_does_not_fit_any_more_is_kept_and_goes_on(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    """If the engine refuses to continue it, it must not be replaced by a new answer."""
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    script.answer_error = ContextOverflow(2100, 2048)
    script.answer = ""
    shell.session.go_on()
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    assert shown(shell) == ["Hi", "Hello from the fake model."]
    script.answer_error, script.answer = None, " More."
    shell.window.banner._action.click()
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    assert shown(shell) == ["Hi", "Hello from the fake model. More."]
    script.answer_error, script.answer = ContextOverflow(2100, 2048), ""
    shell.session.go_on()
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    notice = shell.window.banner.notice
    assert notice is not None
    assert notice.action == "", "a remedy that did not help is not offered again"


def test_what_went_wrong_before_is_not_shown_while_an_answer_is_tried_again(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    """It had no text yet, so its view was kept."""
    shell = make_shell(model=MODEL)
    script.answer_error, script.answer = ContextOverflow(2100, 2048), ""
    ask(qtbot, shell, "Hi")
    view = shell.window.chat_view.last_answer()
    assert view is not None
    assert view._problem.isVisible()
    script.answer_error, script.answer, script.hold = None, "Yes.", True
    shell.window.banner._action.click()
    view = shell.window.chat_view.last_answer()
    assert view is not None
    assert not view._problem.isVisible()
    assert not view.footer.buttons.isVisible()
    shell.session.stop()
    qtbot.waitUntil(lambda: not shell.session.is_busy)


def test_the_banner_of_an_answer_goes_when_it_is_tried_again(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    script.answer_error = EngineError("It does not work.")
    ask(qtbot, shell, "Hi")
    assert banner(shell) == "It does not work."
    script.answer_error, script.hold = None, True
    shell.session.regenerate()
    assert banner(shell) == ""
    shell.session.stop()
    qtbot.waitUntil(lambda: not shell.session.is_busy)


def test_dropping_the_oldest_is_not_offered_where_the_last_message_is_too_long(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    script.answer_error, script.answer = ContextOverflow(2100, 2048, 2060), ""
    ask(qtbot, shell, "Hi")
    notice = shell.window.banner.notice
    assert notice is not None
    assert notice.action == ""
    assert notice.hint.startswith("Shorten the last message or the system prompt")


def test_thoughts_are_folded_away_and_left_out_of_later_turns(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    script.answer = "<think>\nhm, <b>\n</think>\n\nYes."
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Really?")
    assert shown(shell) == ["Really?", "Yes."]
    answer = shell.window.chat_view.last_answer()
    assert answer is not None
    assert answer._thought._toggle.text().startswith("▸ Thought for ")
    ask(qtbot, shell, "Sure?")
    assert prompts(shell)[-1] == [("user", "Really?"), ("assistant", "Yes."), ("user", "Sure?")]


def test_an_answer_goes_on_while_another_chat_is_open(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    script.hold, script.hold_after = True, 2
    shell.chat_presenter.send("Long one")
    first = shell.session.current
    qtbot.waitUntil(lambda: first.messages[-1].content != "")
    shell.chat_presenter.new_chat()
    assert shown(shell) == []
    shell.session.open_chat(first.id)
    assert shown(shell)[1] == first.messages[-1].content.rstrip()
    shell.session.stop()
    qtbot.waitUntil(lambda: not shell.session.is_busy)


def test_enter_does_not_end_the_answer_that_is_being_written(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    """The message stays in the composer until the answer has ended or was stopped."""
    shell = make_shell(model=MODEL)
    script.hold, script.hold_after = True, 2
    shell.chat_presenter.send("Long one")
    qtbot.waitUntil(lambda: shell.session.current.messages[-1].content != "")
    edit = shell.window.composer.edit
    edit.setPlainText("And then?")
    qtbot.keyClick(edit, Qt.Key.Key_Return)
    assert shell.session.is_busy
    assert edit.toPlainText() == "And then?"
    assert banner(shell).startswith("The answer is still being written.")
    script.hold = False
    shell.session.stop()
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    qtbot.keyClick(edit, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    assert [text for role, text in prompts(shell)[-1] if role == "user"] == [
        "Long one", "And then?",
    ]  # fmt: skip


def test_a_deleted_chat_comes_back_with_undo(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Precious")
    shell.chat_presenter.delete_chats([shell.session.current.id])
    assert shell.window.chat_list.shown_titles() == []
    shell.session.flush()
    assert ChatStore(chats_dir()).load() == []
    shell.window.banner._action.click()
    assert shell.window.chat_list.shown_titles() == ["TODAY", "Precious"]
    shell.session.flush()
    assert len(ChatStore(chats_dir()).load()) == 1


def test_chats_are_renamed_and_found(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Talk about whales")
    shell.chat_presenter.new_chat()
    ask(qtbot, shell, "Talk about birds")
    chats = shell.window.chat_list
    chats.list.renamed.emit(shell.session.current.id, "Feathers")
    assert chats.shown_titles() == ["TODAY", "Feathers", "Talk about whales"]
    chats.search.setText("birds hello")
    qtbot.waitUntil(lambda: {hit.title.text for hit in chats.hits.hits} == {"Feathers"})
    assert chats.hits.isVisible()


def test_sampling_and_system_prompt_reach_the_engine_and_survive_a_restart(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell(model=MODEL)
    panel = shell.window.sampling
    temperature = panel.rows["temperature"].editor
    assert isinstance(temperature, QDoubleSpinBox)
    temperature.setValue(0.2)
    panel.prompt.edit.setPlainText("Be brief.")
    ask(qtbot, shell, "Hi")
    command = host_of(shell).commands[-1]
    assert isinstance(command, AnswerRequest)
    assert command.sampling.temperature == 0.2
    assert command.messages[0].content == "Be brief."
    assert panel.rows["temperature"].label.text() == "● Temperature"
    assert shell.window.composer._sampling.accessibleName() == "Sampling: Sampling · 1 changed"
    shell.window.close()
    again = make_shell()
    assert again.window.sampling.params.temperature == 0.2
    again.window.sampling.reset()
    assert again.window.composer._sampling.accessibleName() == "Sampling: Sampling · Model defaults"


def last_stored() -> str:
    """Return the last message of the chat on disk."""
    (chat,) = ChatStore(chats_dir()).load()
    return chat.messages[-1].content


def test_a_long_answer_is_saved_while_it_is_written(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    """A power cut loses at most the last seconds."""
    shell = make_shell(model=MODEL)
    script.hold, script.hold_after = True, 2
    shell.session.library._soon.setInterval(20)
    shell.chat_presenter.send("Hi")
    shell.session.flush()
    qtbot.waitUntil(lambda: last_stored() == "Hello fr")
    shell.session.stop()
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    qtbot.waitUntil(lambda: not shell.session.library._soon.isActive())


def test_a_failed_answer_is_told_until_its_chat_is_left(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    script.answer_error = EngineError("The template fails.", "Choose another.")
    ask(qtbot, shell, "One")
    assert banner(shell) == "The template fails."
    failed = shell.session.current
    shell.chat_presenter.new_chat()
    assert shell.window.banner.notice is None
    assert not shell.window.banner.isVisible()
    shell.chat_presenter.open_chat(failed.id)
    assert failed.messages[-1].problem == "The template fails.", "its chat still shows it"
    shell.window.banner.show_notice(Notice("The disk is full.", kind="error"))
    shell.chat_presenter.new_chat()
    assert banner(shell) == "The disk is full.", "this concerns all chats"


def test_a_model_s_file_recommends_how_to_sample(
    qtbot: QtBot, make_shell: MakeShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's values take precedence, and the file's are not stored as the user's."""
    recommended = (("temperature", 0.6), ("top_k", 20))
    monkeypatch.setattr(
        "tests.helpers.fake_host.model_info", lambda path: model_info(path, sampling=recommended)
    )
    shell = make_shell(model=MODEL)
    assert shell.window.composer._sampling.accessibleName() == "Sampling: Sampling · Model defaults"
    ask(qtbot, shell, "Hi")
    command = host_of(shell).commands[-1]
    assert isinstance(command, AnswerRequest)
    assert (command.sampling.temperature, command.sampling.top_k) == (0.6, 20)
    assert shell.settings.current.sampling == {}
