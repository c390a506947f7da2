"""Communicator of ranks on GPUs: all-reduce, gather, failures; with fake streams."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine.backends.gpu.comm import communicator as comms
from engine.backends.gpu.comm import copies, streams
from engine.backends.gpu.comm import copies as copying
from engine.backends.gpu.comm.communicator import DeviceCommunicator, DeviceGroup
from engine.backends.gpu.comm.streams import Queues, queues_of
from engine.backends.gpu.launch.graph import capture
from engine.errors import CommError
from engine.hardware.devices.topology import BY_HOST, Routes, Way
from engine.parallel.rank_threads import RankThreads
from engine.planning.memory import ONE_SHOT_SLOT_BYTES, copying_bytes, host_link_bytes, link_bytes
from engine.runtime.measuring import link_speed
from tests.helpers.fake_streams import FakeQueues, Machine

CPU = torch.device("cpu")
Compute = Callable[[DeviceCommunicator], Tensor | None]


@dataclass(frozen=True)
class SameWay(Routes):
    """Routes that are the same between all devices, even between a device and itself."""

    way: Way = BY_HOST

    def between(self, source: str, goal: str) -> Way:
        return self.way


class Ranks:
    """An executor of ranks and their communicators.

    Args:
        machine: fake devices; None for devices that run everything immediately.
    """

    def __init__(
        self, n: int, routes: Routes | None = None, machine: Machine | None = None
    ) -> None:
        def queues(device: torch.device) -> Queues:
            return queues_of(device) if machine is None else FakeQueues(machine)

        self.machine = machine
        self.everyone = tuple(range(n))
        self.group = DeviceGroup([CPU] * n, routes or Routes(), None, queues)
        self.comms = [self.group.communicator(rank, CPU) for rank in range(n)]
        self.pool = RankThreads(n, self.group.abort, lambda: None)

    def run(self, fn: Compute) -> list[Tensor | None]:
        try:
            found = self.pool.call_on_all(lambda rank: fn(self.comms[rank]))
        finally:
            self.group.settle()
        if self.machine is not None:
            self.machine.drain()
        return found

    def sums(self, values: Sequence[Tensor | None], shape: tuple[int, ...] | None) -> list[Tensor]:
        found = self.run(lambda comm: comm.all_reduce(values[comm.rank], self.everyone, shape))
        return [x for x in found if x is not None]


@pytest.fixture
def ranks() -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(*args: object, **kwargs: object) -> Ranks:
        made.append(Ranks(*args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.pool.close()


def total_of(values: Sequence[Tensor | None]) -> Tensor:
    first, *others = (value for value in values if value is not None)
    return sum(others, start=first)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_sum_has_the_same_bits_on_every_rank(
    ranks: Callable[..., Ranks], n: int, *, is_known: bool
) -> None:
    """One-shot where all members know the shape, else by copies."""
    values = [torch.randn(2, 33) * 10.0**r for r in range(n)]
    found = ranks(n).sums(values, (2, 33) if is_known else None)
    assert len(found) == n
    assert all(torch.equal(x, total_of(values)) for x in found)


@pytest.mark.parametrize("shape", [(1, 40), (8, 3), None])
def test_a_rank_with_nothing_joins_with_none(
    ranks: Callable[..., Ranks], shape: tuple[int, int] | None
) -> None:
    values = [torch.randn(shape or (4, 4)), None, torch.randn(shape or (4, 4))]
    found = ranks(3).sums(values, shape)
    assert len(found) == 3
    assert all(torch.equal(x, total_of(values)) for x in found)


def test_values_may_have_gaps(ranks: Callable[..., Ranks]) -> None:
    some = ranks(2, SameWay(way=Way(None, "host")), Machine(0))
    values = [torch.randn(300, 200) for _ in range(2)]
    total = total_of([x.bfloat16().float() for x in values])
    assert all(torch.equal(x, total.t()) for x in some.sums([x.t() for x in values], (200, 300)))
    sent = some.run(lambda comm: comm.broadcast(values[comm.rank].t(), 1, some.everyone))
    assert all(x is not None and torch.equal(x, values[1].t()) for x in sent)


def test_what_no_kernel_adds_up_is_copied(ranks: Callable[..., Ranks]) -> None:
    three = ranks(3, SameWay(way=Way(None, "host")))
    assert three.comms[0].one_shot(three.everyone, 8) is None
    values = [torch.randn(2, 8) for _ in range(3)]
    assert all(torch.equal(x, total_of(values)) for x in three.sums(values, (2, 8)))
    two = ranks(2)
    assert two.comms[0].one_shot(two.everyone, 8) is not None
    assert two.comms[0].one_shot(two.everyone, 1 << 24) is None


def come_out_right(some: Ranks) -> bool:
    """Return whether all-reduces, broadcasts and gathers in a row, also in groups, are right."""
    large = [torch.randn(300, 200) for _ in range(3)]
    given = torch.randn(5, 7)

    def step(comm: DeviceCommunicator) -> Tensor:
        results = []
        for _ in range(2):
            results.append(comm.all_reduce(large[comm.rank], some.everyone).flatten())
            if comm.rank != 1:
                own = torch.ones(4) * comm.rank
                results.append(comm.all_reduce(own, (0, 2)))
            source = given if comm.rank == 1 else None
            results.append(comm.broadcast(source, 1, some.everyone).flatten())
            slices = comm.gather(given[:, comm.rank :], some.everyone)
            if slices is not None:
                results.append(slices.flatten())
        after = torch.empty(sum(map(len, results)))
        comm._compute.run(lambda: after.copy_(torch.cat(results)))
        return after

    found = some.run(step)
    total = total_of([x.bfloat16().float() for x in large]).bfloat16().float().flatten()
    joined = torch.cat([given[:, rank:] for rank in range(3)], -1).flatten()
    are_right = []
    for rank, result in enumerate(found):
        parts = [total, given.flatten()]
        if rank != 1:
            parts.insert(1, torch.full((4,), 2.0))
        if rank == 0:
            parts.append(joined)
        assert result is not None
        are_right.append(torch.equal(result, torch.cat(parts * 2)))
    return all(are_right)


@pytest.mark.parametrize("copies", ["host", "peer", "device"])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_devices_do_first(ranks: Callable[..., Ranks], seed: int, copies: str) -> None:
    routes = SameWay(way=Way(None, copies))  # type: ignore[arg-type]
    assert come_out_right(ranks(3, routes, Machine(seed)))


def test_no_wait_is_there_in_vain(
    ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every wait of streams and of the host is needed for some order of operations."""
    routes, machine = SameWay(way=Way(None, "host")), Machine(0)
    assert come_out_right(ranks(3, routes, machine))
    sites = [site for site in machine.sites if site.startswith("communicator.py")]
    assert sites
    for site in sites:
        assert not all(come_out_right(ranks(3, routes, Machine(seed, site))) for seed in range(8))
    monkeypatch.setattr(streams.Marks, "until", lambda self, *events: None)
    assert not all(come_out_right(ranks(3, routes, Machine(seed))) for seed in range(8))


def test_joins_of_many_rows_come_in_turns(
    ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    some = ranks(3, None, Machine(0))
    monkeypatch.setattr(copies, "GATHER_BYTES", 4 * 5 * 7)
    whole = torch.randn(23, 7)
    bounds = [0, 4, 4, 7]  # the second rank has none

    def part(comm: DeviceCommunicator) -> Tensor | None:
        first, last = bounds[comm.rank : comm.rank + 2]
        return whole[:, first:last] if last > first else None

    for rows in (23, 1, 5, 2):
        found = some.run(
            lambda comm, rows=rows: comm.gather(
                None if (x := part(comm)) is None else x[:rows], some.everyone
            )
        )
        assert found[1:] == [None, None]
        assert found[0] is not None
        assert torch.equal(found[0], whole[:rows])


def test_a_graph_writes_a_row_where_it_was_joined_before(
    ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks do not meet then: a copy is captured, which replays make without the hosts."""
    row, meet = torch.randn(1, 9), DeviceGroup.meet
    for is_pinned in (True, False):
        some = ranks(2)

        def part(comm: DeviceCommunicator) -> Tensor:
            return row[:, :4] if comm.rank == 0 else row[:, 4:]

        def joined(some: Ranks = some, part: Compute = part) -> list[Tensor | None]:
            return some.run(lambda comm: comm.gather(part(comm), some.everyone))

        met: list[object] = []

        def noted(*args: object, met: list[object] = met) -> object:
            met.append(args)
            return meet(*args)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(comms, "_is_capturing", lambda device: True)
            assert joined()[0] is not None, "it was never joined, so the hosts do it"
            some.group._gather_buffers[some.everyone, True]._held.is_pinned = is_pinned
            patch.setattr(DeviceGroup, "meet", noted)
            found, nothing = joined()
        assert nothing is None
        assert found is not None
        assert torch.equal(found, row)
        assert bool(met) is not is_pinned


def test_a_rank_that_computed_something_else_is_named(ranks: Callable[..., Ranks]) -> None:
    some = ranks(3)
    same = torch.randn(2, 8)
    other = same.clone()
    other[-1, 3] += 1e-6

    def show(comm: DeviceCommunicator) -> Tensor | None:
        return comm.gather(torch.ones(1, 2), some.everyone, other if comm.rank == 1 else same)

    with some.group.one_shots.without_waiting():
        some.run(show)  # sums are incomplete then
    with pytest.raises(CommError, match=r"rank 1.*computed different numbers"):
        some.run(show)
    with pytest.raises(CommError, match=r"rank 2.*has provided values"):
        some.sums([torch.ones(2), torch.ones(2), torch.ones(3)], None)
    assert all(x.item() == 3 for x in some.sums([torch.ones(1)] * 3, None)), "usable afterwards"


def test_a_failing_rank_wakes_the_others_and_they_begin_anew(ranks: Callable[..., Ranks]) -> None:
    some = ranks(3)

    def fail(comm: DeviceCommunicator) -> Tensor:
        for shape in ((1, 8), None):
            comm.all_reduce(torch.ones(1, 8), some.everyone, shape)
        if comm.rank == 1:
            raise ZeroDivisionError("on rank 1")
        return comm.all_reduce(torch.ones(1, 8), some.everyone, (1, 8))

    for shape in ((1, 8), None):
        with pytest.raises(ZeroDivisionError, match="on rank 1"):
            some.run(fail)
        found = some.sums([torch.ones(1, 8)] * 3, shape)
        assert all(torch.equal(x, torch.full((1, 8), 3.0)) for x in found)


def test_a_device_that_ends_nothing_is_named_in_time(
    ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "STALL_S", 0.2)
    machine = Machine(0)
    some = ranks(2, SameWay(way=Way(None, "host")), machine)

    def step(comm: DeviceCommunicator) -> Tensor | None:
        comm._shared.marks.leave(comm.rank, comm._compute.record())
        if comm.rank == 1:
            machine.is_hung = True
        return comm.gather(torch.ones(1, 2), some.everyone)

    begun = time.monotonic()
    with pytest.raises(CommError, match="has made no progress"):
        some.run(step)
    with pytest.raises(CommError):
        some.sums([torch.ones(1), torch.ones(1)], None)
    assert time.monotonic() - begun < 2


def test_a_device_that_goes_on_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "STALL_S", 0.2)

    class Slow:
        def __init__(self, over_at: float) -> None:
            self._over_at = over_at

        def query(self) -> bool:
            return time.monotonic() >= self._over_at

    now = time.monotonic()
    marks = streams.Marks(["cuda:0", "cuda:1"])
    for n in range(1, 6):
        marks.leave(1, Slow(now + 0.1 * n))
    assert marks.has_moved(0) is None
    assert marks.has_moved(1) is False
    marks.until([Slow(now + 0.5)])
    assert time.monotonic() >= now + 0.5
    marks.leave(0, Slow(now + 0.6))
    time.sleep(0.2)
    marks.leave(0, Slow(now + 60))
    assert marks.has_moved(0) is True
    assert marks.has_moved(0) is False
    with pytest.raises(CommError, match=r"cuda:0 \(rank 0\) has made no progress"):
        marks.until([Slow(now + 60)])
    marks.until([Slow(time.monotonic() + 0.1)], 5)
    with pytest.raises(CommError, match="has made no progress"):
        marks.until([Slow(time.monotonic() + 0.1)])
    marks.forget()
    marks.until([Slow(time.monotonic() + 0.1)])


def test_a_repeated_token_meets_again(ranks: Callable[..., Ranks]) -> None:
    """A capture gives the same sums, in memory that each replay overwrites."""
    some = ranks(2)
    values = [torch.randn(1, 12), torch.randn(1, 12)]

    def compute(comm: DeviceCommunicator) -> Tensor | None:
        x = values[comm.rank] * 2
        x = comm.all_reduce(x, some.everyone, (1, 12)) + comm.all_reduce(x, some.everyone)
        x = comm.broadcast(x + comm.rank, 1, some.everyone)
        return comm.gather(x, some.everyone)

    def repeated(comm: DeviceCommunicator) -> Tensor | None:
        compute(comm)
        captured = capture(CPU, lambda: compute(comm))
        comm._shared.meet(comm.rank, some.everyone, None)
        values[comm.rank].add_(1)
        captured.replay()
        return captured.result

    found, nothing = some.run(repeated)
    total = 2 * values[0] + 2 * values[1]
    assert nothing is None
    assert found is not None
    assert torch.equal(found, torch.cat([total + total + 1] * 2, -1))


def test_links_are_measured_by_what_models_use(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("N_SMALL", "N_LARGE", "N_ROUNDS"):
        monkeypatch.setattr(link_speed, name, 1)
    monkeypatch.setattr(link_speed, "SMALL_BYTES", (1 << 10,))
    monkeypatch.setattr(link_speed, "LARGE_BYTES", 1 << 20)
    monkeypatch.setattr(link_speed, "torch_device", lambda name: CPU)
    monkeypatch.setattr(link_speed, "kernels_for", lambda name: "gpu")
    monkeypatch.setattr(link_speed, "find_routes", lambda names: Routes())
    made: list[str] = []
    for name in ("_sum", "one_shot"):
        inner = getattr(DeviceCommunicator, name)

        def noted(
            *args: object, name: str = name, inner: Callable[..., object] = inner, **how: object
        ) -> object:
            made.append(name)
            return inner(*args, **how)

        monkeypatch.setattr(DeviceCommunicator, name, noted)
    found = link_speed.measure_link("cuda:0", "cuda:1")
    assert found.bytes_per_s > 0
    assert set(made) == {"_sum", "one_shot"}


def test_what_devices_need_is_planned(ranks: Callable[..., Ranks]) -> None:
    taken = {"device": 0, "host": 0}

    class Counted(FakeQueues):
        def empty(self, n_bytes: int) -> Tensor:
            taken["device"] += n_bytes
            return super().empty(n_bytes)

        def pinned(self, n_bytes: int):  # type: ignore[no-untyped-def]
            taken["host"] += n_bytes
            return super().pinned(n_bytes)

    for n in (2, 3):
        taken.update(device=0, host=0)
        some = ranks(n, SameWay(way=Way(None, "host")), machine := Machine(0))
        some.group._make_queues = lambda device, machine=machine: Counted(machine)
        rows = copying.ROUND_BYTES // 128
        for _ in range(2):
            some.sums([torch.ones(rows, 128)] * n, None)
        one_shots = DeviceGroup([CPU] * n, Routes()).one_shots
        assert one_shots.one_shot(0, some.everyone) is not None
        slots = (n - 1) * ONE_SHOT_SLOT_BYTES
        assert 0.98 * slots < one_shots.n_bytes(0) <= slots <= link_bytes(n) - copying_bytes(n)
        assert taken == {"device": n * copying_bytes(n), "host": n * host_link_bytes(n)}
