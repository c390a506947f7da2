"""The command line is ended from outside: signals at any moment, full disks, closed streams."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from app.__main__ import main
from tests.helpers.tiers import swept

REPO = Path(__file__).resolve().parents[3]
WAIT_S = 60
IS_LINUX = sys.platform == "linux"

pytestmark = pytest.mark.skipif(not IS_LINUX, reason="reads /proc, writes to /dev/full")


def start(*arguments: object, **streams: object) -> "subprocess.Popen[str]":
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONIOENCODING": "utf-8"}
    return subprocess.Popen(
        [sys.executable, "-m", "app", *map(str, arguments)],
        text=True, env=environment, **{**pipes, **streams},
    )  # type: ignore[call-overload,no-any-return]  # fmt: skip


def wait_for_first_line(process: "subprocess.Popen[str]") -> None:
    """Wait until the program minds signals: what comes before is the interpreter's own start."""
    path, wanted = Path(f"/proc/{process.pid}/status"), 1 << (signal.SIGTERM - 1)
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        (line,) = (line for line in path.read_text().splitlines() if line.startswith("SigCgt"))
        if int(line.split()[1], 16) & wanted:
            return
        time.sleep(0.001)
    pytest.fail("the program minds no signals")


@pytest.mark.parametrize("seed", swept(range(60), quick=range(2)))
def test_ctrl_c_at_any_moment_is_silent(model: Path, seed: int) -> None:
    """During the imports of Python, of torch, the load, the answer and the end."""
    chance = random.Random(seed)
    number = chance.choice([signal.SIGINT, signal.SIGINT, signal.SIGTERM])
    process = start("generate", model, "-p", "hello", "-n", 20, "--ignore-eos")
    wait_for_first_line(process)
    time.sleep(chance.choice([0.0, 0.1, 1.0, 4.0]) * chance.random())
    process.send_signal(number)
    out, err = process.communicate(timeout=WAIT_S)
    is_in_time = process.returncode == 128 + number
    is_too_late = process.returncode == 0 and err.startswith("[")  # the answer's footer
    assert is_in_time or is_too_late, err
    assert len(err.splitlines()) <= 1, err
    assert "Traceback" not in err + out


@pytest.mark.parametrize("number", swept([signal.SIGTERM, signal.SIGHUP], quick=[signal.SIGTERM]))
def test_a_signal_that_ends_programs_ends_an_answer_in_order(
    model: Path, number: signal.Signals
) -> None:
    process = start(
        "generate", model, "-p", "hello", "-n", 10**8, "--ctx", 64, "--on-overflow", "shift",
        "--ignore-eos",
    )  # fmt: skip
    assert process.stderr is not None
    assert "context full" in process.stderr.readline()
    process.send_signal(number)
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 128 + number
    assert out
    assert "Traceback" not in err


@pytest.mark.slow
def test_an_ignored_signal_stays_ignored(model: Path) -> None:
    """As under `nohup`."""
    code = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
        "os.execv(sys.executable, [sys.executable, '-m', 'app', *sys.argv[1:]])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "generate", str(model), "-p", "hello", "-n", "4"],
        env={**os.environ, "PYTHONPATH": str(REPO)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    wait_for_first_line(process)
    process.send_signal(signal.SIGHUP)
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    assert out


@pytest.mark.parametrize(
    "arguments",
    swept(
        [("devices",), ("plan", "demo", "--json"), ("plan", "--help"), ("--help",), ("--version",)],
        quick=[("plan", "demo", "--json"), ("--help",)],
    ),
    ids=" ".join,
)
def test_a_full_disk_is_one_line(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        process = start(*arguments, stdout=full)
        _, err = process.communicate(timeout=WAIT_S)
    assert err == "The output cannot be written: No space left on device.\n"
    assert process.returncode == 1


def test_an_answer_to_a_full_disk_is_one_line(model: Path) -> None:
    with open("/dev/full", "w") as full:
        process = start("generate", model, "-p", "hello", "-n", 4, stdout=full)
        _, err = process.communicate(timeout=WAIT_S)
    assert err == "The output cannot be written: No space left on device.\n"
    assert process.returncode == 1


@pytest.mark.slow
def test_notes_that_nobody_can_read_do_not_matter(model: Path) -> None:
    with open("/dev/full", "w") as full:
        process = start("generate", model, "-p", "hello", "-n", 4, stderr=full)
        out, _ = process.communicate(timeout=WAIT_S)
    assert out
    assert process.returncode == 0


@pytest.mark.parametrize("arguments", [("generate", "-p", "-"), ("chat",)], ids=lambda a: a[0])
def test_an_input_that_cannot_be_read_is_one_line(
    model: Path,
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_only = os.open(tmp_path / "written", os.O_WRONLY | os.O_CREAT)
    with open(write_only, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        status = main([arguments[0], str(model), *arguments[1:]])
    assert status == 1
    err = capsys.readouterr().err
    assert err.splitlines()[-1] == "The input cannot be read: Bad file descriptor."


def test_the_help_of_a_reader_that_has_gone_is_no_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = start("--help", stdout=write_end)
    os.close(write_end)
    _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (0, "")
