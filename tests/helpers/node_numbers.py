"""A program that is one of several machines, each with one rank, and writes what machine 0 finds.

    RANK=0 WORLD_SIZE=3 MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 GLOO_SOCKET_IFNAME=eth0 \\
        python -m tests.helpers.node_numbers MODEL.gguf FILE.npz [MODE]
"""

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import engine.hardware.environment  # noqa: F401 before torch, which reads it

# isort: split
import numpy as np

from engine import LoadParams, Model, SamplingParams
from engine.distributed.machine_runtime import follow, open_on_machines, shared_params
from engine.distributed.machines import END, Machines
from engine.distributed.straight import BACKEND_VARIABLE, backend_of_environment
from engine.distributed.wire import Wire
from engine.load_params import MachineLink
from engine.runtime.thread_runtime import open_on_machines_by

PROMPTS = [[5, 6, 7, 9], [8, 3] * 9, [7], [11, 12, 13]]

WISHES = (
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
    SamplingParams(seed=7, temperature=1.5, top_k=20, max_tokens=8, ignore_eos=True),
)


def params(path: Path, n: int, mode: str = "groups") -> LoadParams:
    """Return settings for n ranks, with some blocks each unless the mode is another one."""
    groups = (1,) * n if mode == "groups" else None
    return LoadParams(
        str(path), ("cpu",) * n, split_mode=mode, groups=groups, n_ctx=256, parallel=4,
        cpu_threads=n, draft="off",
    )  # fmt: skip


def numbers(model: Model, state: Path) -> dict[str, Any]:
    """Return logits, tokens and a state file of a model, and tokens behind another split.

    Args:
        state: path of the state file to write.
    """
    logits, tokens = model.logits([*range(3, 20)]), answers(model)
    model.save_state(state)
    model.resplit([2.0, *[1.0] * (len(model.params.devices) - 1)])
    return {
        "logits": logits, "tokens": tokens, "state": np.fromfile(state, np.uint8),
        "behind": answers(model),
    }  # fmt: skip


def answers(model: Model) -> Any:
    """Return the tokens of answers that are computed side by side."""
    streams = [model.generate(p, wish) for p in PROMPTS for wish in WISHES]
    found: list[list[int]] = [[] for _ in streams]
    while not all(stream.is_over for stream in streams):
        for stream, ids in zip(streams, found, strict=True):
            ids += getattr(next(stream, None), "ids", ())
    return np.array(found)


def main() -> None:
    """Compute with the other machines until machine 0 has its numbers."""
    path, goal, *mode = sys.argv[1:]
    wire, backend = Wire(f"machine{os.environ['RANK']}"), backend_of_environment()
    machines = Machines(wire, lambda error: None, backend)
    if machines.number:
        follow(machines, "", 1)
        machines.close()
        return
    open_on_machines_by(partial(open_on_machines, machines))
    n = len(machines.names)
    link: MachineLink = "nccl" if BACKEND_VARIABLE in os.environ else "auto"
    some = replace(params(Path(path), n, *mode), machine_link=link, cpu_threads=1)
    wanted = shared_params(some)
    with Model(replace(wanted, machines=(1,) * n)) as model:
        found = numbers(model, Path(goal).with_suffix(".state"))
    found["straight"] = machines.straight is not None and machines.straight.is_used
    machines.orders.send(END)
    np.savez(goal, **found)
    machines.close()


if __name__ == "__main__":
    main()
