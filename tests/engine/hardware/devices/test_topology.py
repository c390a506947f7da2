"""Links between GPUs as the driver tells them, with a made-up driver."""

import importlib

import pytest

from engine.hardware.devices.topology import Link, Pcie, read_topology
from tests.helpers.fake_nvml import CODES, FakeDriver, FakeGpu, install, no_gpus

A, B, C = (f"00000000:{bus:02x}:00.0" for bus in (1, 2, 3))


@pytest.fixture
def driver(monkeypatch) -> FakeDriver:
    """Return a driver of three equal GPUs, listed in another order than they sit on the bus."""
    gpus = [FakeGpu("H100", f"GPU-{bus}", bus=bus, gib=80) for bus in (3, 1, 2)]
    return install(FakeDriver(gpus), monkeypatch)


def gpu(driver: FakeDriver, bus: str) -> FakeGpu:
    return next(gpu for gpu in driver.gpus if gpu.pci_bus == bus)


def let_read(driver: FakeDriver, *buses: str) -> None:
    """Let two GPUs read each other's memory."""
    for one in buses:
        gpu(driver, one).peers = dict.fromkeys(buses, 0)


def links(driver: FakeDriver) -> dict[tuple[str, str], Link]:
    found = {(link.a, link.b): link for link in read_topology().links}
    assert driver.n_open == 0
    return found


def test_every_pair_is_named_once_by_the_ids_of_torch(driver):
    assert set(links(driver)) == {
        ("cuda:0", "cuda:1"), ("cuda:0", "cuda:2"), ("cuda:1", "cuda:2"),
    }  # fmt: skip
    assert set(read_topology().pcie) == {"cuda:0", "cuda:1", "cuda:2"}


def test_a_slot_is_told_as_it_is_now_and_at_most(driver):
    gpu(driver, B).pcie = (4, 8, 5, 16)
    assert read_topology().pcie["cuda:1"] == Pcie(4, 8, 5, 16)
    assert read_topology().pcie["cuda:0"] == Pcie(1, 16, 4, 16)
    gpu(driver, B).errors["pcie"] = CODES["NVML_ERROR_NOT_SUPPORTED"]
    assert read_topology().pcie["cuda:1"] == Pcie()


def test_gpus_that_may_not_read_each_other_go_by_the_host(driver):
    gpu(driver, A).peers[B] = gpu(driver, B).peers[A] = 4
    link = links(driver)["cuda:0", "cuda:1"]
    assert (link.kind, link.ancestor) == ("host", "one host bridge")
    assert link.peer_problem == "the driver's settings forbid it"
    gpu(driver, A).peers[B] = 0
    assert links(driver)["cuda:0", "cuda:1"].kind == "host"  # one direction is not enough


def test_gpus_that_may_are_peers(driver):
    let_read(driver, A, B)
    link = links(driver)["cuda:0", "cuda:1"]
    assert (link.kind, link.n_nvlink, link.peer_problem) == ("p2p", 0, "")
    assert links(driver)["cuda:0", "cuda:2"].kind == "host"


def test_nvlinks_to_one_gpu_are_counted(driver):
    let_read(driver, A, B, C)
    gpu(driver, A).nvlinks = [B.replace("00000000", "0000"), C, B]
    found = links(driver)
    assert (found["cuda:0", "cuda:1"].n_nvlink, found["cuda:0", "cuda:1"].nvlink_version) == (2, 4)
    assert found["cuda:0", "cuda:1"].kind == "nvlink"
    assert found["cuda:0", "cuda:2"].n_nvlink == 1
    assert found["cuda:1", "cuda:2"].kind == "p2p"


def test_nvlinks_to_a_switch_reach_whom_the_driver_says(driver):
    let_read(driver, A, B, C)
    switch = "00000000:F0:00.0"
    gpu(driver, A).nvlinks = [switch] * 18
    gpu(driver, A).nvlink_peers = {B}
    found = links(driver)
    assert (found["cuda:0", "cuda:1"].kind, found["cuda:0", "cuda:1"].n_nvlink) == ("nvlink", 18)
    assert found["cuda:0", "cuda:2"].kind == "p2p"


def test_a_driver_that_does_not_tell_is_not_believed(driver):
    let_read(driver, A, B)
    for name in ("peer", "ancestor", "nvlink"):
        gpu(driver, A).errors[name] = CODES["NVML_ERROR_NOT_SUPPORTED"]
    link = links(driver)["cuda:0", "cuda:1"]
    assert (link.kind, link.ancestor, link.n_nvlink) == ("host", "", 0)
    assert link.peer_problem == "the driver does not report it"


def test_a_lost_gpu_has_no_links(driver):
    gpu(driver, C).errors["*"] = CODES["NVML_ERROR_GPU_IS_LOST"]
    assert set(links(driver)) == {("cuda:0", "cuda:1")}


def test_without_a_driver_there_is_nothing(monkeypatch):
    install(no_gpus(), monkeypatch)
    topology = read_topology()
    assert (dict(topology.pcie), topology.links) == ({}, ())


def test_what_stands_for_the_driver_s_numbers_is_right():
    real = importlib.import_module("pynvml")
    levels = ("INTERNAL", "SINGLE", "MULTIPLE", "HOSTBRIDGE", "NODE", "SYSTEM")
    assert [getattr(real, f"NVML_TOPOLOGY_{name}") for name in levels] == [0, 10, 20, 30, 40, 50]
    assert (real.NVML_P2P_CAPS_INDEX_WRITE, real.NVML_P2P_CAPS_INDEX_NVLINK) == (1, 2)
    assert (real.NVML_P2P_STATUS_OK, real.NVML_P2P_STATUS_DISABLED_BY_REGKEY) == (0, 4)
