"""Reopened chats: the engine gets their KV cache back."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.chat import cache
from app.core import paths
from app.main import Shell
from app.widgets.theme import apply_theme
from engine import Finished, SamplingParams, ThreadHost
from tests.helpers.shell_driver import ask, until_idle

WAIT_MS = 30_000
FIRST, SECOND = "What is tensor parallelism?", "How do I split a model over two devices?"


@pytest.fixture(autouse=True)
def _short_chats_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MIN_TOKENS", 4)


def opened(qapp: QApplication, qtbot: QtBot) -> Shell:
    """Open a window with the demo model."""
    shell = Shell(qapp, ThreadHost)
    shell.start()
    # titles would use pages of the small cache
    shell.keep(replace(shell.settings.current, auto_titles=False))
    shell.window.sampling.set_params(SamplingParams(temperature=0, max_tokens=24))
    model = paths.demo_model()
    assert model is not None
    with qtbot.waitSignal(shell.client.loaded, timeout=WAIT_MS):
        shell.models.open(str(model))
    return shell


def close(shell: Shell) -> None:
    shell.window.close()
    shell.window.deleteLater()
    shell.deleteLater()


@pytest.fixture
def shell(qapp: QApplication, qtbot: QtBot) -> Iterator[Shell]:
    made = opened(qapp, qtbot)
    yield made
    close(made)
    apply_theme(qapp, "dark")


def n_cached(qtbot: QtBot, shell: Shell, question: str) -> int:
    """Ask, and return the number of prompt tokens from the cache."""
    found: list[Finished] = []
    connection = shell.client.finished.connect(lambda finished, _: found.append(finished))
    ask(qtbot, shell, question)
    shell.client.finished.disconnect(connection)
    return found[-1].usage.cached_tokens


def files() -> list[Path]:
    folder = paths.chat_caches_dir()
    return sorted(folder.iterdir()) if folder.exists() else []


def test_two_chats_in_turn_compute_only_what_is_new(shell: Shell, qtbot: QtBot) -> None:
    n_cached(qtbot, shell, FIRST)
    first = shell.session.current.id
    shell.session.new_chat("")
    n_cached(qtbot, shell, SECOND)
    second = shell.session.current.id
    shell.session.open_chat(first)
    assert n_cached(qtbot, shell, "And how much does it cost?") > 20
    shell.session.open_chat(second)
    assert n_cached(qtbot, shell, "And over three?") > 20
    assert files() == [], "the engine has both"


def test_a_chat_is_saved_before_another_may_need_its_room(
    shell: Shell, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_cached(qtbot, shell, FIRST)
    first = shell.session.current.id
    monkeypatch.setattr(cache, "GROWTH", 1.0)
    shell.session.new_chat("")
    n_cached(qtbot, shell, SECOND)
    assert [file.name.startswith(first) for file in files()] == [True]
    shell.session.open_chat(first)
    assert n_cached(qtbot, shell, "And how much does it cost?") > 20


def leave_first(shell: Shell, qtbot: QtBot) -> str:
    """Ask in two chats, save the first one, and return its id."""
    n_cached(qtbot, shell, FIRST)
    first = shell.session.current.id
    shell.session.new_chat("")
    n_cached(qtbot, shell, SECOND)
    until_idle(qtbot, shell)
    with qtbot.waitSignal(shell.client.state_saved, timeout=WAIT_MS):
        shell.chat_cache.save_left()
    assert files()[0].name.startswith(first)
    return first


def load_again(shell: Shell, qtbot: QtBot) -> None:
    """Unload the model and load it again."""
    with qtbot.waitSignal(shell.client.unloaded, timeout=WAIT_MS):
        shell.models.eject()
    with qtbot.waitSignal(shell.client.loaded, timeout=WAIT_MS):
        shell.models.load()


def test_a_new_window_goes_on_where_the_old_one_was(qapp: QApplication, qtbot: QtBot) -> None:
    shell = opened(qapp, qtbot)
    n_cached(qtbot, shell, FIRST)
    chat = shell.session.current.id
    close(shell)
    assert [path.name.partition("-")[0] for path in files()] == [chat]
    again = opened(qapp, qtbot)
    try:
        assert again.session.current.id == chat
        assert n_cached(qtbot, again, "And what is it for?") > 20
    finally:
        close(again)
        apply_theme(qapp, "dark")


def test_a_model_that_goes_leaves_its_cache(shell: Shell, qtbot: QtBot) -> None:
    """Check that each chat is saved with its own tokens."""
    n_cached(qtbot, shell, FIRST)
    first = shell.session.current.id
    shell.session.new_chat("")
    n_cached(qtbot, shell, SECOND)
    load_again(shell, qtbot)
    assert len(files()) == 2
    assert n_cached(qtbot, shell, "And what is it for?") > 20
    shell.session.open_chat(first)
    assert n_cached(qtbot, shell, "And what is it for?") > 20


@pytest.mark.parametrize("harm", ["empty", "cut", "noise"])
def test_a_broken_file_only_costs_time(shell: Shell, qtbot: QtBot, harm: str) -> None:
    first = leave_first(shell, qtbot)
    shell.chat_cache._max_bytes, before = 0, shell.chat_cache._max_bytes
    load_again(shell, qtbot)  # the engine drops its cache, and the file is unchanged
    shell.chat_cache._max_bytes = before
    (path,) = files()
    data = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": data[:-100], "noise": os.urandom(3000)}[harm])
    shell.session.open_chat(first)
    assert n_cached(qtbot, shell, "And how much does it cost?") < 20
    assert not path.exists()
    answer = shell.session.current.messages[-1]
    assert answer.content
    assert not answer.problem


def test_a_deleted_chat_leaves_nothing(shell: Shell, qtbot: QtBot) -> None:
    first = leave_first(shell, qtbot)
    shell.session.delete([first], "")
    assert files() == []


def test_the_folder_stays_small(shell: Shell, qtbot: QtBot) -> None:
    leave_first(shell, qtbot)
    (oldest,) = files()
    os.utime(oldest, (1, 1))
    shell.chat_cache._max_bytes = oldest.stat().st_size * 3 // 2
    shell.session.new_chat("")
    n_cached(qtbot, shell, FIRST)
    until_idle(qtbot, shell)
    with qtbot.waitSignal(shell.client.state_saved, timeout=WAIT_MS):
        shell.chat_cache.save_left()
    assert len(files()) == 1
    assert not oldest.exists()


def test_nothing_is_kept_where_nothing_may_be(shell: Shell, qtbot: QtBot) -> None:
    shell.chat_cache._max_bytes = 0
    n_cached(qtbot, shell, FIRST)
    shell.session.new_chat("")
    n_cached(qtbot, shell, SECOND)
    shell.chat_cache.close()
    assert files() == []
