"""The engine of the running window is replaced, taken away, or does not start."""

from __future__ import annotations

from dataclasses import replace

import pytest
from PySide6.QtWidgets import QMessageBox
from pytestqt.qtbot import QtBot

from app.setup.engine_pack.store import PackStore
from app.setup.page.engine_session import InstallRequest
from engine import EngineError, pack_folders
from tests.helpers.engine_pages import current_pack, install, page_of, panel_of, view_of
from tests.helpers.fake_engine_pack import PackScript, write_lock
from tests.helpers.fake_host import Script
from tests.helpers.shell_driver import MODEL, MakeShell, ask, banner, host_of, prompts, shown


def test_the_settings_say_what_is_used_and_go_back(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript
) -> None:
    """A newer engine is installed beside the one in use; the chat and the model stay."""
    shell = make_shell()
    install(qtbot, shell)
    shell.models.open(MODEL)
    qtbot.waitUntil(lambda: shell.client.model is not None)
    shell.models.apply(replace(shell.client.model.params, devices=("cpu", "cpu")))
    qtbot.waitUntil(lambda: len(shell.client.model.params.devices) == 2)
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
    assert shell.client.model.params.devices == ("cpu", "cpu"), "and so does the split"
    qtbot.waitUntil(lambda: panel.text.startswith("PyTorch 2.16.0"))
    assert shown(shell) == ["Hi", "Hello from the fake model."]
    ask(qtbot, shell, "And now?")
    assert len(prompts(shell)[0]) == 3, "the chat goes on"
    with qtbot.waitSignal(shell.client.loaded):
        panel.roll_back.click()
    assert current_pack().version == "2.15.0"


@pytest.mark.parametrize(
    ("n_chats", "told"), [(1, "when this answer is finished"), (2, "when 2 answers are finished")]
)
def test_answers_are_finished_before_the_engine_is_replaced(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript, script: Script, n_chats: int, told: str
) -> None:
    shell = make_shell()
    install(qtbot, shell)
    shell.models.open(MODEL)
    qtbot.waitUntil(lambda: shell.client.model is not None)
    script.hold, script.hold_after = True, 3
    for _ in range(n_chats):
        shell.chat_presenter.new_chat()
        shell.chat_presenter.send("Hi")
    qtbot.waitUntil(lambda: len(shown(shell)) == 2 and len(shown(shell)[1]) > 5)
    old = host_of(shell)
    view_of(qtbot, shell)
    page_of(shell).open()
    view = view_of(qtbot, shell)
    view.choices.rows[1].radio.setChecked(True)
    pack.n_arrived = 0
    view.install.click()
    qtbot.waitUntil(lambda: told in banner(shell))
    assert host_of(shell) is old
    script.hold = False
    with qtbot.waitSignal(shell.client.loaded):
        shell.window.banner._action.click()
    assert host_of(shell) is not old
    assert shown(shell)[1].startswith("Hello")


def test_a_message_sent_while_the_engine_is_replaced_waits_for_the_model(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the moment in which the model is being unloaded."""
    shell = make_shell()
    install(qtbot, shell)
    shell.models.open(MODEL)
    qtbot.waitUntil(lambda: shell.client.model is not None)
    unload = shell.client.unload

    def unload_and_send() -> None:
        unload()
        shell.window.composer.set_text("Hi")
        shell.window.composer.submit()
        assert shell.window.composer._wait.isVisible()

    monkeypatch.setattr(shell.client, "unload", unload_and_send)
    old = host_of(shell)
    page_of(shell).session.rolled_back.emit(PackStore().current)
    qtbot.waitUntil(lambda: len(shown(shell)) == 2 and not shell.session.is_busy)
    assert host_of(shell) is not old
    assert prompts(shell) == [[("user", "Hi")]]
    assert shell.window.composer.text == ""


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
    assert banner(shell) == "Tiny Chat will be loaded when an engine is installed."


def test_torch_beside_tandem_is_used_as_it_is(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell()
    panel = panel_of(qtbot, shell)
    assert panel.text.startswith("PyTorch installed with Tandem\n")
    assert not panel._buttons.isVisible()


def test_an_update_that_was_left_is_offered_at_the_next_start(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript
) -> None:
    first = make_shell()
    install(qtbot, first)
    pack.n_arrived, pack.hold_at = 0, 1
    page_of(first).install(InstallRequest("cpu"))
    qtbot.waitUntil(lambda: len(pack.begun) == 2)
    first.window.close()
    shell = make_shell()
    assert banner(shell) == "The engine installation was not completed."
    qtbot.waitUntil(lambda: shell.client._host is not None)
    shell.window.banner._action.click()
    assert view_of(qtbot, shell).panel.resume.isVisible()


def test_an_engine_that_does_not_start_offers_the_one_before(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript, script: Script
) -> None:
    shell = make_shell()
    install(qtbot, shell)
    script.start_error = EngineError("PyTorch cannot be used (ImportError: x).", "")
    pack.n_arrived = 0
    page_of(shell).install(InstallRequest("cpu"))
    qtbot.waitUntil(lambda: banner(shell) == script.start_error.message)
    script.start_error = None
    with qtbot.waitSignal(shell.client.ready):
        shell.window.banner._action.click()
    assert current_pack().backend == "cuda13"


def test_a_damaged_engine_leads_to_the_page(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript, script: Script
) -> None:
    first = make_shell()
    install(qtbot, first)
    first.window.close()
    script.start_error = EngineError("PyTorch cannot be used (ImportError: x).", "")
    shell = make_shell()
    qtbot.waitUntil(lambda: banner(shell) == script.start_error.message)
    assert shell.window.banner._action.text() == "Install an engine…"
    shell.window.banner._action.click()
    assert view_of(qtbot, shell).isVisible()


def test_an_engine_of_another_python_has_to_be_installed_again(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript
) -> None:
    """As after an update of Tandem that brings another one."""
    first = make_shell()
    install(qtbot, first)
    first.window.close()
    pack.site.unlink()
    view = view_of(qtbot, make_shell())
    assert view.isVisible()
    text = "PyTorch 2.15.0, NVIDIA GPUs (CUDA 13) can no longer be used"
    qtbot.waitUntil(lambda: view._intro.text().startswith(text))


def test_a_model_on_gpus_that_the_new_engine_cannot_use_gets_another_split(
    qtbot: QtBot, make_shell: MakeShell, pack: PackScript
) -> None:
    shell = make_shell()
    install(qtbot, shell)
    shell.models.open(MODEL)
    qtbot.waitUntil(lambda: shell.client.model is not None)
    shell.models.apply(replace(shell.client.model.params, devices=("cuda:0",)))
    qtbot.waitUntil(lambda: shell.client.model.params.devices == ("cuda:0",))
    pack.n_arrived = 0
    with qtbot.waitSignal(shell.client.loaded):
        page_of(shell).install(InstallRequest("cpu"))
    assert shell.client.model.params.devices == ("cpu",)
