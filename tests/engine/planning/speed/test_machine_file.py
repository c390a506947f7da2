"""Measured facts on disk: kept by device, driver and version; damage does no harm."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.hardware.devices.topology import Link, Pcie, Topology
from engine.hardware.devices.types import DeviceInfo
from engine.planning.speed.facts import DeviceFacts, LinkFacts, WeightRate
from engine.planning.speed.machine_file import MachineFile, expected_facts, known_facts, known_links

GIB = 1 << 30
CPU = DeviceInfo("cpu", "cpu", "Some CPU", 8 * GIB, 4 * GIB, n_cores=4)
GPU = DeviceInfo("cuda:1", "cuda", "RTX 3090", 24 * GIB, 23 * GIB, pci_bus="0:1", driver="580")
RATE = WeightRate(3.0, 2.0, 1.0)
FACTS = DeviceFacts("cpu", 10.0, 20.0, 0.5, 0.25, 0.125, 4, 5.0, rates={"Q4_K": RATE})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "machine.json"


def test_what_was_measured_is_found_again(path: Path) -> None:
    MachineFile(path).keep_device(CPU, FACTS)
    again = MachineFile(path)
    assert again.device(CPU) == FACTS
    assert again.device(replace(CPU, n_cores=2)) is None
    assert again.device(GPU) is None
    assert known_facts(CPU, again) == FACTS


def test_equal_gpus_share_their_facts_under_their_own_ids(path: Path) -> None:
    file = MachineFile(path)
    file.keep_device(GPU, replace(FACTS, device="cuda:1"))
    other = replace(GPU, id="cuda:2", pci_bus="0:2")
    found = file.device(other)
    assert found is not None
    assert found.device == "cuda:2"
    assert file.device(replace(GPU, driver="590")) is None


def test_kinds_of_weights_add_up(path: Path) -> None:
    file = MachineFile(path)
    file.keep_device(CPU, FACTS)
    both = file.keep_device(CPU, replace(FACTS, rates={"F16": RATE}))
    assert set(both.rates) == {"Q4_K", "F16"}
    assert MachineFile(path).device(CPU) == both


def test_links_belong_to_slots(path: Path) -> None:
    file, other = MachineFile(path), replace(GPU, id="cuda:2", pci_bus="0:2")
    file.keep_link(GPU, other, LinkFacts(1e-6, 5e9))
    again = MachineFile(path)
    assert again.link(other, GPU) == LinkFacts(1e-6, 5e9)
    assert again.link(GPU, replace(other, pci_bus="0:3")) is None
    assert again.links([GPU, other, CPU]) == {("cuda:1", "cuda:2"): LinkFacts(1e-6, 5e9)}


@pytest.mark.parametrize(
    "change",
    [
        {"bytes_per_s": 0}, {"bytes_per_s": -1}, {"bytes_per_s": "fast"}, {"flop_per_s": None},
        {"op_s": 1e99}, {"op_s": True}, {"rates": 7}, {"rates": {"F16": 3}},
        {"rates": {"F16": {"bytes_per_s": 1}}},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_entry_is_left_out(path: Path, change: dict[str, object]) -> None:
    file = MachineFile(path)
    file.keep_device(CPU, FACTS)
    file.keep_link(CPU, CPU, LinkFacts(1.0, 1.0))
    document = json.loads(path.read_text())
    (entry,) = document["devices"].values()
    entry.update(change)
    path.write_text(json.dumps(document))
    again = MachineFile(path)
    assert again.device(CPU) is None
    assert again.link(CPU, CPU) == LinkFacts(1.0, 1.0)


@pytest.mark.parametrize("text", ["", "[1]", '{"devices": [], "links": 3}', '{"links": {"a": 1}}'])
def test_a_damaged_file_is_an_empty_one(path: Path, text: str) -> None:
    path.write_text(text)
    assert MachineFile(path).device(CPU) is None
    MachineFile(path).keep_device(CPU, FACTS)
    assert MachineFile(path).device(CPU) == FACTS


def test_the_file_stays_small(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.planning.speed.machine_file.MAX_ENTRIES", 2)
    file, cpus = MachineFile(path), [replace(CPU, name=f"CPU {n}") for n in range(3)]
    for cpu in cpus:
        file.keep_device(cpu, FACTS)
    assert [MachineFile(path).device(cpu) is None for cpu in cpus] == [True, False, False]


def test_a_device_that_nobody_measured_is_what_its_maker_says() -> None:
    assert expected_facts(GPU).bytes_per_s == pytest.approx(0.85 * 936e9)
    assert expected_facts(GPU).device == "cuda:1"
    cpu = expected_facts(CPU)
    assert (cpu.n_threads, cpu.device) == (4, "cpu")
    assert 1e9 < cpu.bytes_per_s < 1e12
    unknown = expected_facts(replace(GPU, name="NVIDIA GeForce RTX 9999"))
    assert 0 < unknown.bytes_per_s <= expected_facts(GPU).bytes_per_s
    huge = expected_facts(replace(GPU, name="NVIDIA Z1", total_bytes=999 * GIB))
    assert huge.bytes_per_s > 0


def test_a_measured_link_counts_before_an_expected_one(path: Path) -> None:
    other = replace(GPU, id="cuda:2", pci_bus="0:2")
    topology = Topology(
        {"cuda:1": Pcie(1, 16, 4, 16), "cuda:2": Pcie(1, 8, 4, 16)},
        (Link("cuda:1", "cuda:2", "p2p", ancestor="one host bridge"),),
    )
    devices, file = [GPU, other, CPU], MachineFile(path)
    expected = known_links(devices, topology, file).between("cuda:2", "cuda:1")
    assert expected.bytes_per_s == pytest.approx(13e9, rel=0.05)  # a resting slot of 8 lanes
    file.keep_link(GPU, other, LinkFacts(1e-6, 5e9))
    assert known_links(devices, topology, file).between("cuda:2", "cuda:1") == LinkFacts(1e-6, 5e9)
    assert known_links(devices, topology).between("cuda:1", "cpu").bytes_per_s > 2e10
