"""Kills the window at random moments, and looks at what the next one finds.

    python -m tests.soak.window_kills --rounds 500 --seed 1

Each round starts a window on the home of the one before, checks all chats, asks the demo a known
question, loads a larger model, and kills the window while it starts, loads, reads a prompt,
answers, branches a chat, splits the model anew or saves a chat's cache.
"""

import random
import sys
import time
from pathlib import Path

from tests.soak.campaign import Report, run_campaign
from tests.soak.ledger import Ledger
from tests.soak.phases import Phase, known_answer, make_phases, open_middling
from tests.soak.remains import left_files, orphans
from tests.soak.window import Note, Window, WindowProblem

MAX_CHATS = 12
START_S = 3.0


class WindowKills:
    """A home whose windows are killed, one after another."""

    def __init__(self, home: Path, seed: int, only: str = "") -> None:
        self._home, self._chance = home, random.Random(seed)
        self._phases = make_phases(home)
        self._start = Phase(lambda _: 0, lambda note: "ready" in note, START_S)
        self._names = [only] if only else ["start", *self._phases]
        self._ledger = Ledger(home)
        self._answer = ""
        self.report = Report()

    def round(self, number: int) -> None:
        """Start a window, check it, and kill it in a phase.

        Raises:
            WindowProblem: something is lost, wrong or left behind.
        """
        name = self._names[number % len(self._names)]
        with Window(self._home) as window:
            if name == "start":
                phase, start, began = self._start, 0, window.started
            else:
                self._check_start(window)
                phase = self._phases[name]
                start = phase.enter(window)
                began = time.time()
            phase.wait(window, start, self._chance)
            killed_at = window.kill()
            notes = window.notes()
            if found := orphans(window.mark):
                raise WindowProblem(f"these run on: {found}")
            self._ledger.check(notes, killed_at)
            if "Traceback" in window.errors:
                raise WindowProblem(window.errors[-3000:])
        phase.count(began, notes[start:], killed_at)
        self.report.add(name, {"loss": self._ledger.most_lost_s}, phase)

    def close(self) -> None:
        """Start a last window and close it in order.

        Raises:
            WindowProblem: something is lost, wrong or left behind.
        """
        with Window(self._home) as window:
            self._check_start(window)
            if status := window.close():
                raise WindowProblem(f"the last window ended with {status}")
            self._ledger.check(window.notes(), time.time(), 0.0)
            if found := orphans(window.mark):
                raise WindowProblem(f"these run on: {found}")
        if files := left_files(self._home):
            raise WindowProblem(f"left behind at the end: {files}")

    def __enter__(self) -> "WindowKills":
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: each round ends its window."""

    def _check_start(self, window: Window) -> None:
        """Check what a window finds at its start, and bring it to the model that is loaded."""
        found: Note = window.wait_for("started")
        if set(found["started"]) != set(self._ledger.chats) or found["damaged"]:
            raise WindowProblem(f"{found}, but there should be {sorted(self._ledger.chats)}")
        window.wait_for("ready")
        if files := left_files(self._home):
            raise WindowProblem(f"left behind by the window before: {files}")
        answer = known_answer(window)
        self._answer = self._answer or answer
        if answer != self._answer:
            raise WindowProblem(f"the demo answers {answer!r}, not {self._answer!r}")
        for chat in sorted(self._ledger.chats, key=lambda c: self._ledger.chats[c]["updated"]):
            if len(self._ledger.chats) > MAX_CHATS:
                start = window.do("delete_chat", chat=chat)
                window.wait_for("deleted", start)
                break
        open_middling(window)


if __name__ == "__main__":
    sys.exit(run_campaign(WindowKills, __doc__ or ""))
