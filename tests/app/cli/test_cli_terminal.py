"""No terminal obeys what a model says, or what stands in files, in their names or in templates."""

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.cli.output import LogLines, note, note_progress, table, write, write_json
from app.cli.talk import answer
from engine import AnswerRequest, EngineError, Finished, Timings, TokenText, Usage
from tests.helpers.acting_texts import ESCAPES, PAGES, acting
from tests.helpers.command_line import Run
from tests.helpers.golden import REPO
from tests.helpers.model_draft import ModelDraft

ALL = " ".join(ESCAPES)


class Terminal(io.StringIO):
    """Stream that says that it is a terminal; `encoding` is that of a real one."""

    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Terminal]:
    """Return a function that makes both output streams one terminal."""

    def make() -> Terminal:
        found = Terminal()
        monkeypatch.setattr(sys, "stdout", found)
        monkeypatch.setattr(sys, "stderr", found)
        return found

    return make


class SayingModel:
    """Model whose answer comes in given pieces."""

    warnings: tuple[str, ...] = ()
    fallbacks: tuple[Any, ...] = ()

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def answer(self, request: AnswerRequest, is_cancelled: Callable[[], bool]) -> Iterator[Any]:
        for at, piece in enumerate(self._pieces):
            yield TokenText(piece, (at,))
        yield Finished("stop", Usage(0, 0, len(self._pieces)), Timings())


@pytest.mark.parametrize("text", [*ESCAPES, *PAGES])
@pytest.mark.parametrize("size", [1, 2, 1000])
def test_what_a_model_says_is_not_obeyed_however_it_is_cut(
    on_terminal: Callable[[], Terminal], text: str, size: int
) -> None:
    terminal = on_terminal()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    result = answer(SayingModel(pieces), AnswerRequest(prompt="x"), is_silent=False)  # type: ignore[arg-type]
    assert not acting(terminal.getvalue())
    assert result.text == text, "the conversation goes on with what was said"


def test_files_and_programs_get_every_character(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\x1b[31mred\x1b[0m\r\n\u202e"
    write(text)
    assert capsys.readouterr().out == text + "\n"


@pytest.mark.parametrize("text", ESCAPES)
def test_notes_tables_and_logs_are_not_obeyed(
    on_terminal: Callable[[], Terminal], text: str
) -> None:
    terminal = on_terminal()
    note(text)
    write(table(("NAME",), [(text,), (f"{text}\n\t{text}",)], frozenset()))
    record = logging.LogRecord("engine", logging.WARNING, "", 0, "%s is odd", (text,), None)
    LogLines().handle(record)
    assert not acting(terminal.getvalue())
    assert len(terminal.getvalue().splitlines()) == 5


@pytest.mark.parametrize("text", ESCAPES)
def test_progress_stays_in_one_line(on_terminal: Callable[[], Terminal], text: str) -> None:
    terminal = on_terminal()
    note_progress(f"Loading {text}\n{text * 1000}")
    clear, shown = terminal.getvalue()[:4], terminal.getvalue()[4:]
    assert clear == "\r\x1b[K"
    assert not acting(shown)
    assert "\n" not in shown
    assert len(shown) <= 200


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_json_has_every_character_and_none_that_acts(
    on_terminal: Callable[[], Terminal], encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = on_terminal()
    monkeypatch.setattr(Terminal, "encoding", encoding)
    write_json({"text": ALL})
    assert not acting(terminal.getvalue())
    assert json.loads(terminal.getvalue()) == {"text": ALL}


def assert_one_short_line(text: str) -> None:
    assert not acting(text)
    assert text.count("\n") == 1
    assert text.endswith("\n")
    assert len(text) <= 501
    assert "Traceback" not in text


@pytest.mark.parametrize("text", ESCAPES[:-1])
def test_an_error_of_a_template_is_one_short_line(
    run: Run, draft: ModelDraft, tmp_path: Path, text: str
) -> None:
    source = "{{ raise_exception(text ~ '<img src=x>' ~ 'A' * 100000) }}".replace(
        "text", json.dumps(text)
    )
    hostile = draft.changed({"tokenizer.chat_template": source}).write(tmp_path / "a.gguf")
    outcome = run("generate", hostile, "-p", "hello")
    assert outcome.status == 1
    assert_one_short_line(outcome.err)
    assert "AAAA" in outcome.err


@pytest.mark.parametrize("text", [text for text in ESCAPES if "\0" not in text])
def test_an_error_that_names_a_file_is_one_short_line(run: Run, tmp_path: Path, text: str) -> None:
    for name in (f"{text.replace('/', '_')}.gguf", "x" * 5000 + text):
        outcome = run("inspect", tmp_path / name)
        assert outcome.status == 1
        assert_one_short_line(outcome.err)


@pytest.mark.parametrize("text", ESCAPES)
def test_an_error_of_usage_does_not_act(run: Run, text: str) -> None:
    outcome = run("generate", "model.gguf", "-p", "x", f"--none={text}")
    assert outcome.status == 2
    assert not acting(outcome.err)


def test_what_a_header_says_is_not_obeyed(
    run: Run, draft: ModelDraft, tmp_path: Path, on_terminal: Callable[[], Terminal]
) -> None:
    """Names of models, keys, values and tensors come from the file."""
    words = ALL.replace("\udc9b", "")
    hostile = draft.changed({"general.name": words, f"general.\x1b[31m{words}": words})
    tensors = dict(hostile.tensors)
    some = next(iter(tensors))
    tensors[f"\x1b[2J\u202e{some}"[:60]] = tensors[some]
    path = ModelDraft(hostile.meta, tensors).write(tmp_path / "a\x1b[31m.gguf")
    document = run("inspect", path, "--json").document
    assert f"general.\x1b[31m{words}" in document["metadata"]
    screen = on_terminal()
    run("inspect", path, "--metadata", "--tensors")
    assert "general.name" in screen.getvalue()
    assert not acting(screen.getvalue())


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other terminals")
def test_a_real_terminal_gets_no_escape_sequence(draft: ModelDraft, tmp_path: Path) -> None:
    import pty

    words = "".join(ESCAPES[:-1])
    path = draft.changed({"general.name": words}).write(tmp_path / "a\x1b[31m\u202e.gguf")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "app", "inspect", str(path), "--metadata"]
    child = subprocess.Popen(command, stdout=theirs, stderr=theirs, cwd=REPO)
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # how the end of a terminal is told
        while piece := os.read(ours, 65536):
            said += piece
    os.close(ours)
    assert child.wait() == 0
    text = said.decode().replace("\r\n", "\n")
    assert "photo_" in text
    assert not acting(text)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other terminals")
def test_chat_at_a_real_terminal(model: Path, tmp_path: Path) -> None:
    """A half-typed line is cleared, a paste is one message, and the prompt is no output."""
    import pty

    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "app", "chat", str(model), "-n", "4", "--temp", "0"]
    environment = {
        **os.environ,
        "TANDEM_HOME": str(tmp_path),
        "TERM": "xterm",
        "PROMPT_TOOLKIT_NO_CPR": "1",
    }
    with (tmp_path / "out").open("wb") as out:
        child = subprocess.Popen(
            command, stdin=theirs, stdout=out, stderr=theirs, cwd=REPO, env=environment
        )
    os.close(theirs)
    said = b""

    def wait_for(text: bytes) -> None:
        nonlocal said
        while text not in said:
            said += os.read(ours, 65536)
        said = said.partition(text)[2]

    reading = b"\x1b[?2004h"  # asks the terminal to mark pastes
    wait_for(reading)
    os.write(ours, b"half a li\x03\x1b[200~one\ntwo\x1b[201~\r")
    wait_for(b"two")
    wait_for(reading)
    os.write(ours, b"\x04")
    with contextlib.suppress(OSError):
        while os.read(ours, 65536):
            pass
    os.close(ours)
    assert child.wait() == 0
    assert "+one\n+two\n" in (tmp_path / "typed-messages").read_text()
    assert (tmp_path / "out").read_bytes().strip()
    assert b"> " not in (tmp_path / "out").read_bytes()


def test_messages_of_all_errors_are_short() -> None:
    error = EngineError("x" * 10_000_000, "Do it.")
    assert len(str(error)) == len(error.message) == len(error.args[0]) == 500
    assert str(EngineError("x" * 500)) == "x" * 500
    assert SimpleNamespace(**vars(error)).hint == "Do it."
