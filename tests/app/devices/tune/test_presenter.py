"""The search for the best split in the running window, against a scripted engine."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from pytestqt.qtbot import QtBot

from app.devices.tune.tune_presenter import LEFT_OUT, Question, estimate
from app.devices.tune.views.tune_dialog import TuneDialog
from app.main import Shell
from engine import EngineError, LoadParams, OutOfDeviceMemory, Resplit, Tune
from tests.helpers.fake_host import Script
from tests.helpers.fake_tuning import ESTIMATE
from tests.helpers.shell_driver import MakeShell, ask, host_of, shown
from tests.helpers.tiny_gguf import tiny_gguf


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tiny_gguf(tmp_path / "m.gguf", n_layer=2))


def opened(qtbot: QtBot, make_shell: MakeShell, path: str, n_ranks: int = 2) -> Shell:
    """Open a window with a loaded model on some CPU ranks, and the dialog, ready to start."""
    shell = make_shell(model=path)
    shell.side_panels.search._estimate = lambda question: (ESTIMATE, ())
    shell.split_panel.cpu_ranks.setValue(n_ranks)
    qtbot.waitUntil(shell.side_panels.find.isEnabled)
    qtbot.mouseClick(shell.side_panels.find, Qt.MouseButton.LeftButton)
    qtbot.waitUntil(shell.side_panels.search.dialog.start.isEnabled)
    return shell


def tunes(shell: Shell) -> list[Tune]:
    return [c for c in host_of(shell).commands if isinstance(c, Tune)]


def loaded_devices(shell: Shell) -> tuple[str, ...]:
    model = shell.client.model
    return model.params.devices if model else ()


def dialog_of(shell: Shell) -> TuneDialog:
    return shell.side_panels.search.dialog


def test_the_button_stands_under_the_split(make_shell: MakeShell) -> None:
    """It is disabled without a model."""
    shell = make_shell()
    assert shell.split_panel.footer.isAncestorOf(shell.side_panels.find)
    assert not dialog_of(shell).isVisible()


def test_an_estimate_is_worked_out_on_a_thread(
    qtbot: QtBot, make_shell: MakeShell, path: str
) -> None:
    shell = make_shell(model=path)
    asked: list[tuple[Question, str]] = []

    def answer(question: Question) -> object:
        asked.append((question, threading.current_thread().name))
        return ESTIMATE, ()

    shell.side_panels.search._estimate = answer  # type: ignore[assignment]
    shell.split_panel.cpu_ranks.setValue(3)
    qtbot.waitUntil(shell.side_panels.find.isEnabled)
    shell.side_panels.find.click()
    qtbot.waitUntil(dialog_of(shell).start.isEnabled)
    question, thread = asked[0]
    assert thread == "tandem-tune-plan"
    assert question.params.devices == ("cpu",) * 3
    assert question.params.split is None
    assert question.free_bytes["cpu"] > 0


def test_an_estimate_of_a_real_model_says_what_would_be_tried(path: str) -> None:
    question = Question(LoadParams(path, ("cpu", "cpu")), "chat", 30.0, {"cpu": 8 << 30})
    found, regions = estimate(question)
    assert found.budget_s == 30.0
    assert found.n_choices >= 3, "one device, tensor, layers"
    assert regions == ()
    nothing = Question(LoadParams(path, ("cpu", "cpu")), "chat", None, {"cpu": 1 << 10})
    with pytest.raises(EngineError, match="No split of this model fits"):
        estimate(nothing)


def test_a_search_runs_to_its_winner_which_is_applied(
    qtbot: QtBot, make_shell: MakeShell, path: str
) -> None:
    """The loaded model changes to the new split, and the chat goes on."""
    shell = opened(qtbot, make_shell, path)
    shell.models.load()
    qtbot.waitUntil(lambda: loaded_devices(shell) == ("cpu", "cpu"))
    ask(qtbot, shell, "Before")
    dialog = dialog_of(shell)
    dialog.start.click()
    qtbot.waitUntil(lambda: dialog.state == "done")
    (command,) = tunes(shell)
    assert (command.goal, command.params.devices) == ("chat", ("cpu", "cpu"))
    assert command.budget_s == 22.0
    assert dialog.table.model().rowCount() == 2
    assert "Best · One device: CPU 0" in dialog.table.model().index(0, 0).data()
    dialog.apply.click()
    qtbot.waitUntil(lambda: loaded_devices(shell) == ("cpu",))
    assert isinstance(host_of(shell).commands[-1], Resplit)
    assert shell.split.load_params().devices == ("cpu",)
    ask(qtbot, shell, "After")
    assert shown(shell)[0] == "Before"
    assert shown(shell)[-1] == "Hello from the fake model."


def test_a_search_is_stopped_and_keeps_what_it_found(
    qtbot: QtBot, make_shell: MakeShell, script: Script, path: str
) -> None:
    shell = opened(qtbot, make_shell, path)
    script.hold, script.hold_after = True, 1
    dialog = dialog_of(shell)
    dialog.start.click()
    qtbot.waitUntil(lambda: dialog.table.model().rowCount() == 1)
    assert dialog.state == "running"
    dialog.cancel.click()
    qtbot.waitUntil(lambda: dialog.state == "done")
    assert dialog.outcome.text().endswith("The search ended early.")
    assert dialog.apply.isEnabled()
    assert shell.client.model is not None, "what was loaded is again"


def test_a_search_that_fails_is_a_banner_in_the_dialog(
    qtbot: QtBot, make_shell: MakeShell, script: Script, path: str
) -> None:
    shell = opened(qtbot, make_shell, path)
    script.tune_error = OutOfDeviceMemory("cpu", 8 << 30, 2 << 30, "to search")
    dialog = dialog_of(shell)
    dialog.start.click()
    qtbot.waitUntil(dialog.banner.isVisible)
    assert dialog.banner.accessibleName().startswith("cpu has 2.00 GiB free")
    assert dialog.start.isVisible()
    assert shell.client.model is not None


def test_a_model_that_is_lost_can_be_loaded_again(
    qtbot: QtBot, make_shell: MakeShell, script: Script, path: str
) -> None:
    shell = opened(qtbot, make_shell, path)
    script.tune_error, script.loses_model = EngineError("The file is gone."), True
    dialog_of(shell).start.click()
    qtbot.waitUntil(lambda: shell.client.model is None)
    qtbot.waitUntil(lambda: shell.split_panel.footer.load.text() == "Load")


def test_pins_to_ranks_are_left_out_and_that_is_said(
    qtbot: QtBot, make_shell: MakeShell, path: str
) -> None:
    """A rank number means another rank in each tried split."""
    shell = make_shell(model=path)
    shell.side_panels.search._estimate = lambda question: (ESTIMATE, ())
    shell.split_panel.cpu_ranks.setValue(2)
    shell.split.set_overrides(((r"^blk\.0\.attn_", "#1"), (r"^blk\.1\.attn_", "cpu")))
    qtbot.waitUntil(shell.side_panels.find.isEnabled)
    shell.side_panels.find.click()
    dialog = dialog_of(shell)
    qtbot.waitUntil(dialog.start.isEnabled)
    assert dialog.what.text().endswith(LEFT_OUT)
    dialog.start.click()
    qtbot.waitUntil(lambda: bool(tunes(shell)))
    assert tunes(shell)[0].params.overrides == ((r"^blk\.1\.attn_", "cpu"),)
    qtbot.waitUntil(lambda: dialog.state == "done")


def test_closing_the_window_in_the_middle_leaves_nothing(
    qtbot: QtBot, make_shell: MakeShell, script: Script, path: str
) -> None:
    """The fixture that looks for threads and timers does the rest."""
    shell = opened(qtbot, make_shell, path)
    script.hold, script.hold_after = True, 1
    dialog_of(shell).start.click()
    qtbot.waitUntil(lambda: dialog_of(shell).table.model().rowCount() == 1)
    shell.window.close()
    assert not dialog_of(shell).isVisible()
