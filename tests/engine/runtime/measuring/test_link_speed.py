"""Measured links: plausible speeds, and no changed settings afterwards."""

import threading

import pytest
import torch

from engine import EngineError, NoDevice
from engine.planning.speed.facts import LinkFacts
from engine.runtime.measuring.link_speed import SMALL_BYTES, LinkSpeed, measure_link
from tests.helpers.prepared_templates import wait_for_templates


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.runtime.measuring.link_speed.LARGE_BYTES", 1 << 20)
    monkeypatch.setattr("engine.runtime.measuring.link_speed.N_SMALL", 5)
    monkeypatch.setattr("engine.runtime.measuring.link_speed.N_ROUNDS", 3)


@pytest.mark.parametrize("backend", ["", "reference"])
def test_ranks_on_the_cpu_are_measured(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks wait for each other in both ways: spinning in kernels, and asleep."""
    monkeypatch.setenv("TANDEM_BACKEND", backend)
    wait_for_templates()
    before, threads = threading.active_count(), torch.get_num_threads()
    found = measure_link("cpu", "cpu")
    assert (found.a, found.b) == ("cpu", "cpu")
    assert tuple(found.all_reduce_s) == SMALL_BYTES
    assert all(1e-7 < seconds < 0.5 for seconds in found.all_reduce_s.values())
    assert 1e6 < found.bytes_per_s < 1e12
    assert threading.active_count() == before
    assert torch.get_num_threads() == threads


def test_small_sums_are_within_the_latency() -> None:
    found = LinkSpeed("cuda:0", "cuda:1", {8192: 3e-6, 16384: 5e-6}, 1e9)
    assert found.facts == LinkFacts(5e-6, 1e9, 16384)
    assert found.facts.payload_s(8192) == 0
    assert found.facts.payload_s(16384 + 1000) == pytest.approx(1e-6)


def test_a_device_that_is_not_here_is_said() -> None:
    with pytest.raises(NoDevice, match="cuda:77"):
        measure_link("cpu", "cuda:77")


def test_a_lack_of_memory_is_said_and_ends_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> float:
        raise RuntimeError("CUDA out of memory")

    wait_for_templates()
    before = threading.active_count()
    monkeypatch.setattr("engine.runtime.measuring.link_speed._Rank.run", fail)
    with pytest.raises(EngineError, match="too little free memory to measure their link"):
        measure_link("cpu", "cpu")
    assert threading.active_count() == before
