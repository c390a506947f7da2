"""Trials of links in a child process, which is killed when it does not answer.

On some machines the first use of a route between GPUs never returns, or ends the program. The child
(`interconnect.child_program`) writes a line of JSON before each trial and one with its results; the
trial it had begun when it fell silent is the one that failed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import engine.hardware.environment  # noqa: F401 before torch, which reads it

# isort: split

from engine.hardware.devices.topology import Pair, Place
from engine.hardware.devices.torch_builds import find_torch_build
from engine.hardware.devices.visibility import variables_for
from engine.hardware.trial_process import HUNG, TrialProcess
from engine.planning.speed.link_records import Means, TrialRecord, trial_from
from engine.util.programs import program_command

log = logging.getLogger(__name__)

START_S = 120.0
"""Seconds for the child to import torch, open its devices and compile kernels."""

STEP_S = 40.0
"""Seconds for one trial, which gives up by itself before; NCCL starts slowly."""

COMMAND = program_command("engine.runtime.interconnect.child_program")
"""Command of the child."""


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
        gpus: UUID of each device by id, "" where it is not known; no other GPU is touched.
        command: command line of the child.
        start_s: seconds the child may be silent before its first trial.
        step_s: seconds the child may be silent later.
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
    """Return the results of a child's trials, and the failure of the one that hung or crashed."""
    found: list[StepResult] = []
    begun: TrialStep | None = None
    for message in child.messages(start_s, step_s):
        if isinstance(message, str):
            log.warning("a trial of links failed: %s; its output: %s", message, child.said())
            if begun is None:
                return found, None
            why = f"for {step_s:.0f} s" if message == HUNG else message
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
