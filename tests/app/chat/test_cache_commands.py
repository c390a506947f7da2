"""Which caches of chats are saved and loaded, and when: the commands to a scripted engine."""

from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.chat import cache
from app.core.paths import chat_caches_dir
from app.main import Shell
from engine import AnswerRequest, EngineError, LoadState, SaveState, StateFileError, Unload
from tests.helpers.fake_host import Script
from tests.helpers.shell_driver import MODEL, MakeShell, ask, host_of, running

HASH = "ab" * 32


@pytest.fixture(autouse=True)
def _short_chats_count(monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
    monkeypatch.setattr(cache, "MIN_TOKENS", 4)
    script.model_hash = HASH


def chats(qtbot: QtBot, shell: Shell, *texts: str) -> list[str]:
    """Ask in several new chats, and return their ids."""
    made = []
    for text in texts:
        shell.chat_presenter.new_chat()
        ask(qtbot, shell, text)
        made.append(shell.session.current.id)
    return made


def saved(shell: Shell) -> list[tuple[str, int | None]]:
    """Return the chat and the answer's number of each save command, in order."""
    commands = [c for c in host_of(shell).commands if isinstance(c, SaveState)]
    return [(Path(c.path).name.partition("-")[0], c.of) for c in commands]


def numbers(shell: Shell) -> dict[str, int]:
    """Return the number of the last answer of each chat known to the cache."""
    return {key: held.answer.number for key, held in shell.chat_cache._held.items()}


def kinds(shell: Shell) -> set[type]:
    return {type(command) for command in host_of(shell).commands}


def test_another_chat_costs_no_files(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    first, second = chats(qtbot, shell, "First", "Second")
    for chat in (first, second, first):
        shell.chat_presenter.open_chat(chat)
        ask(qtbot, shell, "And?")
    assert not kinds(shell) & {SaveState, LoadState}


def test_all_are_saved_before_the_model_leaves_the_last_one_first(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    first, second, third = chats(qtbot, shell, "First", "Second", "Third")
    shell.chat_presenter.open_chat(first)
    ask(qtbot, shell, "And?")
    script.answer_error = EngineError("No.")
    shell.chat_presenter.open_chat(second)
    ask(qtbot, shell, "And?")
    script.answer_error = None
    known = numbers(shell)
    with qtbot.waitSignal(shell.client.unloaded):
        shell.models.eject()
    assert saved(shell) == [(first, known[first]), (third, known[third])], (
        "the other has no known state"
    )
    assert type(host_of(shell).commands[-1]) is Unload
    with qtbot.waitSignal(shell.client.loaded):
        shell.models.load()
    with qtbot.waitSignal(shell.client.unloaded):
        shell.models.eject()
    assert len(saved(shell)) == 2, "nothing is new"


def test_the_first_answer_reads_the_file_and_no_other(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    (chat,) = chats(qtbot, shell, "First")
    path = chat_caches_dir() / f"{chat}-{HASH[:16]}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"state")
    ask(qtbot, shell, "More")
    assert LoadState not in kinds(shell), "the engine has it"
    with qtbot.waitSignal(shell.client.unloaded):
        shell.models.eject()
    with qtbot.waitSignal(shell.client.loaded):
        shell.models.load()
    for _ in range(2):
        ask(qtbot, shell, "And?")
    after = [type(command) for command in host_of(shell).commands]
    assert after[-3:] == [LoadState, AnswerRequest, AnswerRequest]
    assert host_of(shell).commands[-3] == LoadState(str(path))


def test_an_older_file_stays_where_the_engine_cannot_save(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    """The user is not notified; an unreadable file is deleted."""
    shell = make_shell(model=MODEL)
    (chat,) = chats(qtbot, shell, "First")
    path = chat_caches_dir() / f"{chat}-{HASH[:16]}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"state")
    script.state_error = StateFileError(str(path), "There is nothing that could be saved.")
    with qtbot.waitSignal(shell.client.unloaded):
        shell.models.eject()
    assert [asked for asked, _ in saved(shell)] == [chat]
    assert path.read_bytes() == b"state"
    assert not shell.window.banner.isVisible()
    with qtbot.waitSignal(shell.client.loaded):
        shell.models.load()
    ask(qtbot, shell, "And?")
    assert not path.exists()


def test_chats_that_were_left_are_saved_when_nothing_is_done(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    """Except the last one, in which the user is likely to continue."""
    shell = make_shell(model=MODEL)
    first, _ = chats(qtbot, shell, "First", "Second")
    assert shell.chat_cache._quiet.isActive()
    script.hold = True
    shell.chat_presenter.new_chat()
    shell.chat_presenter.send("Third")
    assert not shell.chat_cache._quiet.isActive()
    shell.chat_cache.save_left()
    assert saved(shell) == []
    host_of(shell).let_go(script)
    qtbot.waitUntil(lambda: shell.client.is_idle)
    third = shell.session.current.id
    shell.chat_presenter.open_chat(first)
    ask(qtbot, shell, "And?")
    shell.chat_cache.save_left()
    asked = [chat for chat, _ in saved(shell)]
    assert asked[0] == third
    assert first not in asked
    qtbot.waitUntil(lambda: shell.client.is_idle)
    shell.chat_cache.save_left()
    assert [chat for chat, _ in saved(shell)] == asked, "once"


def test_more_than_may_be_on_disk_is_not_saved(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    _, second, third = chats(qtbot, shell, "First", "Second", "Third")
    one = shell.chat_cache._n_bytes(shell.chat_cache._held[third].most_tokens)
    shell.chat_cache._max_bytes = 5 * one // 2
    shell.chat_cache.leave()
    assert [chat for chat, _ in saved(shell)] == [third, second]


def test_a_deleted_chat_is_not_saved(qtbot: QtBot, make_shell: MakeShell) -> None:
    shell = make_shell(model=MODEL)
    first, second = chats(qtbot, shell, "First", "Second")
    shell.session.delete([first], "")
    shell.chat_cache.leave()
    assert [chat for chat, _ in saved(shell)] == [second]


def test_closing_while_two_answers_run_saves_what_they_have(
    qtbot: QtBot, make_shell: MakeShell, script: Script
) -> None:
    shell = make_shell(model=MODEL)
    script.hold, script.hold_after = True, 5
    for text in ("First", "Second"):
        shell.chat_presenter.new_chat()
        shell.chat_presenter.send(text)
    qtbot.waitUntil(lambda: all(answer.meter.n_tokens >= 4 for answer in running(shell)))
    known = numbers(shell)
    host = host_of(shell)
    shell.window.close()
    commands = [c for c in host.commands if isinstance(c, SaveState)]
    assert [command.of for command in commands] == list(reversed(known.values()))
