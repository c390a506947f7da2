"""All-reduce by a fake NCCL that is late, or fails."""

import logging
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.backends.gpu.comm import copies, nccl
from engine.backends.gpu.comm.communicator import DeviceGroup
from engine.backends.gpu.comm.nccl import Nccl, tried
from engine.backends.gpu.comm.streams import HostQueue
from engine.hardware.devices.topology import Routes
from engine.parallel.rank_threads import RankThreads
from tests.helpers.fake_streams import FakeQueue, FakeQueues, Machine

CPU = torch.device("cpu")


def late_gather(
    values: Sequence[Tensor], outputs: Sequence[Tensor], queues: Sequence[FakeQueue]
) -> None:
    """All-gather in which each queue waits for the others before and after it writes."""
    ready = [queue.record() for queue in queues]
    for queue, output in zip(queues, outputs, strict=True):
        for event in ready:
            queue.wait(event)
        queue.run(lambda output=output: output.copy_(torch.cat(list(values))))
    done = [queue.record() for queue in queues]
    for queue in queues:
        for event in done:
            queue.wait(event)


class Failing:
    """An all-gather that works `n` times, then fails."""

    def __init__(self, n_good: int) -> None:
        self.n_left = n_good

    def __call__(self, *args: Sequence[object]) -> None:
        self.n_left -= 1
        if self.n_left < 0:
            raise RuntimeError("unhandled system error")
        late_gather(*args)  # type: ignore[arg-type]


def summed(
    seed: int, shared: Nccl, values: Sequence[Tensor | None], machine: Machine | None = None
) -> list[Tensor]:
    """Return the sums of two ranks, computed twice in a row."""
    machine = machine or Machine(seed)
    group = DeviceGroup([CPU] * 2, Routes(), shared, lambda device: FakeQueues(machine))
    pool = RankThreads(2, group.abort, lambda: None)

    def compute(rank: int) -> Tensor:
        comm, value = group.communicator(rank, CPU), values[rank]
        x = None if value is None else torch.full(value.shape, torch.nan)
        if x is not None:
            comm._compute.run(lambda: x.copy_(value))
        found = [comm.all_reduce(x, (0, 1)) for _ in range(2)]
        result = torch.empty_like(found[0])
        comm._compute.run(lambda: result.copy_(found[0] + found[1]))
        return result

    try:
        found = pool.call_on_all(compute)
    finally:
        group.settle()
        pool.close()
    machine.drain()
    return found


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "LINK_ROUND_BYTES", 64 << 10)
    assert copies.SMALL_BYTES < 200 * 300 * 4


def total_of(values: Sequence[Tensor | None]) -> Tensor:
    first, *others = (value.bfloat16().float() for value in values if value is not None)
    return 2 * sum(others, start=first)


@pytest.mark.parametrize("seed", range(4))
def test_both_get_the_same_right_bits(seed: int) -> None:
    shared = Nccl(late_gather)
    for values in ([torch.randn(200, 300), torch.randn(200, 300)], [None, torch.randn(200, 300)]):
        assert all(torch.equal(x, total_of(values)) for x in summed(seed, shared, values))
    assert shared.works


def test_it_waits_for_what_it_brings() -> None:
    values = [torch.randn(200, 300), torch.randn(200, 300)]

    def is_right(machine: Machine) -> bool:
        found = summed(0, Nccl(late_gather), values, machine)
        return all(torch.equal(x, total_of(values)) for x in found)

    machine = Machine(0)
    assert is_right(machine)
    sites = [site for site in machine.sites if site.startswith("nccl.py")]
    assert sites
    for site in sites:
        assert not all(is_right(Machine(seed, site)) for seed in range(8))


@pytest.mark.parametrize("n_good", [0, 1, 2, 5])
def test_when_it_fails_copies_take_over_for_good(
    n_good: int, caplog: pytest.LogCaptureFixture
) -> None:
    gather = Failing(n_good)
    whys: list[str] = []
    shared = Nccl(gather, whys.append)
    values = [torch.randn(200, 300), torch.randn(200, 300)]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert all(torch.equal(x, total_of(values)) for x in summed(0, shared, values))
    assert not shared.works
    assert gather.n_left == -1, "it is never tried again"
    assert len([r for r in caplog.records if "NCCL failed" in r.message]) == 1
    assert whys == ["it has failed (unhandled system error)"]


def eager_gather(
    values: Sequence[Tensor], outputs: Sequence[Tensor], queues: Sequence[HostQueue]
) -> None:
    for output in outputs:
        output.copy_(torch.cat(list(values)))


def wrong_gather(
    values: Sequence[Tensor], outputs: Sequence[Tensor], queues: Sequence[HostQueue]
) -> None:
    eager_gather(values, outputs, queues)
    outputs[1][12345] += 1


class Never:
    def query(self) -> bool:
        return False


def test_it_is_tried_before_it_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whys: list[str] = []
    queues = [HostQueue(), HostQueue()]
    assert tried([CPU] * 2, queues, eager_gather, whys.append) is not None
    assert not caplog.records
    assert not whys
    assert tried([CPU] * 2, queues, wrong_gather, whys.append) is None
    assert "wrong values" in caplog.text
    assert tried([CPU] * 2, queues, Failing(0), whys.append) is None
    assert "unhandled system error" in caplog.text
    assert whys == ["it returns wrong values", "unhandled system error"]
    assert tried([CPU] * 2, queues, nccl.all_gather) is None, "there are no GPUs"
    monkeypatch.setattr(nccl, "TRIAL_S", 0.01)
    monkeypatch.setattr(HostQueue, "record", lambda self: Never())
    assert tried([CPU] * 2, queues, eager_gather) is None
    assert "has not arrived" in caplog.text
