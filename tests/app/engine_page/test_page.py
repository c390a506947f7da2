"""The engine in the running window: installed at the first start, replaced, and taken away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QFileDialog, QMessageBox
from pytestqt.qtbot import QtBot

from app.engine_client import EngineState
from app.engine_pack.store import PackStore
from app.engine_page.page import EnginePage
from app.engine_page.views.engine_panel import EnginePanel
from app.engine_page.views.engine_view import EngineView
from app.main import Shell
from engine import EngineError, leave_pack, pack_folders
from tests.helpers.fake_engine_pack import PackScript, no_own_engine, write_lock
from tests.helpers.fake_host import Script
from tests.helpers.shell_driver import MODEL, MakeShell, ask, banner, host_of, prompts, shown

NO_NETWORK = EngineError("files.example cannot be reached.", "Check the connection.")


@pytest.fixture
def pack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[PackScript]:
    """The script of installations of a Tandem that came without torch."""
    made = no_own_engine(monkeypatch.setattr, tmp_path / "pack", ("cpu", "cuda13"))
    monkeypatch.setattr("engine.suitable_torch", lambda: ("cuda13", "cpu"))
    yield made
    made.go_on.set()
    leave_pack()


def page_of(shell: Shell) -> EnginePage:
    assert shell.engine_setup is not None
    return shell.engine_setup.page


def view_of(qtbot: QtBot, shell: Shell) -> EngineView:
    """Return the page of the engine, once it shows what can be installed."""
    view = page_of(shell).view
    assert view is not None
    qtbot.waitUntil(lambda: bool(view.choices.rows))
    return view


def install(qtbot: QtBot, shell: Shell) -> None:
    """Press Install and wait until the engine runs."""
    view = view_of(qtbot, shell)
    with qtbot.waitSignal(shell.client.ready):
        view.install.click()


def panel_of(qtbot: QtBot, shell: Shell) -> EnginePanel:
    """Return the engine's part of the settings page, which is shown."""
    if shell.settings_page.view is None or not shell.settings_page.view.isVisible():
        shell.settings_page.toggle()
    assert shell.settings_page.view is not None
    panel = shell.settings_page.view.findChild(EnginePanel)
    assert isinstance(panel, EnginePanel)
    qtbot.waitUntil(lambda: bool(panel.text))
    return panel


def texts_of(view: EngineView) -> list[str]:
    return [row.radio.text() for row in view.choices.rows]


# first start


def test_a_first_start_installs_the_engine_and_answers(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript
) -> None:
    shell = make_shell()
    view = view_of(qtbot, shell)
    assert view.isVisible()
    assert shell.client._host is None, "no engine was started in vain"
    assert texts_of(view) == ["NVIDIA GPUs (CUDA 13)", "Processor only"]
    assert view.choices.key == "cuda13"
    assert pack.begun == [], "nothing is fetched before a click"
    install(qtbot, shell)
    assert pack.begun == [0]
    qtbot.waitUntil(lambda: not view.isVisible())
    assert banner(shell) == "The engine is installed: PyTorch 2.15.0."
    assert pack_folders() == [str(pack.site)]
    shell.models.open(MODEL)
    qtbot.waitUntil(lambda: shell.client.model is not None)
    ask(qtbot, shell, "Hi")
    assert shown(shell) == ["Hi", "Hello from the fake model."]


def test_a_machine_without_gpus_gets_the_small_engine(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.suitable_torch", lambda: ("cpu",))
    view = view_of(qtbot, make_shell())
    assert view.choices.key == "cpu"
    row = view.choices.rows[0]
    assert row.radio.accessibleName() == "Processor only, recommended"
    assert "Download 210.0 MB, 900.0 MB on the disk" in row.radio.accessibleDescription()


def test_the_keyboard_is_enough(qtbot: QtBot, make_shell: MakeShell, pack: PackScript) -> None:
    shell = make_shell()
    view = view_of(qtbot, shell)
    shell.window.activateWindow()
    qtbot.waitUntil(view.install.hasFocus)
    view.choices.focus_choice()
    qtbot.waitUntil(view.choices.rows[0].radio.hasFocus)
    qtbot.keyClick(view.choices.rows[0].radio, Qt.Key.Key_Down)
    qtbot.waitUntil(lambda: view.choices.key == "cpu")
    view.install.setFocus()
    with qtbot.waitSignal(shell.client.ready):
        qtbot.keyClick(view.install, Qt.Key.Key_Space)
    current = PackStore().current
    assert current is not None
    assert current.backend == "cpu"


def test_a_model_opened_before_is_loaded_once_there_is_an_engine(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript
) -> None:
    """As by a double click on its file, or by the welcome page; what is typed stays."""
    shell = make_shell()
    shell.window.composer.edit.setPlainText("A question")
    view_of(qtbot, shell).left.emit()
    assert banner(shell) == "There is no engine yet."
    shell.models.open(MODEL)
    view = view_of(qtbot, shell)
    qtbot.waitUntil(view.isVisible)
    assert banner(shell) == "Tiny Chat is loaded as soon as there is an engine."
    assert shell.split_panel.rows, "it is planned meanwhile"
    install(qtbot, shell)
    qtbot.waitUntil(lambda: shell.client.state is EngineState.READY)
    assert shell.client.model is not None
    assert shell.client.model.info.path == MODEL
    assert shell.window.composer.edit.toPlainText() == "A question"


def test_a_message_without_an_engine_stays_and_offers_the_page(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript
) -> None:
    shell = make_shell()
    view = view_of(qtbot, shell)
    qtbot.keyClick(view, Qt.Key.Key_Escape)
    assert not view.isVisible()
    shell.window.composer.edit.setPlainText("Hello?")
    qtbot.keyClick(shell.window.composer.edit, Qt.Key.Key_Return)
    assert banner(shell) == "There is no engine yet, so the message stays here as a draft."
    assert shell.window.composer.edit.toPlainText() == "Hello?"
    shell.window.banner._action.click()
    assert view.isVisible()


# installations that do not run through


def test_a_failure_says_why_and_can_be_tried_again(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript
) -> None:
    pack.error = NO_NETWORK
    shell = make_shell()
    view = view_of(qtbot, shell)
    view.install.click()
    qtbot.waitUntil(lambda: view.panel.text == NO_NETWORK.message)
    assert view.panel.retry.isVisible()
    with qtbot.waitSignal(shell.client.ready):
        view.panel.retry.click()
    assert pack.begun == [0, pack.n_steps], "what had arrived was kept"


def test_after_a_failure_another_engine_can_be_chosen(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript
) -> None:
    pack.error = NO_NETWORK
    view = view_of(qtbot, make_shell())
    view.install.click()
    qtbot.waitUntil(lambda: view.panel.leave.isVisible())
    view.panel.leave.click()
    assert view.is_choosing
    assert not view.panel.isVisible()


def test_an_installation_is_paused_and_goes_on(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript
) -> None:
    pack.hold_at = 2
    shell = make_shell()
    view = view_of(qtbot, shell)
    view.install.click()
    qtbot.waitUntil(lambda: view.panel.text.startswith("Fetching: 1.4 GB of 2.9 GB"))
    view.panel.pause.click()
    qtbot.waitUntil(lambda: view.panel.resume.isVisible())
    assert view.panel.text == "Paused. What has arrived is kept."
    with qtbot.waitSignal(shell.client.ready):
        view.panel.resume.click()
    assert pack.begun == [0, 2]


def test_an_installation_is_cancelled(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript
) -> None:
    pack.hold_at = 2
    shell = make_shell()
    fetched = PackStore().fetched
    fetched.mkdir(parents=True)
    view = view_of(qtbot, shell)
    view.install.click()
    qtbot.waitUntil(lambda: "1.4 GB" in view.panel.text)
    view.panel.cancel.click()
    qtbot.waitUntil(lambda: view.is_choosing)
    qtbot.waitUntil(lambda: not fetched.exists())
    assert shell.settings.current.pending_engine == ""


def test_a_window_closed_meanwhile_goes_on_at_the_next_start(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript
) -> None:
    pack.hold_at = 2
    first = make_shell()
    view = view_of(qtbot, first)
    view.install.click()
    qtbot.waitUntil(lambda: "1.4 GB" in view.panel.text)
    first.window.close()
    shell = make_shell()
    view = view_of(qtbot, shell)
    assert view.panel.resume.isVisible()
    with qtbot.waitSignal(shell.client.ready):
        view.panel.resume.click()
    assert pack.begun == [0, 2]
    assert shell.settings.current.pending_engine == ""


def test_two_windows(qtbot: QtBot, make_shell: MakeShell, pack: PackScript) -> None:
    pack.hold_at = 1
    first, second = make_shell(), make_shell()
    one, other = view_of(qtbot, first), view_of(qtbot, second)
    one.install.click()
    qtbot.waitUntil(lambda: "MB of 2.9 GB" in one.panel.text)
    other.install.click()
    qtbot.waitUntil(lambda: other.panel.retry.isVisible())
    assert other.panel.text == "Another window or command is changing the engine."
    with qtbot.waitSignal(first.client.ready):
        pack.go_on.set()
    with qtbot.waitSignal(second.client.ready):
        other.panel.retry.click()
    assert pack.begun == [0], "it was installed once"


def test_an_engine_that_another_window_has_installed_is_used(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript
) -> None:
    first, second = make_shell(), make_shell()
    view_of(qtbot, second).left.emit()
    install(qtbot, first)
    with qtbot.waitSignal(second.client.ready):
        page_of(second).open()


# other sources


def test_a_folder_of_wheels(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(QFileDialog, "getExistingDirectory", lambda *_: str(tmp_path))
    shell = make_shell()
    view = view_of(qtbot, shell)
    with qtbot.waitSignal(shell.client.ready):
        view.wheels.click()
    assert pack.wheels == [tmp_path]


def test_a_folder_without_python_is_refused_with_a_sentence(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(QFileDialog, "getExistingDirectory", lambda *_: str(tmp_path))
    shell = make_shell()
    view = view_of(qtbot, shell)
    view.environment.click()
    qtbot.waitUntil(lambda: view.panel.retry.isVisible())
    assert view.panel.text == f"There is no Python in {tmp_path}."
    assert shell.client._host is None


# settings


def test_the_settings_say_what_is_used_and_go_back(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript
) -> None:
    """A newer engine is installed beside the one in use; the chat and the model stay."""
    shell = make_shell()
    install(qtbot, shell)
    shell.models.open(MODEL)
    qtbot.waitUntil(lambda: shell.client.model is not None)
    ask(qtbot, shell, "Hi")
    panel = panel_of(qtbot, shell)
    assert panel.text.startswith("PyTorch 2.15.0, NVIDIA GPUs (CUDA 13)\n7.1 GB in ")
    assert not panel.update_engine.isEnabled()
    assert not panel.roll_back.isEnabled()
    write_lock(pack.site.parent / "locks", "cuda13", "2.16.0")
    page_of(shell).session.look()
    qtbot.waitUntil(panel.update_engine.isEnabled)
    old = host_of(shell)
    pack.n_arrived = 0
    with qtbot.waitSignal(shell.client.loaded):
        panel.update_engine.click()
    assert host_of(shell) is not old
    assert not old._thread.is_alive()
    qtbot.waitUntil(lambda: panel.text.startswith("PyTorch 2.16.0"))
    assert shown(shell) == ["Hi", "Hello from the fake model."]
    ask(qtbot, shell, "And now?")
    assert len(prompts(shell)[0]) == 3, "the chat goes on"
    with qtbot.waitSignal(shell.client.loaded):
        panel.roll_back.click()
    current = PackStore().current
    assert current is not None
    assert current.version == "2.15.0"


def test_an_answer_is_finished_before_the_engine_is_replaced(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript, script: Script
) -> None:
    shell = make_shell()
    install(qtbot, shell)
    shell.models.open(MODEL)
    qtbot.waitUntil(lambda: shell.client.model is not None)
    script.hold, script.hold_after = True, 3
    shell.chat_presenter.send("Hi")
    qtbot.waitUntil(lambda: len(shown(shell)) == 2 and len(shown(shell)[1]) > 5)
    old = host_of(shell)
    view_of(qtbot, shell)
    page_of(shell).open()
    view = view_of(qtbot, shell)
    view.choices.rows[1].radio.setChecked(True)
    pack.n_arrived = 0
    view.install.click()
    qtbot.waitUntil(lambda: "when this answer is finished" in banner(shell))
    assert host_of(shell) is old
    script.hold = False
    with qtbot.waitSignal(shell.client.loaded):
        shell.window.banner._action.click()
    assert host_of(shell) is not old
    assert shown(shell)[1].startswith("Hello")


def test_the_engine_is_removed_after_a_question(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = make_shell()
    install(qtbot, shell)
    shell.models.open(MODEL)
    qtbot.waitUntil(lambda: shell.client.model is not None)
    panel = panel_of(qtbot, shell)
    answers = [QMessageBox.StandardButton.No, QMessageBox.StandardButton.Yes]
    monkeypatch.setattr(QMessageBox, "question", lambda *_: answers.pop(0))
    panel.remove.click()
    assert PackStore().current is not None
    panel.remove.click()
    qtbot.waitUntil(lambda: PackStore().current is None)
    qtbot.waitUntil(lambda: pack_folders() == [])
    view = view_of(qtbot, shell)
    qtbot.waitUntil(view.isVisible)
    assert shell.client._host is None
    shell.models.load()
    assert shell.client._host is None
    assert banner(shell) == "Tiny Chat is loaded as soon as there is an engine."


def test_torch_beside_tandem_is_used_as_it_is(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell()
    panel = panel_of(qtbot, shell)
    assert panel.text.startswith("PyTorch beside Tandem\n")
    assert not panel._buttons.isVisible()
