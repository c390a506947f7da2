"""Spinning ranks: the same sums and failures as sleeping ranks, and no missed wake-ups."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from engine.backends.cpu.kernels.running.thread_all_reduce import (
    ADDED,
    COMPLETE,
    NO_NUMBERS,
    ThreadAllReduce,
)
from engine.backends.cpu.thread_comm import MAX_ADDED, ThreadCommunicator, ThreadGroup
from engine.errors import CommError
from engine.parallel.rank_threads import RankThreads

CPU = torch.device("cpu")
Step = Callable[[ThreadCommunicator], Tensor | None]


class Ranks:
    """Threads of ranks, and the ranks' communicators."""

    def __init__(self, n: int, *, spins: bool) -> None:
        self.everyone = tuple(range(n))
        self.group = ThreadGroup(spins=spins)
        self.comms = [ThreadCommunicator(self.group, rank, CPU) for rank in range(n)]
        self.pool = RankThreads(n, self.group.abort, lambda: None, self.group)

    def run(self, step: Step) -> list[Tensor | None]:
        try:
            return self.pool.call_on_all(lambda rank: step(self.comms[rank]))
        finally:
            self.group.settle()

    def sums(self, values: Sequence[Tensor | None]) -> list[Tensor]:
        found = self.run(lambda comm: comm.all_reduce(values[comm.rank], self.everyone))
        return [x for x in found if x is not None]


class Pair:
    """Ranks that spin and, for comparison, ranks that sleep immediately."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.awake, self.asleep = (Ranks(n, spins=flag) for flag in (True, False))


@pytest.fixture(params=[2, 3, 4, 5])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.param)
    yield made
    for ranks in (made.awake, made.asleep):
        ranks.pool.close()


@pytest.fixture(params=[1, 30_000], ids=["impatient", "patient"])
def turns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Set how long ranks spin; with few turns they sleep nearly every time."""
    monkeypatch.setattr("engine.backends.cpu.thread_comm.SPIN_TURNS", request.param)
    return int(request.param)


@pytest.mark.parametrize("shape", [(1, 1), (1, 15), (1, 16), (3, 33), (1, 2048), (7, 5, 19)])
def test_sums_have_the_bits_of_torch(pair: Pair, shape: tuple[int, ...]) -> None:
    values = [torch.randn(shape) * 10.0 ** (3 * rank) for rank in range(pair.n)]
    sums, expected = pair.awake.sums(values), pair.asleep.sums(values)[0]
    assert [x.shape for x in sums] == [expected.shape] * pair.n
    assert all(torch.equal(x, expected) for x in sums)
    assert all(x.data_ptr() not in {v.data_ptr() for v in values} for x in sums)


@pytest.mark.parametrize("absent", [{0}, {1}, {0, 1}])
def test_ranks_without_values(pair: Pair, absent: set[int]) -> None:
    values = [None if r in absent else torch.randn(2, 40) for r in range(pair.n)]
    if all(value is None for value in values):
        return
    expected = pair.asleep.sums(values)[0]
    assert all(torch.equal(x, expected) for x in pair.awake.sums(values))


def others(n: int) -> dict[str, list[Tensor]]:
    """Return values that the kernel does not support."""
    return {
        "of another type": [torch.randn(3, 8).double() for _ in range(n)],
        "with gaps": [torch.randn(8, 3).T for _ in range(n)],
        "one with gaps": [torch.randn(8, 3).T] + [torch.randn(3, 8) for _ in range(n - 1)],
        "large": [torch.randn(3, MAX_ADDED) for _ in range(n)],
        "empty": [torch.randn(0, 8) for _ in range(n)],
    }


@pytest.mark.parametrize("kind", others(0))
def test_other_values_are_added_by_torch(pair: Pair, kind: str) -> None:
    values = others(pair.n)[kind]
    expected = pair.asleep.sums(values)[0]
    assert all(torch.equal(x, expected) for x in pair.awake.sums(values))


def test_negative_zeros_and_infinities_stay(pair: Pair) -> None:
    values = [torch.tensor([[-0.0, float("inf"), float("nan"), 1e-45]])] * pair.n
    expected = pair.asleep.sums(values)[0]
    for total in pair.awake.sums(values):
        assert torch.equal(total.view(torch.int32), expected.view(torch.int32))


def test_thousands_of_rounds_never_mix(pair: Pair, turns: int) -> None:
    """Ranks pause at random, so that each is often the last and the first."""
    n, everyone = pair.n, pair.awake.everyone

    def count(comm: ThreadCommunicator) -> Tensor:
        wrong, chance = torch.zeros(1), random.Random(comm.rank)
        for i in range(3000 // n):
            if chance.random() < 0.02:
                time.sleep(chance.random() * 0.004)
            wrong += (comm.all_reduce(torch.full((1, 70), float(i)), everyone) != n * i).any()
            if i % 7 == 0:
                source = i % n
                shown = comm.broadcast(torch.full((1,), float(i + comm.rank)), source, everyone)
                wrong += shown != i + source
        return wrong

    assert [x.item() for x in pair.awake.run(count) if x is not None] == [0] * n


def test_groups_meet_apart(pair: Pair, turns: int) -> None:
    n = pair.n
    halves = tuple(range(n // 2 + 1)), tuple(range(n // 2, n))

    def step(comm: ThreadCommunicator) -> Tensor:
        total = torch.zeros(1)
        for _ in range(300):
            for group in halves:
                if comm.rank in group:
                    total = total + comm.all_reduce(torch.ones(1), group)
        return total

    found = [x.item() for x in pair.awake.run(step) if x is not None]
    assert found == [300 * sum(len(g) for g in halves if rank in g) for rank in range(n)]


def test_a_failure_wakes_waiting_ranks(pair: Pair, turns: int) -> None:
    ranks = pair.awake

    def fail(comm: ThreadCommunicator) -> Tensor:
        if comm.rank == 1:
            time.sleep(0.01 if turns == 1 else 0)
            raise ZeroDivisionError("on rank 1")
        return comm.all_reduce(torch.ones(1), ranks.everyone)

    for _ in range(20):
        with pytest.raises(ZeroDivisionError, match="on rank 1"):
            ranks.run(fail)
        sums = ranks.sums([torch.ones(1)] * pair.n)
        assert [x.item() for x in sums] == [pair.n] * pair.n, "usable after a failure"


def test_a_rank_that_never_comes_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.parallel.watchdog.SILENT_S", 0.3)
    ranks = Ranks(3, spins=True)
    with pytest.raises(CommError, match=r"cpu \(rank 0\) has not reached"):
        ranks.run(lambda comm: comm.all_reduce(torch.ones(1), (0, 1, 2)) if comm.rank else None)
    ranks.pool.close()


def test_long_waits_do_not_use_the_core() -> None:
    ranks = Ranks(2, spins=True)

    def step(comm: ThreadCommunicator) -> Tensor:
        if comm.rank == 0:
            time.sleep(0.5)
        begun = time.thread_time()
        comm.all_reduce(torch.ones(1), (0, 1))
        return torch.tensor([time.thread_time() - begun])

    ranks.sums([torch.ones(1)] * 2)  # compiles the kernel
    waited = ranks.run(step)[1]
    assert waited is not None
    assert waited.item() < 0.1
    ranks.pool.close()


def test_result_bits() -> None:
    board = ThreadAllReduce(2)
    x, out = torch.tensor([1.0, 2.0]), torch.zeros(2)
    assert board.all_reduce(0, 1, x.data_ptr(), 2, out.data_ptr(), 10) == 0, "nobody else is here"
    assert board.all_reduce(1, 1, 0, NO_NUMBERS, 0, 10) == COMPLETE
    assert board.all_reduce(0, 1, x.data_ptr(), 2, out.data_ptr(), 10) == COMPLETE
    assert board.all_reduce(1, 2, x.data_ptr(), 2, out.data_ptr(), 10) == 0
    assert board.all_reduce(0, 2, x.data_ptr(), 2, out.data_ptr(), 10) == COMPLETE | ADDED
    assert out.tolist() == [2, 4]


def test_an_abort_ends_all_waiting() -> None:
    board, found = ThreadAllReduce(2), []
    thread = threading.Thread(target=lambda: found.append(board.all_reduce(0, 1, 0, 0, 0, 1 << 40)))
    thread.start()
    time.sleep(0.02)
    assert thread.is_alive()
    board.abort()
    thread.join(10)
    assert found == [0]
