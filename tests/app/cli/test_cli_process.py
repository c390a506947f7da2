"""The command line among other programs: encodings, closed pipes, Ctrl+C."""

import gc
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from app.__main__ import main
from app.core.process.interruption import importing
from tests.helpers.command_line import GREEDY, Outcome, Run, assert_refused

REPO = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("command", ["", "generate", "chat", "tokenize"])
def test_a_command_that_only_reads_its_options_imports_no_heavy_module(command: str) -> None:
    """Everything heavy would be imported again in front of each answer of `tandem generate`."""
    code = f"""if True:
        import sys
        from app.__main__ import main
        try:
            main("{command} --help".split())
        except SystemExit:
            pass
        heavy = ("torch", "numpy", "psutil", "gguf", "tokenizers", "llvmlite", "PySide6",
                 "engine.api", "engine.hardware.devices.catalog", "engine.planning.plan")
        sys.exit(" ".join(name for name in heavy if name in sys.modules) or 0)
    """
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert "usage: tandem" in found.stdout


def test_imports_look_for_no_garbage() -> None:
    n_frozen = gc.get_freeze_count()
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > n_frozen


def test_any_text_can_be_written_to_any_terminal(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A character that the encoding lacks is replaced; JSON escapes it."""
    for options in ((), ("--json",)):
        stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", stream)
        assert (
            main(["generate", str(model), "-p", "hello", "-n", "40", "--seed", "1", *options]) == 0
        )
        monkeypatch.undo()
        written = stream.detach().getvalue().decode("ascii")  # type: ignore[attr-defined]
        assert written
        if options:
            assert any(ord(c) > 127 for c in json.loads(written)["text"])


def test_input_in_another_encoding_is_read_as_far_as_it_goes(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"na\xefve\n"), encoding="utf-8"))
    assert main(["chat", str(model), *GREEDY, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["turns"][0]["prompt"] == "na\ufffdve"


def test_a_closed_input_is_an_empty_one(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in `tandem chat … <&-`."""
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["chat", str(model), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"turns": []}
    sys.stdin.close()


def press_ctrl_c(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Interrupt the process when the first text is shown."""
    shown: list[str] = []

    def write(text: str = "", end: str = "\n") -> None:
        if not shown:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        shown.append(text)
        sys.stdout.write(text + end)

    monkeypatch.setattr("app.cli.talk.write", write)


def test_ctrl_c_ends_the_answer_and_a_second_one_the_program(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = signal.getsignal(signal.SIGINT)
    ask = ("generate", model, "-p", "hello", "-n", 100, "--ignore-eos", "--temp", 0)
    press_ctrl_c(monkeypatch, 1)
    once = run(*ask)
    assert once.status == 0
    assert once.out.strip()
    assert "cancelled]" in once.err
    press_ctrl_c(monkeypatch, 2)
    twice = run(*ask)
    assert twice.status == 130
    assert "Traceback" not in twice.err
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_while_loading_ends_the_program(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("engine.Model", interrupted, raising=False)
    outcome = run("generate", model, "-p", "hello")
    assert (outcome.status, outcome.out, outcome.err) == (130, "", "")


def start(*arguments: object) -> "subprocess.Popen[str]":
    """Start `python -m app …` in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONIOENCODING": "utf-8"}
    return subprocess.Popen(
        [sys.executable, "-m", "app", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8",
        env=environment,
    )  # fmt: skip


def test_a_process_interrupted_ends_with_what_it_has(run: Run, model: Path) -> None:
    process = start(
        "generate", model, "-p", "hello", "-n", 10**8, "--ctx", 64, "--on-overflow", "shift",
        "--ignore-eos", "--temp", 0, "--devices", "cpu,cpu", "--json",
    )  # fmt: skip
    assert process.stderr is not None
    assert "context full" in process.stderr.readline()  # so it is generating
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0
    document = json.loads(out)
    assert document["finish_reason"] == "cancelled"
    assert len(document["ids"]) == document["usage"]["completion_tokens"] > 0
    assert "Traceback" not in err


def test_a_reader_that_goes_away_is_no_error(model: Path) -> None:
    """As in `tandem generate … | head -c 10`."""
    process = start(
        "generate", model, "-p", "hello", "-n", 10**8, "--ctx", 64, "--on-overflow", "shift",
        "--ignore-eos",
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    assert len(process.stdout.read(10)) == 10
    process.stdout.close()
    assert process.wait(timeout=30) == 0
    noted = process.stderr.read().splitlines()
    process.stderr.close()
    assert all("dropped the oldest" in line for line in noted)


def test_a_process_says_an_error_in_one_line(folder: Path) -> None:
    process = start("inspect", folder / "absent.gguf", "--json")
    out, err = process.communicate(timeout=30)
    assert_refused(Outcome(process.returncode, out, err), "There is no file")


def test_the_command_line_starts_without_qt_and_torch() -> None:
    """Both are slow to import, and a server may have no Qt."""
    code = "import app.__main__, sys; print([m for m in ('PySide6', 'torch') if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert found.stdout == "[]\n"


WITHOUT_QT = (
    ("plan", "demo", "--devices", "cpu,cpu"),  # once, the demo model asked Qt for its place
    ("generate", "demo", "-p", "Hello", "-n", "4", "--devices", "cpu"),
    ("bench", "demo", "-p", "8", "-n", "4", "-r", "1", "--devices", "cpu"),
    ("devices",),
)
"""Commands that a server without Qt has."""


def test_commands_do_not_need_qt() -> None:
    """Nor what only the window draws with: a server with GPUs has none of it."""
    absent = ("PySide6", "shiboken6", "pyqtgraph", "markdown_it", "pygments")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent!r})); "
        "from app.__main__ import main\n"
        f"for arguments in {WITHOUT_QT!r}: print(main([*arguments, '--json']), end='\\0')"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    said = found.stdout.split("\0")
    assert len(said) == len(WITHOUT_QT) + 1
    for arguments, text in zip(WITHOUT_QT, said, strict=False):
        document, _, status = text.rstrip().rpartition("\n")
        assert status == "0", arguments
        assert json.loads(document), arguments
