"""The window as a process of its own that tells what it has imported and when it shows.

`python -m tests.helpers.first_picture` opens the window as `tandem` does, has the bundled model
answer, and closes it. It writes three lines of JSON: `picture` once the first frame is painted,
`answer` once the answer is there, and `end`. With `--picture` it ends after the first.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Any

PROMPT = "What is tensor parallelism?"


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment in the life of a window.

    Attributes:
        name: what has just happened.
        clock_s: time of the monotonic clock, which all processes share.
        cpu_s: processor time that the process has used so far.
        modules: names of all modules that are imported.
    """

    name: str
    clock_s: float
    cpu_s: float
    modules: frozenset[str]


def read_moments(output: str) -> list[Moment]:
    """Return what a window has written, in order."""
    lines = (json.loads(line) for line in output.splitlines())
    return [
        Moment(line["name"], line["clock_s"], line["cpu_s"], frozenset(line["modules"]))
        for line in lines
    ]


def _note(name: str) -> None:
    found = {
        "name": name, "clock_s": time.monotonic(), "cpu_s": time.process_time(),
        "modules": sorted(sys.modules),
    }  # fmt: skip
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def main() -> int:
    from app.__main__ import main as open_window

    is_picture = "--picture" in sys.argv
    _drive(is_picture)
    return open_window([] if is_picture else ["--demo"])


def _drive(is_picture: bool) -> None:
    """Have the window tell its moments, ask the model once it is loaded, and close."""
    from PySide6.QtCore import QTimer

    from app import main as program
    from engine import SamplingParams

    begin = program.Shell.start

    def start(shell: Any) -> None:
        def on_picture() -> None:
            _note("picture")
            if is_picture:
                shell.window.close()

        def on_finished(_: object) -> None:
            QTimer.singleShot(0, shell, end)

        def end() -> None:
            _note("answer")
            shell.window.close()

        # before what follows the picture, which imports on a thread
        shell.window.painted.disconnect(shell.start_up.begin)
        shell.window.painted.connect(on_picture)
        shell.window.painted.connect(shell.start_up.begin)
        begin(shell)
        shell.window.sampling.set_params(SamplingParams(temperature=0))
        shell.client.loaded.connect(lambda _: shell.chat_presenter.send(PROMPT))
        shell.client.finished.connect(on_finished)

    program.Shell.start = start  # type: ignore[method-assign]


if __name__ == "__main__":
    status = main()
    _note("end")
    sys.exit(status)
