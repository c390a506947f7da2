"""Trials of links in a process of its own, which is ended when it does not answer.

Some machines never come back from the first use of a way between GPUs, or end the program. The
child (`links.child_program`) says in a line of JSON what it begins and what came of it; what it
had begun when it fell silent is what failed.
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
"""Until the child has torch, its devices and compiled kernels."""

STEP_S = 40.0
"""Of one trial, which gives up by itself before; NCCL takes its time to begin."""

MOST_SAID = 2000
"""Bytes of what a child that failed wrote, for the log."""

NO_WINDOW: int = getattr(subprocess, "CREATE_NO_WINDOW", 0)
"""Windows opens one for a program of the command line."""

COMMAND = (sys.executable, "-P", "-m", "engine.links.child_program")
"""Whatever lies in the folder that a person is in, it is not imported."""


@dataclass(frozen=True, slots=True)
class TrialStep:
    """One trial.

    Attributes:
        pair: ids of two devices.
    """

    pair: Pair
    means: Means
    place: Place


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a step, from the pair's first device to the second and back."""

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
    """Try all steps, in as many processes as it takes.

    What cannot be begun at all is left out. After a step that ended its process, others of the same
    pair and place are not begun any more.

    Args:
        gpus: the UUID of each device; no other GPU is touched.
        command: what runs the child.
        start_s, step_s: how long it may be silent before and between its trials.
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
            log.warning("links could not be tried apart: %s", error)
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
    """A process that tries steps one by one."""

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
        """End it, whatever it does."""
        if self._process.poll() is None:
            self._process.kill()
        # a process inside a driver that hangs cannot be ended before the driver returns
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._reader.join(1)
        if not self._reader.is_alive() and self._process.stdout is not None:
            self._process.stdout.close()

    def results(
        self, steps: Sequence[TrialStep], start_s: float, step_s: float
    ) -> tuple[list[StepResult], StepResult | None]:
        """What came of its steps, and of the one that it did not live through or hangs in."""
        found: list[StepResult] = []
        begun: TrialStep | None = None
        for message in self._messages(start_s, step_s):
            if isinstance(message, str):
                log.warning("a trial of links ended: %s; it said: %s", message, self._said())
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
        """What it says; at last why it says no more, or nothing where it came to its end."""
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
        """The end of what it wrote for people."""
        self._errors.seek(0)
        return self._errors.read()[-MOST_SAID:].decode(errors="replace").strip()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with suppress(OSError, ValueError):
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(None)
