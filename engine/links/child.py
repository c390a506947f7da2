"""Trials of links in a child process, which is killed when it does not answer.

On some machines the first use of a route between GPUs never returns, or ends the program. The child
(`engine.links.child_program`) writes a line of JSON before each trial and one with its results; the
trial it had begun when it fell silent is the one that failed.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from engine.devices.routes import Pair, Place
from engine.planning.speed.link_records import Means, TrialRecord, trial_from

log = logging.getLogger(__name__)

START_S = 120.0
"""Seconds for the child to import torch, open its devices and compile kernels."""

STEP_S = 40.0
"""Seconds for one trial, which gives up by itself before; NCCL starts slowly."""

MOST_SAID = 2000
"""Bytes of a failed child's error output that go to the log."""

NO_WINDOW: int = getattr(subprocess, "CREATE_NO_WINDOW", 0)
"""Creation flag that keeps Windows from opening a console window."""

COMMAND = (sys.executable, "-P", "-m", "engine.links.child_program")
"""Command of the child; with -P nothing in the working directory is imported."""


@dataclass(frozen=True, slots=True)
class TrialStep:
    """One trial to make, in both directions.

    Attributes:
        pair: ids of the two devices.
        means: what brings values: kernels' stores, copies or NCCL.
        place: where values lie on the way.
    """

    pair: Pair
    means: Means
    place: Place


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of a trial: `there` from the pair's first device to the second, and `back`."""

    step: TrialStep
    there: TrialRecord
    back: TrialRecord


def try_steps(
    steps: Sequence[TrialStep],
    gpus: Mapping[str, str],
    *,
    command: Sequence[str] = COMMAND,
    start_s: float = START_S,
    step_s: float = STEP_S,
) -> list[StepResult]:
    """Make all trials, in as many child processes as it takes.

    Trials that could not start are left out. After one that ended its process, others of the same
    pair and place are skipped.

    Args:
        steps: the trials to make.
        gpus: UUID of each device by id; no other GPU is touched.
        command: command line of the child.
        start_s: seconds the child may be silent before its first trial.
        step_s: seconds the child may be silent later.
    """
    left, found = list(steps), list[StepResult]()
    while left:
        try:
            with (
                tempfile.TemporaryFile() as errors,
                _Child(command, left, gpus, errors) as child,
            ):
                some, failed = child.results(left, start_s, step_s)
        except OSError as error:
            log.warning("links could not be tried in a child process: %s", error)
            return found
        found += some
        done = {tried.step for tried in some}
        if failed is not None:
            found.append(failed)
            broken = failed.step
            done |= {s for s in left if (s.pair, s.place) == (broken.pair, broken.place)}
        if not done:
            return found
        left = [step for step in left if step not in done]
    return found


class _Child:
    """A child process that makes trials one by one."""

    def __init__(
        self, command: Sequence[str], steps: Sequence[TrialStep], gpus: Mapping[str, str],
        errors: IO[bytes],
    ) -> None:  # fmt: skip
        names = list(gpus)
        request = {
            "names": names,
            "steps": [[*map(names.index, s.pair), s.means, s.place] for s in steps],
        }
        paths = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")
        env = {
            **os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus.values()),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }  # fmt: skip
        self._errors = errors
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=env,
            text=True, encoding="utf-8", creationflags=NO_WINDOW,
        )  # fmt: skip
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name="tandem-links", daemon=True)
        self._reader.start()
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.close()

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the child, whatever it does."""
        if self._process.poll() is None:
            self._process.kill()
        # a process inside a hung driver does not end before the driver returns
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._reader.join(1)
        if not self._reader.is_alive() and self._process.stdout is not None:
            self._process.stdout.close()

    def results(
        self, steps: Sequence[TrialStep], start_s: float, step_s: float
    ) -> tuple[list[StepResult], StepResult | None]:
        """Return the results of its trials, and the failure of the one that hung or crashed."""
        found: list[StepResult] = []
        begun: TrialStep | None = None
        for message in self._messages(start_s, step_s):
            if isinstance(message, str):
                log.warning("a trial of links failed: %s; its output: %s", message, self._said())
                if begun is None:
                    return found, None
                why = f"for {step_s:.0f} s" if message == "hung" else message
                trial = TrialRecord("hung" if message == "hung" else "crashed", why)
                return found, StepResult(begun, trial, trial)
            if "begin" in message:
                begun = steps[int(message["begin"])]
            elif begun is not None:
                there, back = trial_from(message.get("there")), trial_from(message.get("back"))
                if there is not None and back is not None:
                    found.append(StepResult(begun, there, back))
                begun = None
        return found, None

    def _messages(self, start_s: float, step_s: float) -> Iterator[dict[str, Any] | str]:
        """Yield the child's messages, and at last why it stopped early, if it did."""
        patience = start_s
        while True:
            try:
                line = self._lines.get(timeout=patience)
            except queue.Empty:
                yield "hung"
                return
            if line is None:
                if code := self._process.wait():
                    yield f"exit status {code}"
                return
            with suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    yield message
                    patience = step_s

    def _said(self) -> str:
        """Return the end of the child's error output."""
        self._errors.seek(0)
        return self._errors.read()[-MOST_SAID:].decode(errors="replace").strip()

    def _read(self) -> None:
        """Queue the lines of the child's output, then None; the reader thread's function."""
        assert self._process.stdout is not None
        with suppress(OSError, ValueError):
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(None)
