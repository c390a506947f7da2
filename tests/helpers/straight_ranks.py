"""A program that is one of two machines and proves the straight way between them.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 GLOO_SOCKET_IFNAME=lo \\
        python -m tests.helpers.straight_ranks FILE.json
"""

import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from engine import EngineError
from engine.distributed import straight_proof
from engine.distributed.machine_comm import RankLayout
from engine.distributed.machines import Machines
from engine.distributed.straight import StraightBackend, StraightCommunicator
from engine.distributed.straight_proof import Proof, chosen_ports, known_value
from engine.distributed.wire import Wire
from engine.hardware.fallbacks import Fallbacks

BACKEND = StraightBackend("gloo", "cpu")
CPU = torch.device("cpu")
SOON_S = 2.0


def sums(machines: Machines, layout: RankLayout) -> list[bool]:
    """Return which sums have the bits of additions in rank order, of values and their lack."""
    assert machines.straight is not None
    group = machines.straight.make(layout.ports((0, 1, 2)), ("cpu", "cpu"))
    comm = machines.straight.communicator(group, CPU)
    values = [known_value(rank, (3, 50)) for rank in range(3)]
    has = [[0, 1], [2]]
    found = []
    for lacking in ((), (0,), (1,), (2,), (0, 1)):
        mine = [values[rank] for rank in has[machines.number] if rank not in lacking]
        total = comm.sum_of_several(mine, (0, 1), (3, 50), 2)
        first, *others = [values[rank] for rank in range(3) if rank not in lacking]
        wanted = sum(others, start=first)
        found.append(torch.equal(total.view(torch.int32), wanted.view(torch.int32)))
    return found


def main() -> None:
    """Write what this machine has found."""
    goal = Path(sys.argv[1])
    machines = Machines(Wire("here"), lambda error: None, BACKEND)
    layout = RankLayout((2, 1), machines.number)
    devices = dict.fromkeys(layout.local, CPU)
    ports = [layout.ports((0, 2)), layout.ports((1, 2), 1)]
    fallbacks = Fallbacks()

    def agreed(value: Any) -> list[Any]:
        return machines.agreed(None, value)

    def chosen(link: str) -> Any:
        return sorted(chosen_ports(machines, link, ports, devices, agreed, fallbacks))

    def timed(straight_s: float) -> Any:
        """Choose as if the straight way took so long and the other one a second."""
        with mock.patch.object(
            straight_proof, "seconds_of",
            lambda comm, *_: straight_s if isinstance(comm, StraightCommunicator) else 1.0,
        ):  # fmt: skip
            return chosen("auto")

    found: dict[str, Any] = {"gloo": chosen("gloo"), "slow": timed(1.1), "auto": timed(0.9)}
    found["measured"] = len(chosen("auto")) in (0, 2)
    found["sums"] = sums(machines, layout)
    machine, right = machines.number, straight_proof.known_value
    if machine == 1:  # what it sends is not what the other one knows
        straight_proof.known_value = lambda seed, shape: right(7 + seed, shape)
    found["wrong"] = chosen("auto")
    straight_proof.known_value = right
    found["fallbacks"] = [one.sentence for one in fallbacks.current]
    try:
        chosen("nccl")
    except EngineError as error:
        found["error"] = str(error)
    later = Machines(machines._wire, lambda error: None, BACKEND)
    assert later.straight is not None
    begun = time.monotonic()
    if machine == 0:  # the other one does not come
        proof = Proof(later.straight, ports, devices, dict.fromkeys(range(3), "cpu"))
        found["hanging"] = proof.problem(SOON_S)
    found["took"] = time.monotonic() - begun
    found["still"] = agreed(machine)
    goal.with_suffix(f".{machine}").write_text(json.dumps(found))
    later.close()


if __name__ == "__main__":
    main()
