"""The window with its engine in another process: it dies, and the chat goes on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.core.engine_client import EngineState
from app.core.paths import demo_model
from app.core.process.environment import VARIABLE, chosen_host
from app.main import Shell
from app.widgets.theme import apply_theme
from engine import EngineError, ProcessHost, SamplingParams, ThreadHost
from tests.helpers.shell_driver import ask, banner, engine_of, shown, until_idle
from tests.helpers.tiers import swept

WAIT_MS = 60_000
LONG = SamplingParams(temperature=0, max_tokens=100_000, ignore_eos=True, on_overflow="shift")


def test_the_variable_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert chosen_host() is ProcessHost
    for choice, host in (("", ProcessHost), ("thread", ThreadHost), ("process", ProcessHost)):
        monkeypatch.setenv(VARIABLE, choice)
        assert chosen_host() is host
    monkeypatch.setenv(VARIABLE, "cloud")
    with pytest.raises(EngineError, match="TANDEM_ENGINE is 'cloud'"):
        chosen_host()


@pytest.mark.skipif(sys.platform == "win32", reason="it is ended by a signal")
@pytest.mark.parametrize("number", swept([signal.SIGTERM, signal.SIGKILL], quick=[signal.SIGKILL]))
def test_the_program_has_a_child_with_the_engine_which_ends_with_it(number: int) -> None:
    """Whatever ends the window, its engine ends as well, and so do the children of that."""
    command = [sys.executable, "-m", "app", "--demo"]
    with subprocess.Popen(command) as window:
        known = psutil.Process(window.pid)
        deadline = time.monotonic() + WAIT_MS / 1000
        while not any(
            "engine.hosts.process.program" in child.cmdline() for child in known.children()
        ):
            assert window.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(1)  # some moment of its start or of the load
        children = known.children(recursive=True)
        window.send_signal(number)
        assert window.wait(20) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
        assert psutil.wait_procs(children, 10)[1] == []


def engine_pid(shell: Shell) -> int:
    host = engine_of(shell)
    assert isinstance(host, ProcessHost)
    assert host.pid is not None
    return host.pid


@pytest.fixture
def shell(qapp: QApplication, qtbot: QtBot) -> Iterator[Shell]:
    made = Shell(qapp, chosen_host())
    made.start()
    made.window.sampling.set_params(SamplingParams(temperature=0))
    path = demo_model()
    assert path is not None
    with qtbot.waitSignal(made.client.loaded, timeout=WAIT_MS):
        made.models.open(str(path))
    pid = engine_pid(made)
    yield made
    made.window.close()
    assert made.client.state is EngineState.CLOSED
    assert not psutil.pid_exists(pid)
    made.window.deleteLater()
    made.deleteLater()
    apply_theme(qapp, "dark")


@pytest.mark.skipif(sys.platform == "win32", reason="it is killed by a signal")
def test_a_killed_engine_is_told_and_one_click_goes_on(shell: Shell, qtbot: QtBot) -> None:
    ask(qtbot, shell, "What is tensor parallelism?")
    question, answer = shown(shell)
    assert answer.endswith(".")
    shell.window.sampling.set_params(LONG)
    shell.chat_presenter.send("Hello")
    qtbot.waitUntil(lambda: len(shown(shell)) == 4 and len(shown(shell)[3]) > 50, timeout=WAIT_MS)
    so_far = shown(shell)[3]
    old = engine_pid(shell)
    os.kill(old, signal.SIGKILL)
    qtbot.waitUntil(lambda: "was killed (SIGKILL) while answering on cpu" in banner(shell))
    assert shell.client.state is EngineState.EMPTY
    assert not shell.session.is_busy
    assert shown(shell)[:3] == [question, answer, "Hello"], "the chat is there"
    assert shown(shell)[3].startswith(so_far[:50]), "and so is the answer's beginning"
    shell.window.sampling.set_params(SamplingParams(temperature=0))
    button = shell.window.model_bar._button
    assert button.text() == "Load"
    with qtbot.waitSignal(shell.client.loaded, timeout=WAIT_MS):
        button.click()
    assert engine_pid(shell) != old
    ask(qtbot, shell, "And now?")
    assert shown(shell)[:3] == [question, answer, "Hello"]
    assert len(shown(shell)) == 6
    assert len(shown(shell)[-1]) > 0
    until_idle(qtbot, shell)
    os.kill(engine_pid(shell), signal.SIGKILL)
    qtbot.waitUntil(lambda: "was killed (SIGKILL) while it was idle" in banner(shell))
    assert shell.client.state is EngineState.EMPTY


@pytest.mark.skipif(sys.platform == "win32", reason="it is killed by a signal")
@pytest.mark.slow
def test_an_engine_killed_while_idle_leaves_a_model_to_load_again(
    shell: Shell, qtbot: QtBot
) -> None:
    until_idle(qtbot, shell)
    os.kill(engine_pid(shell), signal.SIGKILL)
    qtbot.waitUntil(lambda: "was killed (SIGKILL) while it was idle" in banner(shell))
    assert shell.client.state is EngineState.EMPTY
    with qtbot.waitSignal(shell.client.loaded, timeout=WAIT_MS):
        shell.models.load()
    ask(qtbot, shell, "Hello")
    assert shown(shell)[-1]
