"""Ranks that are threads: sums, joins, failures."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from engine.errors import CommError
from engine.parallel.comm import ThreadCommunicator, ThreadGroup
from engine.parallel.pool import RankPool

CPU = torch.device("cpu")


class Ranks:
    """A pool and the communicators of its ranks."""

    def __init__(self, n: int, *, is_awake: bool = False) -> None:
        self.group = ThreadGroup(is_awake=is_awake)
        self.comms = [ThreadCommunicator(self.group, rank, CPU) for rank in range(n)]
        self.pool = RankPool(n, self.group.abort, lambda: None)

    def run(self, fn: Callable[[ThreadCommunicator], Tensor | None]) -> list[Tensor | None]:
        try:
            return self.pool.run(lambda rank: fn(self.comms[rank]))
        finally:
            self.group.settle()


@pytest.fixture(params=[1, 2, 3, 5])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = Ranks(request.param)
    yield made
    made.pool.close()


def test_a_sum_has_the_same_bits_on_every_rank(ranks: Ranks) -> None:
    n = len(ranks.comms)
    values = [torch.randn(7, 33) * 10.0 ** (3 * r) for r in range(n)]
    everyone = tuple(range(n))
    sums = ranks.run(lambda comm: comm.all_reduce(values[comm.rank], everyone))
    expected = values[0]
    for value in values[1:]:
        expected = expected + value
    assert all(torch.equal(s, expected) for s in sums if s is not None)
    assert all(s is not None for s in sums)


def test_ten_thousand_sums_in_a_row_never_mix(ranks: Ranks) -> None:
    """A rank may run ahead by one collective; values of different rounds must not meet."""
    n = len(ranks.comms)
    everyone = tuple(range(n))

    def count(comm: ThreadCommunicator) -> Tensor:
        wrong = torch.zeros(1)
        for i in range(10_000 // n):
            wrong += comm.all_reduce(torch.full((1,), float(i)), everyone) != n * i
        return wrong

    assert all(w is not None and w.item() == 0 for w in ranks.run(count))


def test_a_rank_with_nothing_joins_with_none() -> None:
    ranks = Ranks(3)
    sums = ranks.run(
        lambda comm: comm.all_reduce(None if comm.rank == 1 else torch.ones(2), (0, 1, 2))
    )
    assert all(s is not None and s.tolist() == [2, 2] for s in sums)
    ranks.pool.close()


def test_groups_do_not_wait_for_ranks_outside() -> None:
    ranks = Ranks(3)
    results = ranks.run(
        lambda comm: comm.all_reduce(torch.ones(1), (0, 2)) if comm.rank != 1 else None
    )
    assert [None if r is None else r.item() for r in results] == [2, None, 2]
    ranks.pool.close()


def test_joins_and_broadcasts_keep_rank_order(ranks: Ranks) -> None:
    n = len(ranks.comms)
    everyone = tuple(range(n))
    whole = torch.arange(2 * n).float().reshape(1, -1)

    def part(comm: ThreadCommunicator) -> Tensor:
        return whole[:, 2 * comm.rank : 2 * comm.rank + 2]

    gathered = ranks.run(lambda comm: comm.gather(part(comm), everyone))
    assert gathered[0] is not None
    assert torch.equal(gathered[0], whole)
    assert gathered[1:] == [None] * (n - 1)
    for value in ranks.run(lambda comm: comm.broadcast(part(comm), n - 1, everyone)):
        assert value is not None
        assert torch.equal(value, whole[:, -2:])


def test_a_failing_rank_wakes_the_others_and_names_the_cause() -> None:
    ranks = Ranks(3)

    def fail(comm: ThreadCommunicator) -> Tensor:
        if comm.rank == 1:
            raise ZeroDivisionError("on rank 1")
        return comm.all_reduce(torch.ones(1), (0, 1, 2))

    for _ in range(3):
        with pytest.raises(ZeroDivisionError, match="on rank 1"):
            ranks.run(fail)
    sums = ranks.run(lambda comm: comm.all_reduce(torch.ones(1), (0, 1, 2)))
    assert [s.item() for s in sums if s is not None] == [3, 3, 3], "usable after a failure"
    ranks.pool.close()


def test_a_rank_that_never_comes_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.parallel.comm.STALL_TIMEOUT_S", 0.05)
    ranks = Ranks(2)
    with pytest.raises(CommError, match="Rank"):
        ranks.run(lambda comm: comm.all_reduce(torch.ones(1), (0, 1)) if comm.rank else None)
    ranks.pool.close()


@pytest.mark.parametrize("is_awake", [False, True])
def test_a_rank_that_is_busy_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, *, is_awake: bool
) -> None:
    """In a layer split one rank computes block after block by itself while the next waits."""
    monkeypatch.setattr("engine.parallel.comm.STALL_TIMEOUT_S", 0.2)
    ranks = Ranks(2, is_awake=is_awake)

    def step(comm: ThreadCommunicator) -> Tensor:
        if comm.rank == 0:
            for _ in range(8):
                time.sleep(0.1)
                comm.all_reduce(torch.ones(1), (0,))
        return comm.broadcast(torch.ones(1) if comm.rank == 0 else None, 0, (0, 1))

    assert all(x is not None and x.item() == 1 for x in ranks.run(step))
    ranks.pool.close()


def test_closing_ends_every_thread() -> None:
    before = threading.active_count()
    pool = RankPool(4, lambda: None, lambda: None)
    assert threading.active_count() == before + 3
    pool.close()
    pool.close()
    assert threading.active_count() == before
