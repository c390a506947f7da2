"""Trials of links in a child process, which is killed if it hangs.

On some machines, the first use of a route between GPUs hangs forever or kills the program. This
module is also the child's program. The child writes one line of JSON before each trial and one with
its results; if it stops responding, the trial that it had started has failed. The child sees only
the GPUs to try, numbered from 0.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

import engine.hardware.environment  # noqa: F401 before torch, which reads it

# isort: split
import torch

from engine.errors import EngineError, Sentence
from engine.hardware.devices.topology import Pair, Place
from engine.hardware.devices.torch_builds import find_torch_build
from engine.hardware.devices.visibility import variables_for
from engine.hardware.trial_process import HUNG, TrialProcess
from engine.planning.speed.link_records import Means, TrialRecord, trial_document, trial_from
from engine.runtime.interconnect.exchange import GpuBench
from engine.runtime.interconnect.trial import FULL, BothDirections, failed_trials, try_route
from engine.util.programs import program_command, tie_to_parent

log = logging.getLogger(__name__)

START_S = 120.0
"""Seconds that the child has to import torch, open its devices and compile kernels."""

STEP_S = 40.0
"""Timeout for one trial, in seconds; a trial usually gives up earlier, but NCCL starts slowly."""

COMMAND = program_command("engine.runtime.interconnect.child")


@dataclass(frozen=True, slots=True)
class TrialStep:
    """One trial to run, in both directions: its devices, means of transfer, and memory used."""

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
    steps: Sequence[TrialStep], gpus: Mapping[str, str], *, command: Sequence[str] = COMMAND,
    start_s: float = START_S, step_s: float = STEP_S,
) -> list[StepResult]:  # fmt: skip
    """Run all trials, in as many child processes as needed.

    Trials that could not start are left out. If a trial kills its process, others with the same
    pair and place are skipped.

    Args:
        steps: the trials to run.
        gpus: UUID of each device, or "", by id; no other GPU is touched.
        command: command line of the child.
        start_s: timeout, in seconds, before the child's first trial.
        step_s: timeout, in seconds, for later steps.
    """
    left, found = list(steps), list[StepResult]()
    names, visible = list(gpus), variables_for(gpus, on_hip=bool(find_torch_build().hip))
    while left:
        request = {
            "names": names,
            "steps": [[*map(names.index, s.pair), s.means, s.place] for s in left],
        }
        try:
            with TrialProcess(command, request, visible) as child:
                some, failed = _results(child, left, start_s, step_s)
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


def _results(
    child: TrialProcess, steps: Sequence[TrialStep], start_s: float, step_s: float
) -> tuple[list[StepResult], StepResult | None]:
    found: list[StepResult] = []
    begun: TrialStep | None = None
    for message in child.messages(start_s, step_s):
        if isinstance(message, str):
            log.warning("a trial of links failed: %s; its output: %s", message, child.said())
            if begun is None:
                return found, None
            why = Sentence("for {n:.0f} s", n=step_s) if message == HUNG else message
            trial = TrialRecord("hung" if message == HUNG else "crashed", why)
            return found, StepResult(begun, trial, trial)
        if "begin" in message:
            begun = steps[int(message["begin"])]
        elif begun is not None:
            there, back = trial_from(message.get("there")), trial_from(message.get("back"))
            if there is not None and back is not None:
                found.append(StepResult(begun, there, back))
            begun = None
    return found, None


def run(requests: TextIO, replies: TextIO) -> None:
    """Run the trials in the first line of `requests`, and reply before and after each."""
    request = json.loads(requests.readline())
    names = request["names"]

    def say(**message: object) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    for number, (a, b, means, place) in enumerate(request["steps"]):
        bench, both = GpuBench((a, b), (names[a], names[b])), None
        try:
            if means == "stores":
                bench.warm_up()  # compiling takes long, but a trial is timed from `begin` on
        except EngineError as error:
            both = failed_trials(error)
        say(begin=number)
        both = both or _tried(bench, means, place)
        say(there=trial_document(both[0]), back=trial_document(both[1]))


def _tried(bench: GpuBench, means: Means, place: Place) -> BothDirections:
    try:
        return try_route(bench, means, place, FULL)
    except (EngineError, torch.OutOfMemoryError) as error:  # other errors end this process
        return failed_trials(error)


if __name__ == "__main__":
    tie_to_parent()
    run(sys.stdin, sys.stdout)
