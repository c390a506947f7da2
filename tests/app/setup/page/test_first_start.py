"""The engine is installed in the running window, at its first start."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import QObject, Qt
from PySide6.QtWidgets import QFileDialog, QLabel
from pytestqt.qtbot import QtBot

from app.core.engine_client import EngineState
from app.devices.split.figures import SplitPicture
from app.setup.engine_pack.fetching import InstallProgress, InstallStage
from app.setup.engine_pack.store import PackStore
from app.setup.page.engine_session import EngineSession
from engine import EngineError, pack_folders
from engine.model.architectures.info import read_model_info
from tests.helpers.engine_pages import current_pack, install, page_of, view_of
from tests.helpers.fake_engine_pack import PackScript
from tests.helpers.shell_driver import MODEL, MakeShell, ask, banner, shown

NO_NETWORK = EngineError("files.example cannot be reached.", "Check the connection.")


def test_a_first_start_installs_the_engine_and_answers(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript
) -> None:
    shell = make_shell()
    view = view_of(qtbot, shell)
    assert view.isVisible()
    assert shell.client._host is None, "no engine was started in vain"
    assert [row.radio.text() for row in view.choices.rows] == ["NVIDIA GPUs (CUDA 13)", "CPU only"]
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
    assert row.radio.accessibleName() == "CPU only, recommended"
    assert "Download 210.0 MB, 900.0 MB on disk" in row.radio.accessibleDescription()


def test_the_keyboard_is_enough(qtbot: QtBot, make_shell: MakeShell, pack: PackScript) -> None:
    shell = make_shell()
    view = view_of(qtbot, shell)
    shell.window.activateWindow()
    qtbot.waitUntil(view.install.hasFocus)
    view.choices.focus_choice()
    first, second = view.choices.rows
    qtbot.waitUntil(first.radio.hasFocus)
    qtbot.waitUntil(lambda: second.y() > first.y())  # else nothing is below, and the key is lost
    qtbot.keyClick(first.radio, Qt.Key.Key_Down)
    assert view.choices.key == "cpu"
    view.install.setFocus()
    with qtbot.waitSignal(shell.client.ready):
        qtbot.keyClick(view.install, Qt.Key.Key_Space)
    assert current_pack().backend == "cpu"


def test_a_model_opened_before_is_loaded_once_there_is_an_engine(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript
) -> None:
    """As by a double click on its file, or by the welcome page; what is typed stays."""
    shell = make_shell()
    shell.window.composer.edit.setPlainText("A question")
    view_of(qtbot, shell).left.emit()
    assert banner(shell) == "No engine is installed."
    shell.models.open(MODEL)
    view = view_of(qtbot, shell)
    qtbot.waitUntil(view.isVisible)
    assert banner(shell) == "Tiny Chat will be loaded when an engine is installed."
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
    assert banner(shell) == "No engine is installed; the message is kept as a draft."
    assert shell.window.composer.edit.toPlainText() == "Hello?"
    shell.window.banner._action.click()
    assert view.isVisible()


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
    qtbot.waitUntil(lambda: view.panel.text.startswith("Downloading: 1.4 GB of 2.9 GB"))
    view.panel.pause.click()
    qtbot.waitUntil(lambda: view.panel.resume.isVisible())
    assert view.panel.text == "Paused. The partial download is kept."
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


def test_gpus_without_an_engine_of_theirs_are_told(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.suitable_torch", lambda: ("rocm", "cpu"))
    view = view_of(qtbot, make_shell())
    amd = view.choices.rows[-1].radio
    assert amd.text() == "AMD GPUs (ROCm)"
    assert not amd.isEnabled()
    assert "you can use a Python environment with this PyTorch" in amd.accessibleDescription()
    assert view.choices.key == "cpu"


def test_too_little_room_is_told_before_anything_is_fetched(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.setup.page.engine_session.free_bytes", lambda _: 2_000_000_000)
    view = view_of(qtbot, make_shell())
    assert view._space.text().startswith("Needs 10.0 GB in ")
    view.choices.rows[1].radio.setChecked(True)
    assert view._space.text().startswith("2.0 GB free in ")


def test_an_installation_that_breaks_is_told(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackStore, "locked", lambda _: 1 / 0)
    view = view_of(qtbot, make_shell())
    view.install.click()
    qtbot.waitUntil(lambda: view.panel.retry.isVisible())
    assert view.panel.text == "The engine could not be installed: division by zero."


def test_a_wheel_that_is_compared_does_not_look_like_a_step_back(qtbot: QtBot) -> None:
    parent = QObject()
    session = EngineSession(parent)
    fetching, checking = InstallStage.FETCHING, InstallStage.CHECKING
    for stage, n_done in ((fetching, 50), (checking, 20), (checking, 50), (fetching, 60)):
        session._note(InstallProgress(stage, n_done, 100))
        assert session.progress.n_bytes == max(50, n_done)
    session._note(InstallProgress(InstallStage.UNPACKING, 10, 900))
    assert session.progress.n_bytes == 10


def test_nothing_is_measured_without_an_engine(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = make_shell()
    monkeypatch.setattr("engine.read_model_info", read_model_info)  # the bundled model is real
    view_of(qtbot, shell)
    pictures: list[SplitPicture] = []
    shell.split.pictured.connect(pictures.append)
    shell.model_presenter.open_demo()
    qtbot.waitUntil(lambda: bool(pictures) and pictures[-1].plan is not None)
    find = shell.side_panels.find
    assert not find.isEnabled()
    shell.window.show_dock(shell.window.links_dock, True)
    links = shell.side_panels.links
    links.measure_requested.emit()
    said = [label.text() for label in links.findChildren(QLabel)]
    assert "Measuring requires an engine." in said
    install(qtbot, shell)
    qtbot.waitUntil(find.isEnabled)


def test_what_is_missing_is_told_wherever_one_goes(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript
) -> None:
    shell = make_shell()
    view_of(qtbot, shell)
    shell.settings_page.toggle()
    assert banner(shell) == "No engine is installed."


def test_a_failure_behind_another_page_is_news(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript
) -> None:
    pack.hold_at, pack.error = 1, NO_NETWORK
    shell = make_shell()
    view = view_of(qtbot, shell)
    view.install.click()
    qtbot.waitUntil(lambda: "MB of" in view.panel.text)
    shell.settings_page.toggle()
    assert banner(shell) == "The engine is being installed."
    pack.go_on.set()
    qtbot.waitUntil(lambda: banner(shell) == NO_NETWORK.message)
    notice = shell.window.banner.notice
    assert notice is not None
    assert notice.is_news
    shell.window.banner._action.click()
    assert view.panel.retry.isVisible()
