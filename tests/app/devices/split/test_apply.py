"""The buttons of the split panel: load, apply live, undo, cancel, and their outcomes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from pytestqt.qtbot import QtBot

from app.widgets.text import unbroken
from engine import AnswerRequest, EngineError, Finished, Load, Resplit
from tests.app.conftest import MakeShell
from tests.helpers.fake_host import Script
from tests.helpers.fake_planner import GIB
from tests.helpers.shell_driver import ask, banner, host_of, shown
from tests.helpers.split_panels import (
    WiredPanel,
    answered,
    drag,
    loaded_as,
    move,
    press,
    release,
    settle,
    texts,
    used,
)
from tests.helpers.tiny_gguf import tiny_gguf


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Return the path of a model that can be planned."""
    return str(tiny_gguf(tmp_path / "tiny.gguf", n_layer=2, n_head_kv=4, n_ff=256))


def test_the_buttons_follow_the_state(panel: WiredPanel, qtbot: QtBot) -> None:
    """First load, then cancel with progress, then apply or reload what has changed."""
    footer, session = panel.footer, panel.session
    with qtbot.waitSignal(session.load_requested):
        footer.load.click()
    panel.session.set_state("loading")
    panel.session.progressed.emit(0.4)
    settle()
    assert footer.progress.isVisible()
    assert footer.progress.value() == 400
    assert not panel.header.isEnabled()
    with qtbot.waitSignal(panel.session.cancel_requested):
        footer.cancel.click()
    panel.session.set_loaded(loaded_as(panel.session.load_params()))
    settle()
    assert not footer.load.isEnabled()
    panel.rows[0].number.setValue(70)
    settle()
    assert (footer.load.text(), footer.load.isEnabled()) == ("Apply live", True)
    with (
        qtbot.waitSignal(panel.session.apply_requested),
        qtbot.assertNotEmitted(panel.session.load_requested),
    ):
        footer.load.click()
    panel.options.context.setValue(4096)
    settle()
    assert (footer.load.text(), footer.load.isEnabled()) == ("Reload to apply", True)
    with (
        qtbot.waitSignal(panel.session.load_requested),
        qtbot.assertNotEmitted(panel.session.apply_requested),
    ):
        footer.load.click()
    panel.session.set_state("ready")
    settle()
    assert footer.load.text() == "Load"


def test_what_a_loaded_model_can_take_is_asked_in_its_own_words(panel: WiredPanel) -> None:
    """A context length that was left to the engine is still left to it."""
    assert panel.session.resplit_params() is None
    before = panel.session.load_params()
    panel.session.set_loaded(loaded_as(before))
    panel.options.context.setValue(2048)
    panel.rows[0].number.setValue(70)
    settle()
    params = panel.session.resplit_params()
    assert params is not None
    assert params.n_ctx is None
    assert params.split == pytest.approx((0.7, 0.2, 0.1))
    panel.options.kv_type.setCurrentIndex(panel.options.kv_type.findData("f32"))
    settle()
    assert panel.session.resplit_params() is None


def test_a_split_is_applied_during_a_chat(qtbot: QtBot, make_shell: MakeShell, path: str) -> None:
    """The engine gets a Resplit, not a Load, and the conversation stays."""
    shell = make_shell(model=path)
    ask(qtbot, shell, "Hi")
    before = shown(shell)
    shell.split_panel.cpu_ranks.setValue(2)
    qtbot.waitUntil(shell.split_panel.footer.load.isEnabled)
    assert shell.split_panel.footer.load.text() == "Apply live"
    with qtbot.waitSignal(shell.client.resplit_done):
        shell.split_panel.footer.load.click()
    assert not shell.split_panel.inputs.isEnabled() or shell.split.load_state == "loaded"
    kinds = [type(command) for command in host_of(shell).commands]
    assert kinds == [Load, AnswerRequest, Resplit]
    assert shell.client.model is not None
    assert shell.client.model.params.devices == ("cpu", "cpu")
    qtbot.waitUntil(lambda: not shell.split_panel.footer.load.isEnabled())
    assert shown(shell) == before


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_split_that_fails_comes_back(
    qtbot: QtBot, make_shell: MakeShell, script: Script, path: str, is_cancelled: bool
) -> None:
    """A banner says so unless the person stopped it; the panel shows the old split."""
    shell = make_shell(model=path)
    if is_cancelled:
        script.hold, script.hold_after = True, 1
    else:
        script.load_error = EngineError("GPU 1 is full.", "Give it less.")
    shell.split_panel.cpu_ranks.setValue(2)
    qtbot.waitUntil(shell.split_panel.footer.load.isEnabled)
    with qtbot.waitSignal(shell.client.resplit_failed):
        shell.split_panel.footer.load.click()
        if is_cancelled:
            qtbot.waitUntil(shell.split_panel.footer.cancel.isVisible)
            shell.split_panel.footer.cancel.click()
    assert shell.client.model is not None
    assert shell.split.load_params().devices == ("cpu",)
    qtbot.waitUntil(lambda: shell.split_panel.footer.load.text() == "Apply live")
    assert not shell.split_panel.footer.load.isEnabled()
    if is_cancelled:
        assert banner(shell) == ""
    else:
        assert banner(shell).startswith("GPU 1 is full.")
        notice = shell.window.banner.notice
        assert notice is not None
        assert notice.hint == "Give it less. The old split is kept."


def test_a_model_that_is_lost_while_it_is_split_can_be_loaded_again(
    qtbot: QtBot, make_shell: MakeShell, script: Script, path: str
) -> None:
    shell = make_shell(model=path)
    script.load_error, script.loses_model = EngineError("The file is gone."), True
    shell.split_panel.cpu_ranks.setValue(2)
    qtbot.waitUntil(shell.split_panel.footer.load.isEnabled)
    with qtbot.waitSignal(shell.client.resplit_failed):
        shell.split_panel.footer.load.click()
    load = shell.split_panel.footer.load
    qtbot.waitUntil(lambda: load.text() == "Load" and load.isEnabled())
    assert shell.split.load_params().devices == ("cpu", "cpu")


def test_after_the_load_prediction_and_measurement_stand_side_by_side(panel: WiredPanel) -> None:
    """The panel shows bytes per rank and the last answer's speed, with prediction errors."""
    panel.session.set_loaded(loaded_as(panel.session.load_params()))
    panel.session.note_answer(answered(61.84))  # it began before the split that there is now
    settle()
    assert "61.8" not in texts(panel)
    panel.session._loaded_at -= 60
    panel.session.note_answer(answered(61.84))
    settle()
    shown_texts = texts(panel)
    assert "61.8" in shown_texts
    assert "predicted at token 150" in shown_texts
    expected = panel.session.speed.expected
    off = abs(expected / 61.84 - 1)
    note = f"Predicted {expected:.1f} tok/s for the last answer"
    assert unbroken(note) in shown_texts
    assert f"{100 * off:.0f} % too" in shown_texts, "of what that sentence says, not of the figure"
    assert shown_texts.count("+1.0 %") == 3
    panel.rows[0].number.setValue(20)
    settle()
    assert not panel.summary.measured.isVisible()
    panel.session.set_state("ready")
    settle()
    assert "+1.0 %" not in texts(panel)


def test_predictions_are_compared_with_what_an_answer_took_without_guesses(
    panel: WiredPanel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a text that repeats would make the model seem faster than it is.

    What guesses saved is an estimate, so what is learned lies no further off than need be.
    """
    panel.session.set_loaded(loaded_as(panel.session.load_params()))
    panel.session._loaded_at -= 60
    plain, speed, learnt = answered(20.0), panel.session.speed, list[float]()
    forecaster = speed.machine.forecaster
    monkeypatch.setattr(forecaster, "learn_decode", lambda *given: learnt.append(given[3]))
    panel.session.note_answer(plain)
    expected = speed.expected

    def guessed(saved_s: float, rate: float = 60.0) -> Finished:
        usage = replace(plain.usage, n_drafted=40, n_accepted=30)
        timings = replace(plain.timings, decode_per_s=rate, saved_s=saved_s)
        return replace(plain, usage=usage, timings=timings)

    panel.session.note_answer(guessed(2 * plain.timings.decode_s))
    assert speed.measured == 60.0
    assert speed.expected == pytest.approx(3 * expected)
    panel.session.note_answer(guessed(2 * plain.timings.decode_s, 3 * 2 * expected))
    panel.session.note_answer(guessed(2 * plain.timings.decode_s, 3 * expected / 2))
    assert learnt == pytest.approx([1 / 20, 1 / 60, 1 / (2 * expected), 1 / expected])
    for unclear in (guessed(0.0), answered(5.0, n_tokens=9)):
        panel.session.note_answer(unclear)
        settle()
        assert (speed.measured, speed.expected) == (unclear.timings.decode_per_s, 0.0)
        assert "were predicted" not in texts(panel)
    assert len(learnt) == 4


def test_memory_figures_stand_still_while_loading(panel: WiredPanel) -> None:
    """Otherwise a half-loaded model would count as other programs."""
    for state in ("loading", "applying"):
        panel.session.set_state(state)  # type: ignore[arg-type]
        panel.session.set_snapshots([used("cuda:0", 23)])
        settle()
        assert not panel.problem.isVisible()


def test_changes_can_be_undone_and_done_again(panel: WiredPanel, qtbot: QtBot) -> None:
    """The button and keys within the panel do it; another change forgets what was undone."""
    start = panel.session.load_params()
    assert not panel.footer.undo.isEnabled()
    panel.header.even_requested.emit()
    even = panel.session.load_params()
    panel.header.mode_button("layer").click()
    settle()
    with qtbot.waitSignal(panel.session.settings_changed):
        panel.footer.undo.click()
    assert panel.session.load_params() == even
    panel.activateWindow()
    panel.rows[0].switch.setFocus()
    QTest.keyClick(panel.rows[0].switch, Qt.Key.Key_Z, Qt.KeyboardModifier.ControlModifier)
    assert panel.session.load_params() == start
    settle()
    assert not panel.footer.undo.isEnabled()
    both = Qt.KeyboardModifier.ControlModifier | Qt.KeyboardModifier.ShiftModifier
    QTest.keyClick(panel.rows[0].switch, Qt.Key.Key_Z, both)
    assert panel.session.load_params() == even
    panel.rows[0].reserve_changed.emit(0, 1024)
    panel.session.redo()
    assert panel.session.load_params().split_mode == "tensor"
    panel.session.set_state("applying")
    panel.session.undo()
    assert panel.session.load_params().reserve == (("cuda:0", GIB),)


def test_a_drag_is_one_step(panel: WiredPanel) -> None:
    """It is one, however far and often the mouse moves; the next drag is another."""
    start = panel.session.load_params()
    handle = panel.header.bar.handles[0]
    press(handle)
    for position in (0.1, 0.25, 0.5):
        move(panel, handle, position)
        settle()
    release(handle)
    middle = panel.session.load_params()
    drag(panel, handle, 0.125)
    slider = panel.rows[2].slider
    slider.sliderPressed.emit()
    for value in (300, 400, 500):
        slider.setValue(value)
    slider.sliderReleased.emit()
    panel.session.undo()
    panel.session.undo()
    assert panel.session.load_params() == middle
    panel.session.undo()
    assert panel.session.load_params() == start
    panel.session.undo()
    assert panel.session.load_params() == start
