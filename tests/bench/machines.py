"""Tokens per second of two machines' processes on this one, beside two ranks in one process.

    python -m tests.bench.machines MODEL.gguf --mode groups --rounds 3
    python -m tests.bench.machines MODEL.gguf --prompt 2048

The second line measures prompts. Each rank has one thread. Both models are loaded at once, and
measured by turns.
"""

import argparse
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import engine.hardware.environment  # noqa: F401 before torch, which reads it

# isort: split
from engine import LoadParams, Model, SamplingParams
from engine.distributed.machine_runtime import follow, open_on_machines
from engine.distributed.machines import END, Machines
from engine.distributed.wire import Wire
from engine.runtime.thread_runtime import open_on_machines_by


def measured(model: Model, n: int) -> float:
    """Return the tokens per second of an answer of n tokens."""
    wanted = SamplingParams(max_tokens=n, temperature=0, ignore_eos=True)
    begun, found = 0.0, 0
    for event in model.generate([*range(20, 60)], wanted):
        if ids := getattr(event, "ids", ()):
            begun = begun or time.perf_counter()
            found += len(ids)
    return (found - 1) / (time.perf_counter() - begun)


def prompt_speed(model: Model, n: int, seed: int) -> float:
    """Return the tokens per second of a prompt of n tokens, of which nothing is cached."""
    chance = random.Random(seed)
    ids = [chance.randrange(20, 300) for _ in range(n)]
    begun = time.perf_counter()
    for event in model.generate(ids, SamplingParams(max_tokens=1, temperature=0)):
        if getattr(event, "ids", ()):
            break
    return n / (time.perf_counter() - begun)


def main() -> None:
    """Measure, and print the ratio of each round."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--mode", default="groups", choices=("groups", "tensor"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-n", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=0)
    options = parser.parse_args()
    if "RANK" in os.environ:
        follow(Machines(Wire("machine 1"), print), "", 1)
        return
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE="2", GLOO_SOCKET_IFNAME="lo"
    )
    other = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.machines", options.model],
        env={**os.environ, "RANK": "1"},
    )
    os.environ["RANK"] = "0"
    machines = Machines(Wire("machine 0"), print)
    open_on_machines_by(partial(open_on_machines, machines))
    groups = (1, 1) if options.mode == "groups" else None
    params = LoadParams(
        options.model, ("cpu", "cpu"), split_mode=options.mode, groups=groups, draft="off",
        cpu_threads=2, n_ctx=max(512, options.prompt + 64),
    )  # fmt: skip
    ratios = []
    with Model(params) as one, Model(replace(params, machines=(1, 1), cpu_threads=1)) as two:
        for model in (one, two):
            measured(model, 8)
        for number in range(options.rounds):
            if options.prompt:
                alone = prompt_speed(one, options.prompt, number)
                apart = prompt_speed(two, options.prompt, number)
            else:
                alone, apart = measured(one, options.n), measured(two, options.n)
            ratios.append(apart / alone)
            print(f"one process {alone:6.2f}/s   two processes {apart:6.2f}/s   {ratios[-1]:.3f}")  # noqa: T201
    machines.orders.send(END)
    other.wait(20)
    print(f"{options.mode}: median ratio {statistics.median(ratios):.3f}")  # noqa: T201


if __name__ == "__main__":
    main()
