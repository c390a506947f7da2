"""Longest steps of the window's thread while an answer with formulas, tables and code streams in.

    python -m tests.bench.rich_stalls [--seconds 60]

A scripted engine writes so many seconds of text, some 600 characters a second, into a real window.
Printed are the longest times between two turns of the event loop, by the clock (which counts what
other programs took) and of the thread's own processor time (which does not).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from tests.bench.window_stalls import Watch

CHUNK, PAUSE_S = 6, 0.01
LIMIT_MS = 30.0
WAIT_S = 120.0


def section(number: int) -> str:
    """Return a section of the answer: prose with formulas, a list, a table, and code."""
    rows = "".join(
        f"| item {row} | $x_{{{number},{row}}}^2$ | {row * 17 % 101}.5 | some words about it |\n"
        for row in range(20)
    )
    code = "".join(f"    value_{row} = compute({row}, 'text')  # a comment\n" for row in range(60))
    return (
        f"## Section {number}\n\nThe value \\(a_{{{number}}}\\) is $\\frac{{{number}}}{{n+1}}$, for"
        " $5 or more, **bold** and `code` words that go on for a line or two, as answers do.\n\n"
        f"\\[\n\\sum_{{k=1}}^{{{number}}} \\frac{{1}}{{k^2}} \\le \\int_0^\\infty e^{{-x}}\n\\]\n\n"
        f"- [x] a task with $y_{{{number}}}$\n- another item[^{number}]\n\n"
        f"| Name | Formula | Number | Words |\n|---|---|--:|---|\n{rows}\n"
        f"```python\ndef f_{number}():\n{code}```\n\n[^{number}]: A note.\n\n"
    )


def answer(n_characters: int) -> str:
    """Return an answer of about so many characters."""
    text, number = "", 1
    while len(text) < n_characters:
        text += section(number)
        number += 1
    return text[:n_characters]


def play(seconds: float) -> None:
    """Stream an answer into a window, and print its pauses."""
    from PySide6.QtWidgets import QApplication

    import engine
    from app.main import Shell
    from tests.helpers import fake_host

    engine.read_model_info = lambda path: fake_host.model_info(str(path))
    app = QApplication(sys.argv[:1])
    text = answer(int(seconds * CHUNK / PAUSE_S))
    script = fake_host.Script(answer=text, chunk=CHUNK, pause_s=PAUSE_S)
    shell = Shell(app, lambda on_event: fake_host.FakeHost(on_event, script))

    def until(is_done: Callable[[], bool], limit_s: float = WAIT_S) -> None:
        end = time.perf_counter() + limit_s
        while not is_done():
            assert time.perf_counter() < end, "the window waits in vain"
            app.processEvents()
            time.sleep(0.0005)

    shell.start()
    shell.window.resize(1440, 900)
    shell.models.open("/models/tiny.gguf")
    until(lambda: shell.client.model is not None)
    watch = Watch()
    until(lambda: len(watch.pauses) > 100)
    watch.take()
    shell.chat_presenter.send("Tell me all about it.")
    until(lambda: not shell.session.is_busy, 4 * seconds + WAIT_S)
    pauses = watch.take()
    at = max(range(len(pauses)), key=lambda number: pauses[number].busy_ms)
    sys.stdout.write(f"the longest is step {at} of {len(pauses)}\n")
    report([p.clock_ms for p in pauses], "by the clock")
    report([p.busy_ms for p in pauses], "of its processor time")
    shell.window.close()


def report(times_ms: list[float], kind: str) -> None:
    """Print the longest times and how many are too long."""
    worst = " ".join(f"{t:.0f}" for t in sorted(times_ms)[-8:])
    n_long = sum(t > LIMIT_MS for t in times_ms)
    sys.stdout.write(
        f"{kind:22} median {median(times_ms):.1f} ms, longest {worst} ms,"
        f" {n_long} of {len(times_ms)} above {LIMIT_MS:.0f} ms\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ["TANDEM_HOME"] = str(Path(home))
        play(args.seconds)


if __name__ == "__main__":
    main()
