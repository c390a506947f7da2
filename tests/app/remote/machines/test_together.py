"""A window whose model another machine's process computes with it, over loopback."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QApplication

from app.main import Shell
from engine import SamplingParams
from tests.helpers.screenshots import demo_model, new_shell, pause, wait

NAMED_S = 5.0
"""Seconds within which a machine that has failed must be named."""


def _split_of(shell: Shell) -> tuple[float, ...] | None:
    model = shell.client.model
    return None if model is None else model.params.split


def _devices_of(shell: Shell) -> tuple[str, ...]:
    model = shell.client.model
    return () if model is None else model.params.devices


def _until(is_true: Callable[[], bool]) -> None:
    """Run the event loop until something is true."""
    end = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end, "it does not happen"
        pause(10)


def _stop_during_an_answer(
    shell: Shell, joining: "subprocess.Popen[bytes]", problem: str, *, is_whole: bool
) -> None:
    """Stop the other machine's process: the answer ends with a sentence, the window goes on.

    Args:
        problem: part of the sentence.
        is_whole: whether all processes of that machine are stopped.
    """
    shell.window.sampling.set_params(SamplingParams(max_tokens=900, ignore_eos=True))
    shell.session.new_chat("")
    shell.session.send("Count on and on.")
    _until(lambda: len(str(shell.session.current.messages[-1].content)) > 20)
    assert shell.session.is_busy
    ticks = [time.monotonic()]
    clock = QTimer(interval=20)
    clock.timeout.connect(lambda: ticks.append(time.monotonic()))
    clock.start()
    parent = psutil.Process(joining.pid)
    children = parent.children(recursive=True)
    worker = next(one for one in children if "engine.hosts.machines.worker" in one.cmdline())
    stopped = [parent, *children] if is_whole else [worker]
    for process in stopped:
        process.suspend()
    begun = time.monotonic()
    _until(lambda: not shell.session.is_busy)
    seconds = time.monotonic() - begun
    clock.stop()
    assert seconds < NAMED_S
    assert max(b - a for a, b in pairwise(ticks)) < 1.0, "the window is alive meanwhile"
    assert problem in shell.session.current.messages[-1].problem
    if is_whole:
        _until(lambda: not shell.machines.team.is_complete)
        parent.resume()  # it ends its processes, and joins again
        _until(lambda: shell.machines.team.is_complete)
    shell.window.sampling.set_params(SamplingParams(temperature=0))
    pause(300)
    shell.window.grab().save(os.environ.get("GRAB_STOPPED", os.devnull), "PNG")
    if goal := os.environ.get("GRAB_STOPPED"):
        longest = max(b - a for a, b in pairwise(ticks))
        with Path(goal + ".txt").open("a") as file:
            file.write(f"{problem}: {seconds:.2f} s, longest gap {longest:.3f} s\n")


@pytest.mark.slow
def test_two_machines_answer_as_one_does(qapp: QApplication, tmp_path: Path) -> None:
    with new_shell(qapp, "dark") as shell:
        shell.window.sampling.set_params(SamplingParams(temperature=0))

        def answer() -> str:
            shell.session.new_chat("")
            shell.session.send("What is a split?")
            wait(lambda: not shell.session.is_busy)
            return str(shell.session.current.messages[-1].content)

        shell.models.open(str(demo_model()))
        wait(lambda: shell.split.load_state == "loaded")
        alone = answer()
        assert len(alone) > 20

        shell.machines.open()
        dialog = shell.machines.dialog
        assert dialog is not None
        dialog.address.setCurrentText("127.0.0.1:0")
        dialog.switch.click()
        wait(lambda: bool(shell.machines.team.command))
        token, *_, address = shell.machines.team.command.split()
        with (tmp_path / "join.log").open("wb") as log:
            joining = subprocess.Popen(
                [
                    sys.executable, "-m", "app", "join", address, "--devices", "cpu",
                    "--threads", "1", "--model", str(demo_model()),
                ],
                env={**os.environ, "TANDEM_TOKEN": token.partition("=")[2]},
                stdout=log, stderr=log,
            )  # fmt: skip
        try:
            wait(lambda: shell.machines.wires is not None)
            dialog.accept()
            wait(lambda: [rank.device for rank in shell.split.settings.ranks][-1] == "1/cpu")
            settings = shell.split.settings
            for index in range(len(settings.ranks)):
                settings = settings.with_rank_on(index, True)
            shell.split.change(settings.with_chosen_mode("groups"))
            pause(500)
            shell.split.request_load()
            wait(lambda: shell.split.load_state == "loaded")
            assert answer() == alone
            shell.split.change(shell.split.settings.with_split((25.0, 75.0)))
            pause(500)
            shell.split.request_load()
            wait(lambda: _split_of(shell) == (0.25, 0.75))
            assert answer() == alone
            on = [rank.device for rank in shell.split.settings.ranks].index("1/cpu")
            settings = shell.split.settings.with_chosen_mode("single")
            shell.split.change(replace(settings, single=on))  # the other machine alone
            pause(500)
            shell.split.request_load()
            wait(lambda: _devices_of(shell) == ("1/cpu",))
            wait(lambda: shell.split.load_state == "loaded")
            assert answer() == alone
            assert shell.client.model is not None
            assert shell.client.model.memory == (), "this machine has no part"
            shell.window.grab().save(os.environ.get("GRAB", str(tmp_path / "alone.png")))
            for problem, is_whole in (
                ("its process was stopped", False), ("has not responded for", True),
            ):  # fmt: skip
                _stop_during_an_answer(shell, joining, problem, is_whole=is_whole)
                shell.split.request_load()
                wait(lambda: shell.split.load_state == "loaded")
                assert answer() == alone, "it has joined again by itself"
            joining.kill()
            wait(lambda: shell.split.load_state != "loaded")
            assert "has" in shell.machines.team.status
        finally:
            joining.kill()
            joining.wait()
