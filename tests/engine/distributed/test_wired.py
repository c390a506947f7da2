"""Links as they are measured over a wire that delays and drops packets."""

import os
import re
import subprocess
import sys

import pytest

from tests.helpers.wire import DEVICE, WireKind, can_wire, wired

PROGRAM = """
import os
from engine.distributed.wire import Wire
from engine.distributed.straight_proof import measure_wires
wire = Wire("machine")
(found,) = measure_wires(wire)
if wire.rank == 0:
    print("found", found.latency_s, found.mean_s, found.bytes_per_s, found.exchange_s)
"""


def measured(kind: WireKind) -> list[float]:
    """Return latency, mean, bytes per second and time of an exchange over a wire."""
    with wired(2, kind, 78) as nodes:
        started = [
            subprocess.Popen(
                node.command(sys.executable, "-c", PROGRAM),
                env={
                    **os.environ, "RANK": str(number), "WORLD_SIZE": "2",
                    "MASTER_ADDR": nodes[0].address, "MASTER_PORT": "29578",
                    "GLOO_SOCKET_IFNAME": DEVICE,
                },
                stdout=subprocess.PIPE, text=True,
            )
            for number, node in enumerate(nodes)
        ]  # fmt: skip
        text = "".join(process.communicate(timeout=60)[0] for process in started)
    found = re.search(r"found (.*)", text)
    assert found is not None
    return [float(word) for word in found[1].split()]


@pytest.mark.slow
@pytest.mark.skipif(not can_wire(), reason="network namespaces need root")
def test_a_link_is_measured_as_it_is() -> None:
    latency, mean, rate, exchange = measured(WireKind(2e-3, 200e6))
    assert 2e-3 < latency < 12e-3
    assert mean < 3 * latency
    assert 0.2 * 25e6 < rate < 25e6, "200 Mbit/s"
    assert 1.5 * 2e-3 < exchange < 24e-3, "who sends waits to hear that it is waited for"
    latency, mean, _, _ = measured(WireKind(2e-3, 200e6, 0.02))
    assert 2e-3 < latency < 12e-3
    assert mean > 1.2 * latency, "lost packets are noticed late"
