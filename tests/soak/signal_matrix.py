"""Sends each signal that ends a program to a window in each phase of its life.

    python -m tests.soak.signal_matrix --rounds 30 --seed 1

The signals go to the window alone, as `kill` and a logout send them, or to all processes, as a
terminal does for Ctrl+C and when it is closed. The window ends in order: nothing is lost at all.
"""

import random
import signal
import sys
import time
from itertools import product
from pathlib import Path

from tests.soak.campaign import Report, run_campaign
from tests.soak.ledger import Ledger
from tests.soak.phases import Phase, make_phases, open_middling
from tests.soak.remains import left_files, orphans
from tests.soak.window import Window, WindowProblem

END_S = 15.0
"""Longest time until the end: the engine has 5 s to free the model, and the last cache 3 s."""

START_S = 3.0

SIGNALS = (
    ("SIGINT", signal.SIGINT, False),
    ("SIGTERM", signal.SIGTERM, False),
    ("SIGHUP", signal.SIGHUP, False),
    ("Ctrl+C", signal.SIGINT, True),
    ("closed terminal", signal.SIGHUP, True),
)
"""Name, number, and whether all processes of the window get it."""


class SignalMatrix:
    """A home whose windows are ended by signals, one after another."""

    def __init__(self, home: Path, seed: int, only: str = "") -> None:
        self._home, self._chance = home, random.Random(seed)
        self._phases = make_phases(home)
        self._start = Phase(lambda _: 0, lambda note: "ready" in note, START_S)
        pairs = product(SIGNALS, ["start", *self._phases])
        self._pairs = [p for p in pairs if only in ("", p[0][0], p[1], f"{p[0][0]} in {p[1]}")]
        self._ledger = Ledger(home)
        self.report = Report()

    def round(self, number: int) -> None:
        """Start a window and send it a signal in a phase.

        Raises:
            WindowProblem: it ends in another way, or something is lost or left behind.
        """
        (name, number_of_signal, is_for_all), in_phase = self._pairs[number % len(self._pairs)]
        with Window(self._home) as window:
            if in_phase == "start":
                phase, start, began = self._start, 0, window.started
            else:
                window.wait_for("ready")
                open_middling(window)
                phase = self._phases[in_phase]
                start, began = phase.enter(window), time.time()
            phase.wait(window, start, self._chance)
            at = window.send_signal(number_of_signal, to_group=is_for_all)
            status = window.wait_until_ended(END_S)
            seconds, notes = time.time() - at, window.notes()
            may_be_early = in_phase == "start" and not any("started" in note for note in notes)
            if status != 0 and not (may_be_early and status in _early(number_of_signal)):
                raise WindowProblem(f"{name} in {in_phase}: {status}; {window.errors[-3000:]}")
            if "Traceback" in window.errors:
                raise WindowProblem(f"{name} in {in_phase}: {window.errors[-3000:]}")
            self._ledger.check(notes, time.time(), 0.0)
            if found := orphans(window.mark):
                raise WindowProblem(f"{name} in {in_phase}: these run on: {found}")
            if not may_be_early and (files := left_files(self._home)):
                raise WindowProblem(f"{name} in {in_phase}: left behind: {files}")
        phase.count(began, notes[start:], at)
        self.report.add(f"{name}, {in_phase}", {"end": seconds})

    def close(self) -> None:
        """Do nothing: each round ends its window."""

    def __enter__(self) -> "SignalMatrix":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _early(number: int) -> tuple[int, int]:
    """Return what a program may end with that a signal meets before it has a window."""
    return -number, 128 + number


if __name__ == "__main__":
    sys.exit(run_campaign(SignalMatrix, __doc__ or ""))
