"""Tokens per second of machines on a wire, measured and as the planner predicts them.

    python -m tests.bench.wired MODEL.gguf --machines 2 --delay-ms 1 --mbit 1000 --loss 0.01

Machines are network namespaces on this one (tests/helpers/wire.py), with one rank of one thread
each, so it takes root, and a core for each machine and the wire at once in tensor mode. Before and
behind each round the facts that the planner starts from are measured: bytes of weights per second.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise

import engine.hardware.environment  # noqa: F401 before torch, which reads it

# isort: split
import torch

from engine import LoadParams, Model, Planner, list_devices
from engine.distributed.machine_runtime import follow, open_on_machines
from engine.distributed.machines import END, Machines
from engine.distributed.straight_proof import measure_wires
from engine.distributed.wire import GlooWire
from engine.hardware.devices.types import far_id
from engine.planning.speed.facts import DeviceFacts
from engine.planning.speed.links import Links, Wires
from engine.planning.speed.machine_file import expected_facts
from engine.planning.speed.speed_model import SpeedModel
from engine.runtime.measuring.weight_speed import Probe, measurable
from engine.runtime.thread_runtime import open_on_machines_by
from tests.bench.machines import measured
from tests.bench.prediction import PROBE_BYTES, facts_now
from tests.helpers.wire import DEVICE, Node, WireKind, wired

PORT = "29577"


def main() -> None:
    """Measure as machine 0, or follow it; without a place start all of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--machines", type=int, default=2)
    parser.add_argument("--mode", default="groups", choices=("groups", "tensor"))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("-n", type=int, default=64)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--mbit", type=float, default=1000.0)
    parser.add_argument("--loss", type=float, default=0.0)
    options = parser.parse_args()
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        wire = GlooWire(f"machine {os.environ['RANK']}")
        wires = Wires(measured=measure_wires(wire))
        machines = Machines(wire, print)
        if wire.rank:
            follow(machines, "", 1)
        else:
            compare(options, machines, wires)
            machines.orders.send(END)
        return
    kind = WireKind(options.delay_ms / 1e3, options.mbit * 1e6, options.loss)
    with wired(options.machines, kind) as nodes:
        started = [start(node, number, nodes) for number, node in enumerate(nodes)]
        sys.exit(max(process.wait() for process in started))


def start(node: Node, number: int, nodes: list[Node]) -> "subprocess.Popen[bytes]":
    """Start the process of a machine."""
    environment = {
        **os.environ, "RANK": str(number), "WORLD_SIZE": str(len(nodes)),
        "MASTER_ADDR": nodes[0].address, "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": DEVICE,
    }  # fmt: skip
    command = node.command(sys.executable, "-m", "tests.bench.wired", *sys.argv[1:])
    return subprocess.Popen(command, env=environment)


def compare(options: argparse.Namespace, machines: Machines, wires: Wires) -> None:
    """Print the tokens per second of each round, predicted and measured."""
    n = options.machines
    open_on_machines_by(partial(open_on_machines, machines))
    params = LoadParams(
        options.model, ("cpu",) * n, split_mode=options.mode, draft="off", cpu_threads=1,
        groups=(1,) * n if options.mode == "groups" else None, n_ctx=1024, n_batch=512,
    )  # fmt: skip
    ids = tuple(far_id(number, "cpu") for number in range(n))
    with closing(Planner(options.model)) as planner:
        load = planner.evaluate(replace(params, devices=ids)).load
    base = replace(expected_facts(list_devices()[-1]), n_threads=1)
    with ExitStack() as stack:
        kinds = measurable(sorted(load.kinds))
        probes = [stack.enter_context(closing(Probe(k, 1, PROBE_BYTES))) for k in kinds]
        model = stack.enter_context(closing(Model(replace(params, machines=(1,) * n))))
        measured(model, 16)
        facts, speeds = [facts_now(probes, base, is_prompt=False)], []
        for _ in range(options.rounds):
            speeds.append(measured(model, options.n))
            facts.append(facts_now(probes, base, is_prompt=False))

    def predicted(found: DeviceFacts, between: Wires) -> float:
        each = [replace(found, device=device) for device in ids]
        return SpeedModel(each, Links({}, wires=between)).decode(load, 40).tokens_per_s

    wire = wires.between(0, 1)
    print(  # noqa: T201
        f"wire 0-1: {1e3 * wire.latency_s:.2f} ms, "
        f"{8e-6 * wire.bytes_per_s:.0f} Mbit/s, exchange {1e3 * wires.exchange_s(0, 1):.2f} ms"
    )
    near = Wires(other=replace(wire, latency_s=0.0, bytes_per_s=1e15))
    ratios = []
    for (before, after), speed in zip(pairwise(facts), speeds, strict=True):
        guess = statistics.fmean(predicted(one, wires) for one in (before, after))
        without = statistics.fmean(predicted(one, near) for one in (before, after))
        ratios.append(guess / speed)
        print(f"predicted {guess:6.2f}/s ({without:6.2f} without wire)   measured {speed:6.2f}/s")  # noqa: T201
    document = {"ratio": statistics.median(ratios), "ratios": ratios, "wire": asdict(wire)}
    print(json.dumps(document))  # noqa: T201


if __name__ == "__main__":
    main()
