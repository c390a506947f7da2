"""Ranks that are threads: sums, joins, failures, and who is to blame."""

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from engine.errors import CommError
from engine.parallel.comm import ThreadCommunicator, ThreadGroup
from engine.parallel.life import Life
from engine.parallel.pool import RankPool, _Job

CPU = torch.device("cpu")


class Ranks:
    """A pool and the communicators of its ranks."""

    def __init__(self, n: int, *, is_awake: bool = False) -> None:
        self.group = ThreadGroup(is_awake=is_awake)
        self.comms = [ThreadCommunicator(self.group, rank, CPU) for rank in range(n)]
        self.everyone = tuple(range(n))
        self.pool = RankPool(n, self.group.abort, lambda: None, self.group)

    def run(self, fn: Callable[[ThreadCommunicator], Tensor | None]) -> list[Tensor | None]:
        try:
            return self.pool.run(lambda rank: fn(self.comms[rank]))
        finally:
            self.group.settle()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks count as silent soon."""
    monkeypatch.setattr("engine.parallel.watch.SILENT_S", 0.4)
    monkeypatch.setattr("engine.parallel.watch.LOOK_S", 0.05)
    monkeypatch.setattr("engine.parallel.pool.LOOK_S", 0.05)
    monkeypatch.setattr("engine.parallel.pool.GRACE_S", 0.1)


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


def spin(seconds: float) -> None:
    """Compute."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("is_awake", [False, True])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_rank_that_does_nothing_is_named_and_left_behind(n: int, *, is_awake: bool) -> None:
    ranks, wake = Ranks(n, is_awake=is_awake), threading.Event()
    came_back: list[BaseException] = []

    def step(comm: ThreadCommunicator) -> Tensor:
        comm.all_reduce(torch.ones(1), ranks.everyone)
        if comm.rank == n - 1:
            wake.wait()
        try:
            return comm.all_reduce(torch.ones(1), ranks.everyone)
        except CommError as error:
            came_back.append(error)
            raise

    begun = time.perf_counter()
    with pytest.raises(CommError, match=rf"cpu \(rank {n - 1}\) has shown no sign") as found:
        ranks.run(step)
    assert time.perf_counter() - begun < 2
    assert (found.value.rank, found.value.device) == (n - 1, "cpu")
    assert ranks.pool.lost == {n - 1}
    ranks.pool.close()
    thread = next(t for t in threading.enumerate() if t.name == f"tandem-rank-{n - 1}")
    assert len(came_back) == n - 1
    wake.set()
    thread.join(5)
    assert not thread.is_alive(), "it meets nobody any more, and ends"
    assert len(came_back) == n


@pytest.mark.usefixtures("hasty")
def test_several_that_do_nothing_are_all_named() -> None:
    ranks, wake = Ranks(3), threading.Event()

    def step(comm: ThreadCommunicator) -> Tensor:
        if comm.rank:
            wake.wait()
        return comm.all_reduce(torch.ones(1), ranks.everyone)

    with pytest.raises(CommError, match=r"cpu \(rank 1\) and cpu \(rank 2\) have shown no sign"):
        ranks.run(step)
    wake.set()
    ranks.pool.close()


@pytest.mark.usefixtures("hasty")
def test_a_rank_by_itself_at_the_end_is_watched_as_well() -> None:
    """In a layer split the last one has nobody in a collective who waits for it."""
    ranks, wake = Ranks(2), threading.Event()
    with pytest.raises(CommError, match=r"cpu \(rank 1\) has shown no sign"):
        ranks.run(lambda comm: wake.wait() if comm.rank else None)  # type: ignore[arg-type,return-value]
    wake.set()
    ranks.pool.close()


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("is_awake", [False, True])
def test_a_rank_that_left_early_is_named(*, is_awake: bool) -> None:
    ranks = Ranks(3, is_awake=is_awake)
    with pytest.raises(CommError, match=r"cpu \(rank 1\) has not come to where other ranks wait"):
        ranks.run(
            lambda comm: None if comm.rank == 1 else comm.all_reduce(torch.ones(1), (0, 1, 2))
        )
    assert not ranks.pool.lost
    sums = ranks.run(lambda comm: comm.all_reduce(torch.ones(1), (0, 1, 2)))
    assert [s.item() for s in sums if s is not None] == [3, 3, 3], "usable after a failure"
    ranks.pool.close()


@pytest.mark.usefixtures("hasty")
def test_ranks_that_wait_for_each_other_end() -> None:
    ranks = Ranks(3)
    groups = [(0, 1), (1, 2), (0, 2)]
    with pytest.raises(CommError, match="have not come to where other ranks wait"):
        ranks.run(lambda comm: comm.all_reduce(torch.ones(1), groups[comm.rank]))
    ranks.pool.close()


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("work", "is_awake"),
    [(spin, True), (lambda s: [time.sleep(0.01) for _ in range(int(s * 100))], False)],
)
def test_a_rank_that_computes_is_waited_for(
    work: Callable[[float], object], *, is_awake: bool
) -> None:
    """However long it takes; also one that waits again and again, as for a disk."""
    ranks = Ranks(2, is_awake=is_awake)

    def step(comm: ThreadCommunicator) -> Tensor:
        if comm.rank == 0:
            work(1.2)
        return comm.all_reduce(torch.ones(1), (0, 1))

    assert [x.item() for x in ranks.run(step) if x is not None] == [2, 2]
    ranks.pool.close()


@pytest.mark.usefixtures("hasty")
def test_a_rank_that_waits_for_one_that_computes_is_none_that_stalls() -> None:
    """As for a lock, behind which another rank compiles."""
    ranks, lock = Ranks(3), threading.Lock()
    held = threading.Event()

    def step(comm: ThreadCommunicator) -> Tensor:
        if comm.rank == 1:
            with lock:
                held.set()
                spin(1)
        if comm.rank == 2:
            held.wait()
            with lock:
                pass
        return comm.all_reduce(torch.ones(1), ranks.everyone)

    assert [x.item() for x in ranks.run(step) if x is not None] == [3] * 3
    ranks.pool.close()


@pytest.mark.usefixtures("hasty")
def test_threads_that_work_for_a_rank_count_as_well() -> None:
    ranks = Ranks(2)

    def help_rank(life: Life) -> None:
        life.include_this_thread()
        spin(1)

    def step(comm: ThreadCommunicator) -> Tensor:
        if comm.rank == 0:
            life = Life.present()
            assert life is not None
            thread = threading.Thread(target=help_rank, args=(life,))
            thread.start()
            thread.join()
        return comm.all_reduce(torch.ones(1), (0, 1))

    assert [x.item() for x in ranks.run(step) if x is not None] == [2, 2]
    ranks.pool.close()


@pytest.mark.usefixtures("hasty")
def test_a_rank_waits_for_a_process_that_it_has_started() -> None:
    """As for a compiler."""
    ranks = Ranks(2)

    def step(comm: ThreadCommunicator) -> Tensor:
        if comm.rank == 0:
            subprocess.run([sys.executable, "-c", "import time; time.sleep(1.2)"], check=True)
        return comm.all_reduce(torch.ones(1), (0, 1))

    assert [x.item() for x in ranks.run(step) if x is not None] == [2, 2]
    ranks.pool.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only there they can be told apart")
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("is_of_rank", [True, False])
def test_threads_that_a_library_starts_for_a_rank_count_too(*, is_of_rank: bool) -> None:
    """As torch's do, of which Python does not know; others in the process do not."""
    ranks, stop = Ranks(2), threading.Event()

    def work() -> None:
        while not stop.is_set():
            spin(0.01)

    def step(comm: ThreadCommunicator) -> Tensor:
        if comm.rank == 0:
            thread = threading.Thread(target=work)
            if is_of_rank:
                thread.start()
            stop.wait(1.5)
        return comm.all_reduce(torch.ones(1), (0, 1))

    other = threading.Thread(target=work)
    if not is_of_rank:
        other.start()
    try:
        if is_of_rank:
            threading.Timer(1, stop.set).start()
            assert [x.item() for x in ranks.run(step) if x is not None] == [2, 2]
        else:
            with pytest.raises(CommError, match=r"cpu \(rank 0\) has shown no sign"):
                ranks.run(step)
    finally:
        stop.set()
    ranks.pool.close()


@pytest.mark.usefixtures("hasty")
def test_what_computes_without_end_meets_the_old_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.parallel.watch.LONGEST_S", 0.8)
    ranks = Ranks(2)

    def step(comm: ThreadCommunicator) -> Tensor:
        if comm.rank == 1:
            spin(1.5)
        return comm.all_reduce(torch.ones(1), (0, 1))

    with pytest.raises(CommError, match=r"cpu \(rank 1\) has reached no other rank for"):
        ranks.run(step)
    assert not ranks.pool.lost, "it has come back"
    ranks.pool.close()


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(("is_alive", "stalls"), [(True, False), (False, True)])
def test_a_device_may_tell_by_itself_whether_it_does_something(
    monkeypatch: pytest.MonkeyPatch, *, is_alive: bool, stalls: bool
) -> None:
    """One that computes though its thread sleeps, and one that hangs though its thread spins."""
    ranks = Ranks(2)
    monkeypatch.setattr(ranks.group, "is_alive", lambda rank: is_alive if rank == 1 else None)

    def step(comm: ThreadCommunicator) -> Tensor:
        if comm.rank == 1:
            (spin if stalls else time.sleep)(1)
        return comm.all_reduce(torch.ones(1), (0, 1))

    if stalls:
        with pytest.raises(CommError, match=r"rank 1\) has shown no sign"):
            ranks.run(step)
    else:
        assert [x.item() for x in ranks.run(step) if x is not None] == [2, 2]
    ranks.pool.close()


def test_an_error_names_its_device_and_says_what_to_do() -> None:
    gpu, cpu = CommError(1, "has stalled", "cuda:1"), CommError(0, "has stalled", "cpu")
    assert str(gpu) == "cuda:1 (rank 1) has stalled."
    assert gpu.hint == "Load the model again; if this comes back, load it without cuda:1."
    assert (str(cpu), cpu.hint) == ("cpu (rank 0) has stalled.", "Load the model again.")
    assert str(CommError(2, "has stalled")) == "Rank 2 has stalled."


def test_ranks_on_gpus_are_not_judged_by_their_threads() -> None:
    group = ThreadGroup()
    group.join(0, torch.device("cuda:1"))
    group.join(1, CPU)
    assert [group.is_alive(rank) for rank in (0, 1)] == [True, None]
    assert [group.device(rank) for rank in (0, 1, 2)] == ["cuda:1", "cpu", ""]


@pytest.mark.usefixtures("hasty")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_silently_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(3)
    original = _Job.run

    def run(job: _Job[Tensor | None], rank: int) -> None:
        if rank == 2:
            sys.exit()  # ends the thread without a word
        original(job, rank)

    monkeypatch.setattr(_Job, "run", run)
    with pytest.raises(CommError, match=r"cpu \(rank 2\) has ended in the middle of a step"):
        ranks.run(lambda comm: comm.all_reduce(torch.ones(1), ranks.everyone))
    assert ranks.pool.lost == {2}
    ranks.pool.close()


@pytest.mark.parametrize("is_awake", [False, True])
@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize(
    "wrong", [torch.ones(1, 8), torch.ones(4, 2), torch.ones(2, 4).double()], ids=repr
)
def test_values_that_do_not_fit_name_their_rank(wrong: Tensor, n: int, *, is_awake: bool) -> None:
    ranks = Ranks(n, is_awake=is_awake)
    with pytest.raises(CommError, match="has given numbers") as found:
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

    with pytest.raises(CommError, match=rf"cpu \(rank {n - 1}\) has given numbers \(2, "):
        ranks.run(step)


@pytest.mark.parametrize("is_awake", [False, True])
@pytest.mark.parametrize(("n", "wrong"), [(2, 0), (2, 1), (3, 0), (3, 2), (5, 1)])
def test_a_bit_that_differs_names_its_rank(n: int, wrong: int, *, is_awake: bool) -> None:
    ranks, row = Ranks(n, is_awake=is_awake), torch.randn(2, 40)
    row[1, 3] = torch.nan  # which is not equal to itself, but has the same bits

    def step(comm: ThreadCommunicator, n_flipped: int) -> Tensor | None:
        mine = row.clone()
        if comm.rank == wrong:
            mine.view(torch.int32)[1, 17] ^= n_flipped
        return comm.gather(torch.ones(2, 3), ranks.everyone, mine)

    problem = "has computed other numbers than" if n > 2 else "have computed different numbers"
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
    """Otherwise the next step would begin while they are still at the last one."""
    pool, finished = RankPool(2, lambda: None, lambda: None), threading.Event()
    interrupts = [KeyboardInterrupt()]

    class Done(queue.SimpleQueue[None]):
        def get(self, block: bool = True, timeout: float | None = None) -> None:
            if interrupts:
                raise interrupts.pop()
            super().get(block, timeout)

    def work(rank: int) -> int:
        if rank == 1:
            finished.wait(0.2)
            finished.set()
        return rank

    monkeypatch.setattr("engine.parallel.pool.queue.SimpleQueue", Done)
    with pytest.raises(KeyboardInterrupt):
        pool.run(work)
    assert finished.is_set()
    assert pool.run(lambda rank: rank) == [0, 1]
    pool.close()


def test_closing_ends_every_thread() -> None:
    before = threading.active_count()
    pool = RankPool(4, lambda: None, lambda: None)
    assert threading.active_count() == before + 4
    pool.close()
    pool.close()
    assert threading.active_count() == before


def test_one_rank_takes_no_thread() -> None:
    pool = RankPool(1, lambda: None, lambda: None)
    assert pool.run(lambda rank: threading.current_thread()) == [threading.current_thread()]
    pool.close()
