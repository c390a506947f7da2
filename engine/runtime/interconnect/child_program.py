"""Program of the child process that tries links between GPUs; `interconnect.child` starts it.

It sees only the GPUs that it is to try, numbered from 0.
"""

from __future__ import annotations

import json
import sys
from typing import TextIO

import engine.hardware.environment  # noqa: F401 before torch, which reads it

# isort: split
import torch

from engine.errors import EngineError
from engine.hardware.devices.topology import Place
from engine.planning.speed.link_records import Means, trial_document
from engine.runtime.interconnect.trial import (
    FULL,
    BothDirections,
    GpuBench,
    failed_trials,
    try_route,
)
from engine.util.programs import tie_to_parent


def run(requests: TextIO, replies: TextIO) -> None:
    """Make the trials that the first line of `requests` lists, and reply before and after each."""
    request = json.loads(requests.readline())
    names = request["names"]

    def say(**message: object) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    for number, (a, b, means, place) in enumerate(request["steps"]):
        bench, both = GpuBench((a, b), (names[a], names[b])), None
        try:
            if means == "stores":
                bench.warm_up()  # compiling takes long; the time of a trial counts from `begin` on
        except EngineError as error:
            both = failed_trials(error)
        say(begin=number)
        both = both or _tried(bench, means, place)
        say(there=trial_document(both[0]), back=trial_document(both[1]))


def _tried(bench: GpuBench, means: Means, place: Place) -> BothDirections:
    """Make one trial with full effort; what cannot start is refused."""
    try:
        return try_route(bench, means, place, FULL)
    except (EngineError, torch.OutOfMemoryError) as error:  # others end this process
        return failed_trials(error)


if __name__ == "__main__":
    tie_to_parent()
    run(sys.stdin, sys.stdout)
