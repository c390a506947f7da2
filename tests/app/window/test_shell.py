"""The running window with a scripted engine: models, keys, layout, closing."""

import gc
import json
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtCore import QMimeData, QPointF, QSize, Qt, QUrl
from PySide6.QtGui import QDragLeaveEvent, QDropEvent
from PySide6.QtWidgets import QApplication, QLabel
from pytestqt.qtbot import QtBot

from app.chat.store import ChatStore
from app.core.engine_client import EngineState
from app.core.paths import chats_dir, settings_file
from app.core.process.spare_time import SWITCH_S
from app.widgets.layout import Dock
from engine import EngineError, Failed, InvalidGGUF, Load, OutOfDeviceMemory
from tests.helpers.drags import drag_enter
from tests.helpers.fake_host import Script
from tests.helpers.shell_driver import MODEL, MakeShell, ask, banner, host_of, shown


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


def test_the_model_bar_says_how_many_prompt_tokens_are_computed_at_once(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell(model=MODEL)
    qtbot.waitUntil(lambda: shell.client.model is not None)
    text = shell.window.model_bar._context.toolTip()
    assert text == "Prompts are processed 2048 tokens at a time"


def test_a_model_dragged_over_the_composer_goes_to_the_window(
    qtbot: QtBot, make_shell: MakeShell
) -> None:
    shell = make_shell()
    data = QMimeData()
    data.setUrls([QUrl.fromLocalFile(MODEL)])
    enter = drag_enter(9, 9, data)
    QApplication.sendEvent(shell.window.composer.edit.viewport(), enter)
    assert enter.isAccepted()
    assert shell.window._drop_hint.text() == "Drop to load tiny.gguf"
    assert shell.window._drop_hint.isVisible()
    shell.window.dragLeaveEvent(QDragLeaveEvent())
    assert not shell.window._drop_hint.isVisible()


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

    monkeypatch.setattr("engine.read_model_info", refuse)
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


def test_all_warnings_of_the_model_are_shown_as_they_are(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    """Warnings contain names from the file, which must not be parsed as HTML."""
    script.warnings = ("The pre-tokenizer '<b>x</b>' is unknown.", "There is no chat template.")
    shell = make_shell(model=MODEL)
    assert banner(shell) == " ".join(script.warnings)
    texts = shell.window.banner.findChildren(QLabel)
    assert {text.textFormat() for text in texts} == {Qt.TextFormat.PlainText}


@pytest.mark.parametrize("phase", ["load", "answer"])
def test_closing_in_the_middle_of_work_leaves_no_thread_and_saves(
    qtbot: QtBot, make_shell: MakeShell, script: Script, phase: str
) -> None:
    """The fixture `no_left_overs` checks the threads."""
    shell = make_shell(model=MODEL if phase == "answer" else None)
    script.hold, script.hold_after = True, 2
    if phase == "load":
        shell.models.open(MODEL)
        qtbot.waitUntil(lambda: shell.client.state is EngineState.LOADING)
    else:
        shell.chat_presenter.send("Hi")
        qtbot.waitUntil(lambda: shell.session.current.messages[-1].content != "")
    shell.window.close()
    assert shell.client.state is EngineState.CLOSED
    if phase == "answer":
        (saved,) = ChatStore(chats_dir()).load()
        last = saved.messages[-1]
        assert last.content.startswith("Hello fr")
        assert last.stats is not None
        assert last.stats.reason == "cancelled"


@pytest.mark.parametrize(
    ("key", "effect"),
    [
        ("N", lambda s: s.session.current.is_empty),
        ("K", lambda s: s.window.chat_list.search.hasFocus()),
        ("B", lambda s: not s.window.chats_dock.isVisible()),
        ("Comma", lambda s: s.settings_page.view is not None and s.settings_page.view.isVisible()),
        ("Period", lambda s: s.window.sampling_dock.isVisible()),
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
        "app.window.main_window.QFileDialog.getOpenFileName", lambda *a, **k: (MODEL, "")
    )
    shell = make_shell()
    shell.window.activateWindow()
    qtbot.waitUntil(shell.window.isActiveWindow)
    qtbot.keyClick(shell.window.composer.edit, Qt.Key.Key_O, Qt.KeyboardModifier.ControlModifier)
    qtbot.waitUntil(lambda: shell.client.model is not None)
    assert [c for c in host_of(shell).commands if isinstance(c, Load)] != []


def test_the_theme_changes_at_once_and_the_chat_stays(
    qtbot: QtBot, make_shell: MakeShell, qapp: QApplication
) -> None:
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "Hi")
    shell.keep(replace(shell.settings.current, theme="dark"))
    shell.keep(replace(shell.settings.current, theme="light"))
    assert qapp.palette().window().color().lightness() > 128
    assert shown(shell) == ["Hi", "Hello from the fake model."]
    shell.window.close()
    assert json.loads(settings_file().read_text())["theme"] == "light"


def test_ejecting_while_answering_ends_the_answer_first(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    script.hold, script.hold_after = True, 2
    shell.chat_presenter.send("Hi")
    qtbot.waitUntil(lambda: shell.session.current.messages[-1].content != "")
    shell.window.model_bar.eject_requested.emit()
    qtbot.waitUntil(lambda: shell.client.state is EngineState.EMPTY)
    assert not shell.session.is_busy
    message = shell.session.current.messages[-1]
    assert message.stats is not None
    assert message.stats.reason == "cancelled"


def test_a_model_opened_while_another_is_ejected_shows_its_loading(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    """The event of the unloading comes while the other model loads, and must not hide Cancel."""
    shell = make_shell(model=MODEL)
    script.hold = True
    with qtbot.waitSignal(shell.client.unloaded):
        shell.models.eject()
        shell.models.load()
    assert shell.client.state is EngineState.LOADING
    assert shell.split.load_state == "loading"
    shell.models.cancel()
    qtbot.waitUntil(lambda: shell.client.state is EngineState.EMPTY)
    assert shell.split.load_state == "ready"


def test_an_engine_that_cannot_start_is_a_sentence(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell()
    shell.client.start()
    host_of(shell).send(0, Failed(EngineError("PyTorch cannot be imported: no wheel.")))
    qtbot.waitUntil(lambda: banner(shell) == "PyTorch cannot be imported: no wheel.")


def test_the_layout_of_the_window_is_remembered(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell()
    shell.window.show_dock(shell.window.chats_dock, False)  # makes room for a small window
    qtbot.waitUntil(lambda: shell.window.minimumWidth() <= 780)
    shell.window.resize(780, 600)
    shell.window.show_dock(shell.window.monitor_dock, False)
    shell.window.close()
    again = make_shell()
    assert not again.window.monitor_dock.isVisible()
    assert again.window.split_dock.isVisible()
    assert again.window.size() == QSize(780, 600)


def test_a_dock_is_detached_and_put_back(qtbot: QtBot, make_shell: MakeShell) -> None:
    dock = make_shell().window.split_dock
    assert isinstance(dock, Dock)
    dock._float.click()
    assert dock.isFloating()
    assert dock._float.accessibleName() == "Put back Split"
    dock._float.click()
    assert not dock.isFloating()


def test_a_bug_is_said_and_the_window_stays(
    qtbot: QtBot, make_shell: MakeShell, qapp: QApplication
) -> None:
    shell = make_shell(model=MODEL)
    try:
        raise RuntimeError("oops")
    except RuntimeError as error:
        shell.crashes._on_exception(RuntimeError, error, error.__traceback__)
    assert banner(shell) == "Something went wrong in the window (RuntimeError: oops)."
    shell.window.banner._action.click()
    assert "test_a_bug_is_said" in qapp.clipboard().text()
    ask(qtbot, shell, "Go on?")
    assert shown(shell)[-1] == "Hello from the fake model."


def test_another_thread_keeps_the_lock_of_the_interpreter_for_a_moment_only(
    make_shell: MakeShell,
) -> None:
    usual = sys.getswitchinterval()
    shell = make_shell()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S) != pytest.approx(usual)
    shell.window.close()
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_garbage_is_collected_by_the_window_alone(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    assert not gc.isenabled()
    threads: list[str] = []
    gc.callbacks.append(note := lambda *_: threads.append(threading.current_thread().name))
    for _ in range(3000):
        loop: list[object] = []
        loop.append(loop)
    shell.interpreter._step()
    gc.callbacks.remove(note)
    assert set(threads) == {"MainThread"}
    shell.window.close()
    assert gc.isenabled()
