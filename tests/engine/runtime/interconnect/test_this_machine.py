"""Queries of a real machine: its driver, and a child process that sees two GPUs only."""

from collections.abc import Mapping, Sequence

import pytest
import torch

from engine.hardware.devices.topology import Link, Topology
from engine.hardware.devices.types import DeviceInfo
from engine.planning.speed.link_records import TrialRecord
from engine.runtime.interconnect import child
from engine.runtime.interconnect import proof as this_machine
from engine.runtime.interconnect.child import StepResult, TrialStep
from engine.runtime.interconnect.proof import ThisMachine

GPUS = [
    DeviceInfo(f"cuda:{n}", "cuda", "RTX 3090", 1, 1, uuid=f"GPU-{n}", pci_bus=f"0:{n}")
    for n in range(3)
]
CPU = DeviceInfo("cpu", "cpu", "CPU", 1, 1)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> ThisMachine:
    """Return a machine with three GPUs, of which the first two have peer access."""

    def reaches(device: torch.device, peer: torch.device) -> bool:
        return {device.index, peer.index} == {0, 1}

    links = Link("cuda:0", "cuda:2", "host", peer_problem="the chipset does not support it")
    monkeypatch.setattr(this_machine, "list_devices", lambda: [*GPUS, CPU])
    monkeypatch.setattr(this_machine, "read_topology", lambda: Topology({}, (links,)))
    monkeypatch.setattr(this_machine, "torch_device", torch.device)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reaches)
    monkeypatch.setattr(this_machine, "kernels_for", lambda name: "" if name == "cuda:2" else "gpu")
    return ThisMachine()


def test_the_driver_says_who_reaches_whom(machine: ThisMachine) -> None:
    assert set(machine.infos()) == {"cuda:0", "cuda:1", "cuda:2"}
    assert machine.peer_problem("cuda:0", "cuda:1") == ""
    assert machine.peer_problem("cuda:2", "cuda:0") == "the chipset does not support it"
    assert machine.peer_problem("cuda:2", "cuda:1") == "the driver does not allow it"


def test_where_kernels_are_not_used_there_are_copies_only(machine: ThisMachine) -> None:
    assert machine.means("cuda:0", "cuda:1") == ("stores", "copies")
    assert machine.means("cuda:0", "cuda:2") == ("copies",)


def test_another_process_tries_safe_ways_first(
    machine: ThisMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[TrialStep], Mapping[str, str]]] = []

    def tried(steps: Sequence[TrialStep], gpus: Mapping[str, str]) -> list[StepResult]:
        asked.append((list(steps), dict(gpus)))
        return [StepResult(step, TrialRecord("passed"), TrialRecord("lost")) for step in steps[:-1]]

    monkeypatch.setattr(child, "try_steps", tried)
    pair = ("cuda:0", "cuda:1")
    found = machine.try_in_child([pair], ("host", "peer"), with_nccl=True)
    steps = [("stores", "host"), ("copies", "host"), ("stores", "peer"), ("copies", "peer")]
    assert asked == [
        (
            [TrialStep(pair, *step) for step in (*steps, ("nccl", "peer"))],  # type: ignore[arg-type]
            {"cuda:0": "GPU-0", "cuda:1": "GPU-1"},
        )
    ]
    assert {key: trial.verdict for key, trial in found[pair].items()} == dict.fromkeys(
        steps, "passed"
    )
    assert {trial.verdict for trial in found["cuda:1", "cuda:0"].values()} == {"lost"}
