"""The running window against a scripted engine: what a person does and sees."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PySide6.QtCore import QMimeData, QPointF, Qt, QUrl
from PySide6.QtGui import QDropEvent
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.engine_client import EngineState
from app.main import Shell
from app.paths import chats_dir, settings_file
from app.views.message_view import AnswerView, UserView
from engine import EngineError, Failed, Generate, InvalidGGUF, Load, OutOfDeviceMemory, TokenText
from tests.helpers.fake_host import FakeHost, Script

MODEL = "/models/tiny.gguf"
MakeShell = Callable[..., Shell]


def host_of(shell: Shell) -> FakeHost:
    host = shell.client._host
    assert isinstance(host, FakeHost)
    return host


def ask(qtbot: QtBot, shell: Shell, text: str) -> None:
    """Type, press Enter and wait for the whole answer."""
    shell.window.composer.edit.setPlainText(text)
    qtbot.keyClick(shell.window.composer.edit, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: not shell.session.is_busy)


def shown(shell: Shell) -> list[str]:
    """The texts in the chat, from the top."""
    texts = []
    for view in shell.window.chat_view.shown:
        if isinstance(view, AnswerView):
            texts.append("\n".join(view.body.pieces_shown()))
        elif isinstance(view, UserView):
            texts.append(view._text.document().toPlainText())
    return texts


def banner(shell: Shell) -> str:
    notice = shell.window.banner.notice
    return notice.text if notice else ""


def prompts(shell: Shell) -> list[list[tuple[str, str]]]:
    """The turns of every generation that the engine was asked for."""
    commands = [c for c in host_of(shell).commands if isinstance(c, Generate)]
    return [[(m.role, m.content) for m in command.messages] for command in commands]


def test_enter_sends_and_the_answer_appears_with_its_footer(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi there")
    assert shown(shell) == ["Hi there", "Hello from the fake model."]
    answer = shell.window.chat_view.last_answer()
    assert answer is not None
    footer = "61.8 tok/s · 8 tokens · 0.31 s to first token · end of turn"
    assert answer._status.text() == footer
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
    assert banner(shell).startswith("No model is loaded yet")


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
    qtbot.waitUntil(lambda: not shell.client._timer.isActive())
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
    assert banner(shell) == "2 chats could not be read and will stay as they are on disk."
    ask(qtbot, shell, "Hi")
    assert (chats_dir() / "broken.json").exists()


def test_a_full_disk_is_said_once_and_the_chat_goes_on(
    qtbot: QtBot, make_shell: MakeShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = make_shell(model=MODEL)

    def full(path: Path, value: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("app.chat.store.write_json", full)
    ask(qtbot, shell, "Hi")
    assert "No space left on device" in banner(shell)
    assert shown(shell) == ["Hi", "Hello from the fake model."]
    assert shell.session.current in shell.session.chats


def test_a_dropped_gguf_is_loaded(qtbot: QtBot, make_shell: MakeShell, tmp_path: Path) -> None:
    shell = make_shell()
    data = QMimeData()
    data.setUrls([QUrl.fromLocalFile("/x/notes.txt"), QUrl.fromLocalFile(MODEL)])
    drop = QDropEvent(
        QPointF(9, 9), Qt.DropAction.CopyAction, data, Qt.MouseButton.LeftButton,
        Qt.KeyboardModifier.NoModifier,
    )  # fmt: skip
    shell.window.dropEvent(drop)
    qtbot.waitUntil(lambda: shell.client.model is not None)
    assert shell.client.model is not None
    assert shell.client.model.info.path == MODEL
    assert shell.settings.current.recent_models == (MODEL,)
    assert not shell.window.composer.edit.canInsertFromMimeData(data)


def test_a_failed_load_leaves_the_old_model_usable_and_says_so(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    script.load_error = OutOfDeviceMemory("cuda:0", 8 << 30, 2 << 30, "to load the model")
    shell.models.open("/models/huge.gguf")
    qtbot.waitUntil(lambda: banner(shell) != "")
    assert banner(shell) == "cuda:0 has 2.00 GiB free but 8.00 GiB are needed to load the model."
    notice = shell.window.banner.notice
    assert notice is not None
    assert "Tiny Chat is still loaded." in notice.hint
    assert shell.client.state is EngineState.READY
    ask(qtbot, shell, "Still there?")
    assert shown(shell)[-1] == "Hello from the fake model."


def test_a_file_that_is_no_model_is_a_sentence_and_nothing_changes(
    qtbot: QtBot, make_shell: MakeShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = make_shell(model=MODEL)

    def refuse(path: Path) -> None:
        raise InvalidGGUF(path, "it begins with 'Dear' and not with 'GGUF'")

    monkeypatch.setattr("app.model_session.read_model_info", refuse)
    shell.models.open("/home/me/letter.gguf")
    qtbot.waitUntil(lambda: "letter.gguf is not a usable GGUF file" in banner(shell))
    assert shell.client.state is EngineState.READY


def test_cancelling_a_load_leaves_the_file_selected_and_shows_no_banner(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    script.hold = True
    shell = make_shell()
    shell.models.open(MODEL)
    qtbot.waitUntil(lambda: shell.client.state is EngineState.LOADING)
    button = shell.window.model_bar._button
    assert button.text() == "Cancel"
    button.click()
    qtbot.waitUntil(lambda: shell.client.state is EngineState.EMPTY)
    assert button.text() == "Load"
    assert banner(shell) == ""


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


def test_a_full_context_offers_to_forget_and_goes_on_where_it_ended(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    script.reason = "context"
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    notice = shell.window.banner.notice
    assert notice is not None
    assert notice.action == "Forget the oldest and go on"
    script.answer, script.reason = " More.", "stop"
    shell.window.banner._action.click()
    qtbot.waitUntil(lambda: not shell.session.is_busy)
    assert shown(shell) == ["Hi", "Hello from the fake model. More."]
    last = host_of(shell).commands[-1]
    assert isinstance(last, Generate)
    assert last.continue_last
    assert last.sampling.on_overflow == "shift"


def test_a_warning_of_the_model_is_shown(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    script.warnings = ("The model has no chat template.",)
    shell = make_shell(model=MODEL)
    assert banner(shell) == "The model has no chat template."


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


@pytest.mark.parametrize("phase", ["load", "answer"])
def test_closing_in_the_middle_of_work_leaves_no_thread_and_saves(
    qtbot: QtBot, make_shell: MakeShell, script: Script, phase: str
) -> None:
    """The fixture that looks for threads does the rest."""
    shell = make_shell(model=MODEL if phase == "answer" else None)
    script.hold, script.hold_after = True, 2
    if phase == "load":
        shell.models.open(MODEL)
        qtbot.waitUntil(lambda: shell.client.state is EngineState.LOADING)
    else:
        shell._send("Hi")
        qtbot.waitUntil(lambda: shell.session.current.messages[-1].content != "")
    shell.window.close()
    assert shell.client.state is EngineState.CLOSED
    if phase == "answer":
        (saved,) = chats_dir().glob("*.json")
        last = json.loads(saved.read_text())["messages"][-1]
        assert last["content"].startswith("Hello fr")
        assert last["stats"]["reason"] == "cancelled"


def test_an_answer_goes_on_while_another_chat_is_open(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    script.hold, script.hold_after = True, 2
    shell._send("Long one")
    first = shell.session.current
    qtbot.waitUntil(lambda: first.messages[-1].content != "")
    shell._new_chat()
    assert shown(shell) == []
    shell._send("May I?")
    assert "“Long one” is still being answered" in banner(shell)
    shell.session.open_chat(first.id)
    assert shown(shell)[1] == first.messages[-1].content.rstrip()
    shell.session.stop()
    qtbot.waitUntil(lambda: not shell.session.is_busy)


def test_a_deleted_chat_comes_back_with_undo(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Precious")
    shell._delete_chat(shell.session.current.id)
    assert shell.window.chat_list.shown_titles() == []
    assert list(chats_dir().glob("*.json")) == []
    shell.window.banner._action.click()
    assert shell.window.chat_list.shown_titles() == ["TODAY", "Precious"]
    assert len(list(chats_dir().glob("*.json"))) == 1


def test_chats_are_renamed_and_found(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Talk about whales")
    shell._new_chat()
    ask(qtbot, shell, "Talk about birds")
    chats = shell.window.chat_list
    chats.renamed.emit(shell.session.current.id, "Feathers")
    assert chats.shown_titles() == ["TODAY", "Feathers", "Talk about whales"]
    chats.search.setText("birds hello")
    qtbot.waitUntil(lambda: chats.shown_titles() == ["TODAY", "Feathers"])


@pytest.mark.parametrize(
    ("key", "effect"),
    [
        ("N", lambda s: s.session.current.is_empty),
        ("K", lambda s: s.window.chat_list.search.hasFocus()),
        ("B", lambda s: not s.window.chats_dock.isVisible()),
        ("Comma", lambda s: s.window.settings_dock.isVisible()),
        ("Q", lambda s: not s.window.isVisible()),
    ],
)
def test_shortcuts(qtbot: QtBot, make_shell: MakeShell, key: str, effect: object) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    shell.window.activateWindow()
    qtbot.waitUntil(shell.window.isActiveWindow)
    qtbot.keyClick(
        shell.window.composer.edit, getattr(Qt.Key, f"Key_{key}"),
        Qt.KeyboardModifier.ControlModifier,
    )  # fmt: skip
    assert callable(effect)
    qtbot.waitUntil(lambda: bool(effect(shell)))


def test_ctrl_o_asks_for_a_file_and_loads_it(
    qtbot: QtBot, make_shell: MakeShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "app.views.main_window.QFileDialog.getOpenFileName", lambda *a, **k: (MODEL, "")
    )
    shell = make_shell()
    shell.window.activateWindow()
    qtbot.waitUntil(shell.window.isActiveWindow)
    qtbot.keyClick(shell.window.composer.edit, Qt.Key.Key_O, Qt.KeyboardModifier.ControlModifier)
    qtbot.waitUntil(lambda: shell.client.model is not None)
    assert [c for c in host_of(shell).commands if isinstance(c, Load)] != []


def test_sampling_and_system_prompt_reach_the_engine_and_survive_a_restart(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell(model=MODEL)
    panel = shell.window.sampling
    panel.set_field("temperature", 0.2)
    panel._prompt.setPlainText("Be brief.")
    ask(qtbot, shell, "Hi")
    command = host_of(shell).commands[-1]
    assert isinstance(command, Generate)
    assert command.sampling.temperature == 0.2
    assert command.messages[0].content == "Be brief."
    assert panel._rows["temperature"].label.text() == "● Temperature"
    assert shell.window.composer._sampling.text() == "Sampling · 1 changed"
    shell.window.close()
    again = make_shell()
    assert again.window.sampling.params.temperature == 0.2
    again.window.sampling.reset()
    assert again.window.composer._sampling.text() == "Default sampling"


def test_the_theme_changes_at_once_and_the_chat_stays(
    qtbot: QtBot, make_shell: MakeShell, qapp: QApplication
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    shell._choose_theme("dark")
    shell._choose_theme("light")
    assert qapp.palette().window().color().lightness() > 128
    assert shown(shell) == ["Hi", "Hello from the fake model."]
    shell.window.close()
    assert json.loads(settings_file().read_text())["theme"] == "light"


def test_ejecting_while_answering_ends_the_answer_first(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    script.hold, script.hold_after = True, 2
    shell._send("Hi")
    qtbot.waitUntil(lambda: shell.session.current.messages[-1].content != "")
    shell.window.model_bar.eject_requested.emit()
    qtbot.waitUntil(lambda: shell.client.state is EngineState.EMPTY)
    assert not shell.session.is_busy
    message = shell.session.current.messages[-1]
    assert message.stats is not None
    assert message.stats.reason == "cancelled"


def test_an_engine_that_cannot_start_is_a_sentence(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell()
    shell.client.start()
    host_of(shell).send(0, Failed(EngineError("PyTorch cannot be imported: no wheel.")))
    qtbot.waitUntil(lambda: banner(shell) == "PyTorch cannot be imported: no wheel.")
