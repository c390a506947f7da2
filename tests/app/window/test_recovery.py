"""After the engine's crash one click reloads the model, and the answer continues."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.core.engine_client import EngineState
from app.core.paths import demo_model
from app.main import Shell
from app.widgets.theme import apply_theme
from engine import (
    AnswerRequest,
    DeviceError,
    EngineCrashed,
    EngineError,
    Failed,
    Load,
    LoadParams,
    ProcessHost,
    SamplingParams,
)
from tests.helpers.fake_host import Script, model_loaded
from tests.helpers.shell_driver import (
    MODEL,
    MakeShell,
    ask,
    banner,
    engine_of,
    host_of,
    running,
    shown,
    until_idle,
)
from tests.helpers.slow_engine import COMMAND

WAIT_MS = 60_000
QUESTION = "What is tensor parallelism?"

with_signals = pytest.mark.skipif(sys.platform == "win32", reason="it is killed by a signal")


def action(shell: Shell) -> str:
    notice = shell.window.banner.notice
    return notice.action if notice else ""


def click(qtbot: QtBot, shell: Shell) -> None:
    qtbot.mouseClick(shell.window.banner._action, Qt.MouseButton.LeftButton)


def host(shell: Shell) -> ProcessHost:
    found = engine_of(shell)
    assert isinstance(found, ProcessHost)
    return found


def kill(shell: Shell, number: int = signal.SIGKILL) -> None:
    pid = host(shell).pid
    assert pid is not None
    os.kill(pid, number)


def problem(shell: Shell) -> str:
    return shell.session.current.messages[-1].problem


@pytest.fixture
def shell(qapp: QApplication, qtbot: QtBot) -> Iterator[Shell]:
    """Yield a window with the demo model and slow answers."""
    made = Shell(qapp, lambda on_event: ProcessHost(on_event, COMMAND))
    made.start()
    made.window.sampling.set_params(SamplingParams(temperature=0))
    with qtbot.waitSignal(made.client.loaded, timeout=WAIT_MS):
        made.models.open(str(demo_model()))
    yield made
    made.window.close()
    assert made.client.state is EngineState.CLOSED
    made.window.deleteLater()
    made.deleteLater()
    apply_theme(qapp, "dark")


@with_signals
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGSEGV, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_one_click_goes_on_with_the_answer_as_if_nothing_had_been(
    shell: Shell, qtbot: QtBot, number: signal.Signals
) -> None:
    assert shell.client.model is not None
    params = shell.client.model.params
    ask(qtbot, shell, QUESTION)
    undisturbed = shown(shell)
    shell.chat_presenter.new_chat()
    shell.chat_presenter.send(QUESTION)
    qtbot.waitUntil(lambda: len(running(shell)[0].ids) > 5, timeout=WAIT_MS)
    kill(shell, number)
    qtbot.waitUntil(lambda: "while answering on cpu" in banner(shell), timeout=5000)
    so_far = shown(shell)[1]
    assert undisturbed[1].startswith(so_far.rstrip())
    assert 0 < len(so_far) < len(undisturbed[1])
    assert problem(shell) == banner(shell), "the answer says that it was interrupted"
    assert action(shell) == "Reload and continue"
    with qtbot.waitSignal(shell.client.finished, timeout=WAIT_MS):
        click(qtbot, shell)
    assert shown(shell) == undisturbed
    assert not problem(shell)
    assert shell.client.model is not None
    assert shell.client.model.params == params


@with_signals
def test_a_death_while_a_cache_is_saved_goes_on_with_the_answer_that_waits(
    shell: Shell, qtbot: QtBot, tmp_path: Path
) -> None:
    """Both commands fail, one after the other; the last notice is for both."""
    ask(qtbot, shell, QUESTION)
    undisturbed = shown(shell)
    shell.chat_presenter.new_chat()
    kill(shell, signal.SIGSTOP)
    shell.client.save_state(str(tmp_path / "state"))
    shell.chat_presenter.send(QUESTION)
    kill(shell)
    qtbot.waitUntil(lambda: not shell.session.is_busy, timeout=5000)
    assert "while saving the chat's cache on cpu" in banner(shell)
    assert action(shell) == "Reload and continue"
    with qtbot.waitSignal(shell.client.finished, timeout=WAIT_MS):
        click(qtbot, shell)
    assert shown(shell) == undisturbed


@with_signals
def test_a_death_while_the_prompt_is_read_asks_again(shell: Shell, qtbot: QtBot) -> None:
    ask(qtbot, shell, QUESTION)
    undisturbed = shown(shell)
    shell.chat_presenter.new_chat()
    kill(shell, signal.SIGSTOP)
    shell.chat_presenter.send(QUESTION)
    kill(shell)
    qtbot.waitUntil(lambda: "while answering" in banner(shell), timeout=5000)
    assert shown(shell)[1] == ""
    with qtbot.waitSignal(shell.client.finished, timeout=WAIT_MS):
        click(qtbot, shell)
    assert shown(shell) == undisturbed


@with_signals
@pytest.mark.slow
def test_without_an_answer_the_click_loads_and_that_is_all(shell: Shell, qtbot: QtBot) -> None:
    ask(qtbot, shell, QUESTION)
    before = shown(shell)
    until_idle(qtbot, shell)
    kill(shell)
    qtbot.waitUntil(lambda: "while it was idle" in banner(shell), timeout=5000)
    assert action(shell) == "Reload"
    with qtbot.waitSignal(shell.client.loaded, timeout=WAIT_MS):
        click(qtbot, shell)
    assert shell.client.state is EngineState.READY
    assert shown(shell) == before


@with_signals
@pytest.mark.slow
def test_a_click_also_loads_after_the_third_death(shell: Shell, qtbot: QtBot) -> None:
    for _ in range(3):
        kill(shell)
        qtbot.waitUntil(lambda: action(shell) == "Reload", timeout=5000)
        with qtbot.waitSignal(shell.client.loaded, timeout=WAIT_MS):
            click(qtbot, shell)
    assert shell.client.state is EngineState.READY


def test_an_engine_that_cannot_be_started_leaves_the_window_usable(
    qapp: QApplication, qtbot: QtBot
) -> None:
    shell = Shell(qapp, lambda on_event: ProcessHost(on_event, ("/nonexistent/python",)))
    shell.start()
    qtbot.waitUntil(lambda: "cannot be started" in banner(shell), timeout=5000)
    assert action(shell) == ""
    shell.window.banner.dismiss()
    shell.models.open(str(demo_model()))
    qtbot.waitUntil(lambda: "cannot be started" in banner(shell), timeout=5000)
    assert action(shell) == "Reload"
    shell.chat_presenter.send("Hello")
    assert "No model is loaded" in banner(shell)
    shell.window.close()
    assert shell.client.state is EngineState.CLOSED
    shell.window.deleteLater()
    shell.deleteLater()
    apply_theme(qapp, "dark")


def test_what_a_load_has_measured_of_a_gpu_is_planned_with(
    make_shell: MakeShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's process writes it into a file; the window's plans know nothing about it."""
    used: list[object] = []
    shell = make_shell(model=MODEL)
    assert shell.split.free_bytes(), "earlier measurements were read"
    monkeypatch.setattr("engine.use_measured_overheads", lambda devices, file: used.append(devices))
    shell.models.loaded.emit(model_loaded(LoadParams(MODEL, ("cuda:0", "cpu"))))
    assert used == [shell.start_up.devices]


def crash(shell: Shell, qtbot: QtBot, script: Script, text: str = "Hi") -> None:
    """Crash the engine in the middle of an answer."""
    script.answer, script.answer_error, script.loses_model = "<think>Hm", CRASH, True
    shell.chat_presenter.send(text)
    qtbot.waitUntil(lambda: "and continue" in action(shell))
    script.answer, script.answer_error = "m</think> Hello", None


def cut_ids(shell: Shell) -> tuple[int, ...]:
    """Return the tokens of the interrupted answer."""
    (cut,) = shell.session.lost_answers
    return cut.ids


CRASH = EngineCrashed("The engine was killed.", "Load the model again.")


def test_the_rest_of_an_answer_is_asked_for_with_its_tokens(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    """Again after a second crash, with all of them; a thought continues inside its block."""
    shell = make_shell(model=MODEL)
    crash(shell, qtbot, script)
    first = cut_ids(shell)
    script.answer_error = CRASH
    with qtbot.waitSignal(shell.client.lost):
        click(qtbot, shell)
    second = cut_ids(shell)
    script.answer, script.answer_error = "!", None
    with qtbot.waitSignal(shell.client.finished):
        click(qtbot, shell)
    asked = [found for found in host_of(shell).commands if isinstance(found, AnswerRequest)]
    assert [found.begun for found in asked] == [(), first, second]
    assert len(second) > len(first) > 0
    assert second[: len(first)] == first
    assert asked[1].continue_last
    assert asked[1].messages[-1].content == "<think>Hm"
    assert asked[2].messages[-1].content == "<think>Hmm</think> Hello"
    assert shell.session.current.messages[-1].content == "<think>Hmm</think> Hello!"


def test_what_is_loaded_again_is_what_was_loaded_whatever_is_planned(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    shell.split_panel.cpu_ranks.setValue(2)
    crash(shell, qtbot, script)
    with qtbot.waitSignal(shell.client.finished):
        click(qtbot, shell)
    loads = [found for found in host_of(shell).commands if isinstance(found, Load)]
    assert len(loads) == 2
    assert loads[0] == loads[1]


def test_a_chat_left_meanwhile_is_opened_and_drafts_stay(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    crash(shell, qtbot, script)
    cut = shell.session.current
    shell.chat_presenter.new_chat()
    other = shell.session.current
    shell.window.composer.edit.setPlainText("half a thought")
    with qtbot.waitSignal(shell.client.finished):
        click(qtbot, shell)
    assert shell.session.current is cut
    assert cut.messages[-1].content == "<think>Hmm</think> Hello"
    assert other.draft == "half a thought"


def test_a_model_loaded_by_another_button_leaves_the_offer_to_go_on(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    crash(shell, qtbot, script)
    with qtbot.waitSignal(shell.client.loaded):
        shell.models.load()
    qtbot.waitUntil(lambda: action(shell) == "Continue")
    assert not shell.session.is_busy, "nothing starts automatically"
    with qtbot.waitSignal(shell.client.finished):
        click(qtbot, shell)
    assert shown(shell)[-1].endswith("Hello")


@pytest.mark.parametrize("leave", ["delete", "answer anew"])
def test_an_answer_that_is_gone_is_not_gone_on_with(
    qtbot: QtBot, make_shell: MakeShell, script: Script, leave: str
) -> None:
    shell = make_shell(model=MODEL)
    crash(shell, qtbot, script)
    load = shell.recovery._load
    if leave == "delete":
        shell.chat_presenter.delete_chats([shell.session.current.id])
    else:
        shell.session.current.tree.remove(2)
    with qtbot.waitSignal(shell.client.loaded):
        load()
    assert not shell.session.is_busy
    assert sum(isinstance(found, AnswerRequest) for found in host_of(shell).commands) == 1


@pytest.mark.parametrize(
    ("error", "offered"),
    [(CRASH, "Reload"), (DeviceError("No."), ""), (EngineError("No."), "")],
    ids=["crash", "device", "other"],
)
def test_a_first_load_is_offered_again_after_a_crash_alone(
    qtbot: QtBot, make_shell: MakeShell, script: Script, error: EngineError, offered: str
) -> None:
    script.load_error = error
    shell = make_shell()
    with qtbot.waitSignal(shell.client.load_failed):
        shell.models.open(MODEL)
    assert banner(shell) == error.message
    assert action(shell) == offered


@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
def test_after_a_crash_in_another_load_the_former_model_comes_back(
    qtbot: QtBot, make_shell: MakeShell, script: Script, again: bool
) -> None:
    shell = make_shell(model=MODEL)
    script.load_error, script.loses_model = CRASH, True
    with qtbot.waitSignal(shell.client.load_failed):
        shell.models.open("/models/other.gguf")
    if again:
        with qtbot.waitSignal(shell.client.load_failed):
            click(qtbot, shell)
    assert action(shell) == ("Reload" if again else "Load the previous model")
    script.load_error = None
    with qtbot.waitSignal(shell.client.loaded) as loaded:
        click(qtbot, shell)
    assert loaded.args[0].info.path == MODEL
    assert shell.models.info is not None
    assert shell.models.info.path == MODEL


def test_a_split_changed_during_an_answer_leaves_the_offer_too(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    """Two commands fail with one crash; the second notice has no button of its own."""
    shell = make_shell(model=MODEL)
    script.hold, script.hold_after = True, 1
    shell.chat_presenter.send("Hi")
    qtbot.waitUntil(lambda: shell.client.state is EngineState.GENERATING)
    assert shell.client.model is not None
    shell.models.apply(shell.client.model.params)
    with qtbot.waitSignal(shell.client.resplit_failed):
        host_of(shell).send(running(shell)[0].number, Failed(CRASH, is_model_lost=True))
        host_of(shell).send(shell.client._work.stoppable[0], Failed(CRASH))
    assert action(shell) == "Reload and continue"


def test_a_message_sent_while_the_engine_died_can_go_on_as_well(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    """The request goes to another process, which has no model."""
    shell = make_shell(model=MODEL)
    script.hold = True
    shell.chat_presenter.send("Hi")
    qtbot.waitUntil(lambda: shell.client.state is EngineState.GENERATING)
    with qtbot.waitSignal(shell.client.failed):
        host_of(shell).send(0, Failed(CRASH, is_model_lost=True))
        none = EngineError("No model is loaded.", "Open a GGUF file first.")
        host_of(shell).send(running(shell)[0].number, Failed(none))
    assert action(shell) == "Reload and continue"
    script.hold = False
    host_of(shell).cancel()
    with qtbot.waitSignal(shell.client.finished):
        click(qtbot, shell)
    assert shown(shell)[-1].endswith("Hello from the fake model.")
