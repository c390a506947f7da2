"""However the window's process ends, chats and drafts are on disk, and nothing else is."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from app.chat.store import ChatStore
from app.core.paths import chats_dir
from tests.helpers.tiers import swept
from tests.helpers.window_process import ANSWER, read_notes

REPO = Path(__file__).resolve().parents[3]
WAIT_S = 60
LOST_S = 1.0
"""Age in seconds of text that a killed process may lose."""

N_KILLS = 500

Note = dict[str, Any]


@contextmanager
def window(log: Path, seed: int) -> Iterator["subprocess.Popen[str]"]:
    """Start a window with a running answer; end it in any case."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.window_process", str(log), str(seed)],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        text=True,
        stderr=subprocess.PIPE,
    )
    with process:
        try:
            wait_for_text(process, log)
            yield process
        finally:
            process.kill()


def wait_for_text(process: "subprocess.Popen[str]", log: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not any("text" in note for note in read_notes(log)):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "the window does not respond"
        time.sleep(0.02)


def stored() -> dict[str, Any]:
    """Return the intact chats on disk by id, as the next window reads them."""
    store = ChatStore(chats_dir())
    chats = {chat.id: chat.to_json() for chat in store.load()}
    assert len(chats) == len(store.summaries())
    store.database.close()
    return chats


def assert_text_kept(notes: list[Note], chats: dict[str, Any], until: float) -> None:
    """Check that all answers shown until a time are stored."""
    for note in notes:
        if "text" in note:
            messages = chats[note["chat"]]["messages"]
            content = messages[note["index"]]["content"] if note["index"] < len(messages) else ""
            assert ANSWER.startswith(content)
            assert note["at"] > until or len(content) >= note["text"]


def assert_draft_kept(notes: list[Note], chats: dict[str, Any], until: float) -> None:
    """Check that the stored draft was in the field at that time or later."""
    drafts = [note for note in notes if "draft" in note]
    before = [note for note in drafts if note["at"] <= until]
    recent = before[-1:] + [note for note in drafts if note["at"] > until]
    if before:
        chat = before[-1]["chat"]
        lengths = {note["draft"] for note in recent if note["chat"] == chat}
        assert len(chats[chat]["draft"]) in lengths


def left_behind(home: Path) -> list[Path]:
    return [*home.rglob(".tandem-*")]


@pytest.mark.parametrize(
    "number", swept([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], quick=[signal.SIGHUP])
)
def test_a_signal_closes_the_window_in_order(
    tmp_path: Path, home: Path, number: signal.Signals
) -> None:
    """A logout, a closed terminal, `kill`: everything shown is stored, and the status is 0."""
    log = tmp_path / "log"
    with window(log, seed=1) as process:
        process.send_signal(number)
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert "Traceback" not in err
    notes, chats = read_notes(log), stored()
    assert_text_kept(notes, chats, notes[-1]["at"])
    assert_draft_kept(notes, chats, notes[-1]["at"])
    assert left_behind(home) == []


@pytest.mark.parametrize("n_kills", swept([1, 3, 50, N_KILLS], quick=[1]))
@pytest.mark.timeout(7200)
def test_a_killed_window_loses_at_most_a_second(tmp_path: Path, home: Path, n_kills: int) -> None:
    chance, known = random.Random(n_kills), set[str]()
    for seed in range(n_kills):
        log = tmp_path / f"log-{seed}"
        with window(log, seed) as process:
            time.sleep(chance.uniform(0, 3))
            killed_at = time.time()
            process.kill()
        notes, chats = read_notes(log), stored()
        assert known <= set(notes[0]["started"]), "a chat is missing"
        assert notes[0]["damaged"] == 0
        assert_text_kept(notes, chats, killed_at - LOST_S)
        assert_draft_kept(notes, chats, killed_at - LOST_S)
        known = set(chats)
    log = tmp_path / "last"
    with window(log, seed=n_kills) as process:
        process.terminate()
        process.communicate(timeout=WAIT_S)
    assert known <= set(read_notes(log)[0]["started"]), "a chat is missing"
    assert known <= set(stored())
    assert left_behind(home) == []
