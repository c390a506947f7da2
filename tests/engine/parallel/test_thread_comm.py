"""Collectives of ranks that are threads: sums, gathers, failures, and mismatching values."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from engine.backends.cpu.thread_comm import ThreadCommunicator, ThreadGroup
from engine.backends.executor import RankExecutor
from engine.errors import CommError
from engine.parallel.rank_threads import RankThreads
from tests.helpers.thread_ranks import Ranks


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
    """A rank may be ahead by one collective; values of different rounds must not mix."""
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


def test_an_error_names_its_device_and_says_what_to_do() -> None:
    gpu, cpu = CommError(1, "has stalled", "cuda:1"), CommError(0, "has stalled", "cpu")
    assert str(gpu) == "cuda:1 (rank 1) has stalled."
    assert gpu.hint == "Load the model again; if this comes back, load it without cuda:1."
    assert (str(cpu), cpu.hint) == ("cpu (rank 0) has stalled.", "Load the model again.")
    assert str(CommError(2, "has stalled")) == "Rank 2 has stalled."


@pytest.mark.parametrize("spins", [False, True])
@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize(
    "wrong", [torch.ones(1, 8), torch.ones(4, 2), torch.ones(2, 4).double()], ids=repr
)
def test_values_that_do_not_fit_name_their_rank(wrong: Tensor, n: int, *, spins: bool) -> None:
    ranks = Ranks(n, spins=spins)
    with pytest.raises(CommError, match="has provided values") as found:
        ranks.run(
            lambda comm: comm.all_reduce(
                wrong if comm.rank == 1 else torch.ones(2, 4), ranks.everyone
            )
        )
    assert (found.value.rank, found.value.device) == (1, "cpu")
    assert str(tuple(wrong.shape)) in str(found.value)
    assert "(2, 4) of torch.float32" in str(found.value)
    sums = ranks.run(lambda comm: comm.all_reduce(torch.ones(2, 4), ranks.everyone))
    assert all(s is not None and s.eq(n).all() for s in sums)
    ranks.pool.close()


def test_slices_that_do_not_fit_name_their_rank(ranks: Ranks) -> None:
    n = len(ranks.comms)
    if n == 1:
        return

    def step(comm: ThreadCommunicator) -> Tensor | None:
        rows = 2 if comm.rank == n - 1 else 1
        return comm.gather(torch.ones(rows, 3 + comm.rank), ranks.everyone)

    with pytest.raises(CommError, match=rf"cpu \(rank {n - 1}\) has provided values \(2, "):
        ranks.run(step)


@pytest.mark.parametrize("spins", [False, True])
@pytest.mark.parametrize(("n", "wrong"), [(2, 0), (2, 1), (3, 0), (3, 2), (5, 1)])
def test_a_bit_that_differs_names_its_rank(n: int, wrong: int, *, spins: bool) -> None:
    ranks, row = Ranks(n, spins=spins), torch.randn(2, 40)
    row[1, 3] = torch.nan  # NaN is not equal to itself, but its bits are

    def step(comm: ThreadCommunicator, n_flipped: int) -> Tensor | None:
        mine = row.clone()
        if comm.rank == wrong:
            mine.view(torch.int32)[1, 17] ^= n_flipped
        return comm.gather(torch.ones(2, 3), ranks.everyone, mine)

    problem = "has computed different numbers from" if n > 2 else "have computed different numbers"
    with pytest.raises(CommError, match=problem) as found:
        ranks.run(lambda comm: step(comm, 1))
    assert f"rank {wrong}" in str(found.value)
    assert found.value.rank == wrong or n == 2
    joined = ranks.run(lambda comm: step(comm, 0))[0]
    assert joined is not None
    assert joined.shape == (2, 3 * n)
    ranks.pool.close()


def test_only_ranks_that_compute_alike_are_compared() -> None:
    ranks = Ranks(3)

    def step(comm: ThreadCommunicator) -> Tensor | None:
        return comm.gather(
            torch.ones(1, 3), ranks.everyone, torch.full((1, 4), 1.0) if comm.rank else None
        )

    assert ranks.run(step)[0] is not None
    ranks.pool.close()


def test_an_interrupt_waits_for_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next function would begin while other ranks still compute the last one."""
    pool, finished = RankThreads(2, lambda: None, lambda: None), threading.Event()
    interrupts = [KeyboardInterrupt()]

    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if interrupts:
                raise interrupts.pop()
            return super().wait(timeout)

    def work(rank: int) -> int:
        if rank == 1:
            finished.wait(0.2)
            finished.set()
        return rank

    monkeypatch.setattr("engine.parallel.rank_threads.threading.Event", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.call_on_all(work)
    assert finished.is_set()
    assert pool.call_on_all(lambda rank: rank) == [0, 1]
    pool.close()


def test_closing_ends_every_thread() -> None:
    before = threading.active_count()
    pool = RankThreads(4, lambda: None, lambda: None)
    assert threading.active_count() == before + 4
    pool.close()
    pool.close()
    assert threading.active_count() == before


def test_one_rank_takes_no_thread() -> None:
    executor = RankExecutor([torch.device("cpu")], ThreadGroup())
    assert executor.run(lambda rank: threading.current_thread()) == [threading.current_thread()]
    executor.close()
