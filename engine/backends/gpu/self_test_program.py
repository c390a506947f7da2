"""Program of the child process that tests kernels on a GPU; `engine.runtime.card_trial` starts it.

It sees no other GPU than that one.
"""

from __future__ import annotations

import json
import sys
from typing import TextIO

import engine.hardware.environment  # noqa: F401 before torch, which reads it

# isort: split
import torch

from engine.backends.gpu.launch.launcher_choice import prepare
from engine.backends.gpu.self_test import CHECKS, described
from engine.hardware.faults import fault_of
from engine.hardware.torch_devices import is_out_of_memory
from engine.util.programs import tie_to_parent

OPENING = "opening the GPU"
"""Name of the first step."""


def run(requests: TextIO, replies: TextIO) -> None:
    """Test kernels on the device that the first line of `requests` names.

    The replies are `{"begin": step}` before each step, and at last what was found: `{"problem":
    sentence, "has_fault": whether the GPU is lost to this process}`, or `{"refused": sentence}` if
    that says nothing about the kernels.
    """
    device = torch.device(json.loads(requests.readline())["device"])

    def say(**message: object) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    say(begin=OPENING)
    try:
        torch.zeros(1, device=device)
        if device.type == "cuda":
            prepare()
    except Exception as error:  # noqa: BLE001 drivers fail in all ways
        say(refused=described(error))
        return
    try:
        with torch.inference_mode():
            for what, check in CHECKS.items():
                say(begin=what)
                check(device)
    except Exception as error:  # noqa: BLE001 drivers and compilers fail in all ways
        if is_out_of_memory(error):
            say(refused=described(error))
        else:
            say(problem=described(error), has_fault=bool(fault_of(error)))
        return
    say(problem="", has_fault=False)


if __name__ == "__main__":
    tie_to_parent()
    run(sys.stdin, sys.stdout)
