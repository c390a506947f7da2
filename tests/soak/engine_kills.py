"""Kills the engine's process at random moments; its window says so and goes on.

    python -m tests.soak.engine_kills --rounds 500 --seed 1

One window lives for many rounds. In each, the engine is killed while it starts, loads, reads a
prompt, answers, splits the model anew or saves a chat's cache; one click brings it back, and then
it gives the known answer.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from tests.soak.campaign import Report, run_campaign
from tests.soak.ledger import Ledger
from tests.soak.phases import known_answer, make_phases, open_middling
from tests.soak.remains import descendants, left_files, orphans, still_alive
from tests.soak.window import Note, Window, WindowProblem

TOLD_S = 5.0
"""Seconds within which the window says what has happened."""

BACK_S = 60.0
"""Seconds within which the engine is back after the click, on a busy machine."""

MAX_ROUNDS = 60
"""Rounds after which a window is closed, and another one goes on."""

KILLED = "The engine was killed (SIGKILL) while "


class EngineKills:
    """A window whose engine is killed again and again."""

    def __init__(self, home: Path, seed: int, only: str = "") -> None:
        self._home, self._chance = home, random.Random(seed)
        self._phases = make_phases(home)
        self._names = [only] if only else list(self._phases)
        self._ledger = Ledger(home)
        self._answer = ""
        self._window: Window | None = None
        self._n_seen = self._n_rounds = 0
        self._variables: dict[str, str] = {}  # of the windows' environment
        self.report = Report()

    def round(self, number: int) -> None:
        """Kill the engine in a phase, and bring it back.

        Raises:
            WindowProblem: something is lost, wrong or left behind, or comes too late.
        """
        name = self._names[number % len(self._names)]
        window, phase = self._running(), self._phases[name]
        start = phase.enter(window)
        began = time.time()
        phase.wait(window, start, self._chance)
        engine = engine_of(window)
        family = {engine} | descendants(engine)
        before = window.n_notes
        killed_at = time.time()
        os.kill(engine, signal.SIGKILL)
        figures = see_recovery(window, before, killed_at, KILLED)
        if left := still_alive(family):
            raise WindowProblem(f"of the engine and what it started, these run on: {left}")
        phase.count(began, window.notes(start), killed_at)
        self._go_on(window)
        self.report.add(name, figures, phase)

    def close(self) -> None:
        """Close the window in order.

        Raises:
            WindowProblem: something is lost or left behind.
        """
        window, self._window = self._window, None
        if window is None:
            return
        with window:
            if status := window.close():
                raise WindowProblem(f"the window ended with {status}; {window.errors[-3000:]}")
            self._check_chats(window, time.time())
        if found := orphans(window.mark):
            raise WindowProblem(f"these run on: {found}")
        if files := left_files(self._home):
            raise WindowProblem(f"left behind: {files}")
        if "Traceback" in window.errors:
            raise WindowProblem(window.errors[-3000:])

    def __enter__(self) -> "EngineKills":
        return self

    def __exit__(self, *_: object) -> None:
        if self._window is not None:
            self._window.__exit__()

    def _running(self) -> Window:
        """Return the window with the middling model; start one where there is none."""
        if self._n_rounds >= MAX_ROUNDS:
            self.close()
        if self._window is None:
            self._n_seen = self._n_rounds = 0
            self._window = Window(self._home, self._variables)
            self._window.wait_for("ready")
            self._check_answer(self._window)
            open_middling(self._window)
        self._n_rounds += 1
        return self._window

    def _go_on(self, window: Window) -> None:
        """Check that everything is as before, and bring the window to the middling model."""
        time.sleep(0.1)
        self._check_chats(window, time.time())
        self._check_answer(window)
        for chat in list(self._ledger.chats):
            start = window.do("delete_chat", chat=chat)
            window.wait_for("deleted", start)
        open_middling(window)

    def _check_chats(self, window: Window, until: float) -> None:
        self._ledger.check(window.notes(self._n_seen), until)
        self._n_seen = window.n_notes

    def _check_answer(self, window: Window) -> None:
        answer = known_answer(window)
        self._answer = self._answer or answer
        if answer != self._answer:
            raise WindowProblem(f"the demo answers {answer!r}, not {self._answer!r}")


def engine_of(window: Window) -> int:
    """Return the engine's process of a window."""
    pid = window.notes()[-1]["engine"]
    if pid is None:
        raise WindowProblem("there is no engine")
    return int(pid)


def see_recovery(window: Window, start: int, at: float, *told: str) -> dict[str, float]:
    """Check that the window tells how its engine has ended, and goes on after one click.

    Args:
        start: number of the first note after the engine was disturbed.
        at: time at which it was.
        told: sentences of which one begins the notice.

    Returns:
        Seconds until the notice, and from the click until the model is there again and, if an
        answer was cut off, goes on with it.

    Raises:
        WindowProblem: it does not.
    """
    notice = window.wait(lambda note: _tells(note, told), start, TOLD_S + 5)
    told_s = notice["at"] - at
    if told_s > TOLD_S:
        raise WindowProblem(f"the window said so after {told_s:.1f} s: {notice}")
    look = settled(window)
    shown = _shown_text(window.notes(), look["chat"])
    if shown and look["shown"] != shown:
        raise WindowProblem(f"{shown[-80:]!r} was shown, and now {look['shown'][-80:]!r} is")
    if not look["offer"].startswith(("Reload", "Load the previous model")):
        raise WindowProblem(f"no click brings the engine back: {look}")
    clicked, clicked_at = window.do("recover"), time.time()
    back = window.wait_for("loaded", clicked, BACK_S)
    if look["offer"].endswith("and continue"):
        back = window.wait_for("text", clicked, BACK_S)
    start = window.do("stop_answer")
    if window.wait_for("stopped", start)["busy"]:
        window.wait_for("finished", clicked, BACK_S)
    return {"told": told_s, "back": back["at"] - clicked_at}


def settled(window: Window) -> Note:
    """Return what is shown once it is done with all commands, which each fail by itself."""
    deadline = time.monotonic() + TOLD_S
    while True:
        look = window.wait_for("shown", window.do("look"), TOLD_S)
        if look["state"] in ("empty", "ready"):
            return look
        if time.monotonic() > deadline:
            raise WindowProblem(f"the window is still busy with what has failed: {look}")
        time.sleep(0.02)


def _tells(note: Note, told: tuple[str, ...]) -> bool:
    return note.get("notice", "").startswith(told)


def _shown_text(notes: list[Note], chat: str) -> str:
    """Return the text that was shown of the last answer of a chat."""
    texts = [note for note in notes if "text" in note and note["chat"] == chat]
    return "".join(note["text"] for note in texts if note["message"] == texts[-1]["message"])


if __name__ == "__main__":
    sys.exit(run_campaign(EngineKills, __doc__ or ""))
