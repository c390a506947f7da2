"""Time from the start of `tandem` to the window's first frame, before and after a change.

    python -m tests.bench.first_picture [--rounds 10] [--before FOLDER] [--chats 0] [--engine]

Starts the window in a process of its own, on whatever platform Qt is told to use, and prints the
time by the clock and the process's own processor time, which other programs disturb less: median
and least of all rounds. `--before` names a checkout of another commit, which takes turns with this
one; its window is told to say when it is painted in the same way. `--chats N` gives the folder of
the chats N long ones, the last of which is open. `--engine` measures until the page of the engine
shows what can be installed; it needs a Python without torch, and locks in `resources/engine`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tests.bench.window_stalls import print_line, write_old_chats

PROGRAM = """
import json, os, sys, time
from app import __main__ as program

def drive():
    from PySide6.QtCore import QEvent, QObject, QTimer
    from app import main

    class Watch(QObject):
        def eventFilter(self, widget, event):
            if event.type() == QEvent.Type.Paint:
                widget.removeEventFilter(self)
                QTimer.singleShot(0, self.end)
            return False

        def end(self):
            setup = self.shell.__dict__.get("engine_setup")
            view = setup.page.view if setup is not None else None
            if "--engine" in sys.argv and (view is None or not view.choices.rows):
                QTimer.singleShot(1, self.end)
                return
            print(json.dumps([time.monotonic(), time.process_time(), len(sys.modules)]))
            sys.stdout.flush()
            os._exit(0)

    begin = main.Shell.start
    def start(shell):
        shell.watch = Watch()
        shell.watch.shell = shell
        shell.window.centralWidget().installEventFilter(shell.watch)
        begin(shell)
    main.Shell.start = start

drive()
sys.exit(program.main([]))
"""


class Start(NamedTuple):
    """A start of the window: seconds by the clock, of processor time, and imported modules."""

    clock_s: float
    cpu_s: float
    n_modules: int


def start(folder: Path, home: str, until: Sequence[str] = ()) -> Start:
    """Start the window of a checkout, and end it once it is painted.

    Args:
        until: "--engine" to wait until it shows which engines can be installed.
    """
    libraries = os.environ.get("PYTHONPATH", "")  # such as those of a Python without torch
    paths = os.pathsep.join(filter(None, (str(folder), libraries)))
    env = {**os.environ, "TANDEM_HOME": home, "PYTHONPATH": paths}
    before = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *until], env=env, cwd=folder, check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    painted, cpu_s, n_modules = json.loads(done.stdout.splitlines()[-1])
    return Start(painted - before, cpu_s, n_modules)


def report(name: str, starts: list[Start]) -> None:
    clock, cpu = [one.clock_s for one in starts], [one.cpu_s for one in starts]
    print_line(
        f"{name:8} by the clock {median(clock):.3f} s (least {min(clock):.3f}), processor time "
        f"{median(cpu):.3f} s (least {min(cpu):.3f}), {starts[0].n_modules} modules"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--before", type=Path, metavar="FOLDER")
    parser.add_argument("--chats", type=int, default=0)
    parser.add_argument("--engine", action="store_const", const=["--engine"], default=[])
    args = parser.parse_args()
    folders = {"now": Path(__file__).resolve().parents[2]}
    if args.before:
        folders = {"before": args.before.resolve(), **folders}
    starts: dict[str, list[Start]] = {name: [] for name in folders}
    with tempfile.TemporaryDirectory() as home:
        os.environ["TANDEM_HOME"] = home
        if args.chats:
            write_old_chats(args.chats)
        for _ in range(args.rounds):
            for name, folder in folders.items():
                starts[name].append(start(folder, home, args.engine))
    for name, found in starts.items():
        report(name, found)
    if args.before:
        ratio = min(s.cpu_s for s in starts["now"]) / min(s.cpu_s for s in starts["before"])
        print_line(f"processor time, least of each: {ratio:.2f} of before")


if __name__ == "__main__":
    main()
