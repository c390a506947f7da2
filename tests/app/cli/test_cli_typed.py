"""Messages typed at a terminal: pastes, keys, history, commands."""

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from app.cli.chat import MessageEditor
from tests.helpers.command_line import GREEDY, Run

ENTER, CTRL_C, CTRL_D, UP, ALT_ENTER = "\r", "\x03", "\x04", "\x1b[A", "\x1b\r"
PASTE = "\x1b[200~{}\x1b[201~"


@pytest.fixture
def keyboard() -> Iterator[PipeInput]:
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        yield pipe


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("hello" + ENTER, "hello"),
        (PASTE.format("def f():\n    return 1\n") + ENTER, "def f():\n    return 1\n"),
        ("one" + ALT_ENTER + "two" + ENTER, "one\ntwo"),
        ("half a li" + CTRL_C + "whole" + ENTER, "whole"),
        (CTRL_C + "still here" + ENTER, "still here"),
        (CTRL_D, None),
    ],
    ids=["line", "paste", "two lines", "cleared", "nothing to clear", "quit"],
)
def test_keys_and_pastes_make_one_message(
    keyboard: PipeInput, keys: str, message: str | None
) -> None:
    keyboard.send_text(keys)
    assert MessageEditor(None).read() == message


def test_earlier_messages_come_back_in_a_later_chat(keyboard: PipeInput, tmp_path: Path) -> None:
    """They lie in a file that only their owner can read."""
    path = tmp_path / "data" / "typed"
    keyboard.send_text(PASTE.format("one\ntwo") + ENTER)
    assert MessageEditor(path).read() == "one\ntwo"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    keyboard.send_text(UP + "!" + ENTER)
    assert MessageEditor(path).read() == "one\ntwo!"


def test_a_history_that_cannot_be_written_is_one_in_memory(
    keyboard: PipeInput, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    editor = MessageEditor(tmp_path / "file" / "typed")
    for text in ("first", "second"):
        keyboard.send_text(text + ENTER)
        assert editor.read() == text
    keyboard.send_text(UP + UP + ENTER)
    assert editor.read() == "first"


def test_a_history_that_becomes_unusable_does_not_end_the_chat(
    keyboard: PipeInput, tmp_path: Path
) -> None:
    path = tmp_path / "typed"
    editor = MessageEditor(path)
    path.unlink()
    path.mkdir()
    keyboard.send_text("hello" + ENTER)
    assert editor.read() == "hello"


def test_commands_are_told_from_messages(run: Run, model: Path) -> None:
    """A word after a slash is a command; a path or a sentence is a message."""
    typed = "/help\n/halp\n/etc/hosts is what?\n/quit\nnever\n"
    outcome = run("chat", model, *GREEDY, "--json", stdin=typed)
    assert [turn["prompt"] for turn in outcome.document["turns"]] == ["/etc/hosts is what?"]
    assert "/new starts a new chat" in outcome.err
    assert "Unknown command /halp; /help lists the commands." in outcome.err
