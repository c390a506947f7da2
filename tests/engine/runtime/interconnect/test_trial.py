"""Trials of links with interpreted kernels find whatever a link does wrong."""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from engine.backends.gpu.kernels import link_trial as kernels
from engine.backends.gpu.launch.kernel_launch import is_interpreted
from engine.errors import EngineError
from engine.hardware.devices.topology import Place
from engine.runtime.interconnect import child, exchange
from engine.runtime.interconnect.exchange import GpuBench
from engine.runtime.interconnect.trial import (
    FULL,
    Effort,
    failed_trials,
    try_copies,
    try_nccl,
    try_stores,
)
from tests.helpers.fake_links import (
    Fading,
    FakeBench,
    Fault,
    Late,
    corrupt,
    honest,
    lost,
    swapped,
    torn,
)

TINY = Effort(n_rounds=3, n_pairs=4, n_rows=2, n_bulk=40, copied=(64, 4096))
PLACES: tuple[Place, ...] = ("peer", "host")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "N_PROGRAMS", 2)
    monkeypatch.setattr(exchange, "SIZE", 4)


@pytest.mark.parametrize("place", PLACES)
def test_what_an_honest_link_carries_passes(place: Place) -> None:
    bench = FakeBench()
    for trials in (try_stores(bench, place, TINY), try_copies(bench, place, TINY)):
        assert [trial.verdict for trial in trials] == ["passed", "passed"]


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [(lost, "lost"), (corrupt, "wrong"), (torn, "wrong"), (swapped, "wrong"), (Late(), "lost"),
     (Fading(2), "lost")],
    ids=["lost", "corrupt", "torn", "swapped", "late", "fading"],
)  # fmt: skip
@pytest.mark.parametrize("source", [0, 1])
def test_stores_that_fail_one_way_are_found_in_that_way(
    fault: Fault, verdict: str, source: int
) -> None:
    bench = FakeBench(stores={(source, "peer"): fault})
    found = try_stores(bench, "peer", TINY)
    assert found[source].verdict == verdict, found
    assert found[source].why
    assert found[1 - source].verdict == "passed"
    assert [trial.verdict for trial in try_copies(bench, "peer", TINY)] == ["passed"] * 2


@pytest.mark.parametrize("source", [0, 1])
def test_copies_that_fail_one_way_are_found_in_that_way(source: int) -> None:
    for fault, verdict in ((lost, "lost"), (corrupt, "wrong"), (swapped, "wrong")):
        bench = FakeBench(copies={(source, "peer"): fault})
        found = try_copies(bench, "peer", TINY)
        assert found[source].verdict == verdict
        assert found[1 - source].passed
        assert all(trial.passed for trial in try_copies(bench, "host", TINY))


def test_a_copy_that_never_ends_is_given_up() -> None:
    found = try_copies(FakeBench(hangs=frozenset([(1, "peer")])), "peer", TINY)
    assert [trial.verdict for trial in found] == ["passed", "hung"]


def test_answers_that_vanish_are_told_from_data_that_do() -> None:
    """Lost answers through host memory are told from lost data."""
    found = try_stores(FakeBench(stores={(1, "host"): lost}), "host", TINY)
    assert [trial.verdict for trial in found] == ["lost", "lost"]
    assert found[0].why == "a reply through host memory does not arrive"
    assert found[1].why == "after 0 of 3 exchanges"


def test_what_passes_is_timed_with_the_lanes_of_the_slots() -> None:
    timed = Effort(1, 2, 1, 4, (64,), (64, 128), (4096,), 1)
    bench = FakeBench(slot_lanes=((4, 16), (1, 4)))
    for trial in try_stores(bench, "peer", timed):
        assert set(trial.seconds) == {64, 128}
        assert all(0 < seconds < 10 for seconds in trial.seconds.values())
    copies = try_copies(bench, "peer", timed)
    assert [(set(trial.seconds), trial.lanes) for trial in copies] == [
        ({4096}, (4, 16)), ({4096}, (1, 4))
    ]  # fmt: skip


def test_a_lack_of_memory_is_no_fault_of_the_link() -> None:
    """It is refused, to be tried again, unlike a trial that a driver's error ended."""
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.\nAnd more.")
    cases = (full, "refused"), (RuntimeError("CUDA error: unspecified launch failure"), "crashed")
    for error, verdict in cases:
        there, back = failed_trials(error)
        assert there == back
        assert there.verdict == verdict
        assert there.why.startswith("CUDA ")
        assert "\n" not in there.why


def test_nccl_is_tried_like_the_rest() -> None:
    assert [t.verdict for t in try_nccl(FakeBench(nccl=honest), TINY)] == ["passed"] * 2
    assert [t.verdict for t in try_nccl(FakeBench(nccl=lost), TINY)] == ["lost"] * 2
    assert "wrong" in {t.verdict for t in try_nccl(FakeBench(nccl=corrupt), TINY)}
    with pytest.raises(EngineError, match="NCCL is not here"):
        try_nccl(FakeBench(), TINY)


def test_another_process_says_what_it_begins_and_what_comes_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = FakeBench(stores={(0, "peer"): lost}, without=frozenset(["host"]))
    seen = []

    class Bench(FakeBench):
        def __new__(cls, numbers: object, names: object) -> FakeBench:  # type: ignore[misc]
            seen.append((numbers, names))
            return bench

    bench.warm_up = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setattr(child, "GpuBench", Bench)
    monkeypatch.setattr(child, "FULL", TINY)
    steps = [[1, 0, "stores", "host"], [1, 0, "copies", "peer"]]
    request = json.dumps({"names": ["cuda:2", "cuda:5"], "steps": steps})
    replies = io.StringIO()
    child.run(io.StringIO(request + "\n"), replies)
    assert seen == [((1, 0), ("cuda:5", "cuda:2"))] * 2
    said = [json.loads(line) for line in replies.getvalue().splitlines()]
    assert [message.get("begin") for message in said] == [0, None, 1, None]
    assert said[1]["there"]["verdict"] == said[1]["back"]["verdict"] == "refused"
    assert said[1]["there"]["why"] == "There is no memory of host"
    assert said[3]["back"] == {"verdict": "passed", "why": "", "seconds": {}, "lanes": [0, 0]}


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("means", ["stores", "copies"])
def test_two_streams_of_one_gpu_pass_by_the_host(means: str) -> None:
    """With `TRITON_INTERPRET=0`: the kernels that wait for each other, on one device."""
    if is_interpreted(kernels.exchange):
        pytest.skip("the interpreter runs one kernel at a time")
    exchange.N_PROGRAMS, exchange.SIZE = 8, 128
    bench = GpuBench((0, 0), ("cuda:0", "cuda:0"))
    bench.warm_up()
    trials = (try_stores if means == "stores" else try_copies)(bench, "host", FULL)
    assert [trial.verdict for trial in trials] == ["passed", "passed"], trials
    assert trials[0].seconds


def test_a_trial_touches_no_other_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving a stream of another device makes torch's earlier device current."""
    current, left = [0], list[int]()

    @contextmanager
    def device(goal: torch.device) -> Iterator[None]:
        current.append(goal.index)
        yield
        current.pop()

    @contextmanager
    def stream(goal: SimpleNamespace) -> Iterator[None]:
        assert current[-1] == goal.device.index, "this would touch another GPU in the end"
        yield
        left.append(goal.device.index)

    def make(place: torch.device) -> SimpleNamespace:
        done = SimpleNamespace(record_event=lambda: None, wait_event=lambda event: None)
        return SimpleNamespace(device=place, **vars(done))

    staging, x, y = torch.empty(4), torch.arange(4.0), torch.empty(4)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "Stream", make)
    monkeypatch.setattr(exchange, "HostTensor", lambda shape, *_: SimpleNamespace(value=staging))
    bench = GpuBench((1, 2), ("cuda:1", "cuda:2"))
    with bench.on(1):
        pass
    for place in PLACES:
        y.zero_()
        bench.copy(0, place, x, y)
        assert torch.equal(x, y)
    assert left == [2, 1, 2, 1, 2]
