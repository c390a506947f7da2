"""The watchdog of ranks: hung ranks are named within seconds, computing ones are waited for."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.backends.cpu.thread_comm import ThreadCommunicator, ThreadGroup
from engine.errors import CommError
from engine.parallel.rank_threads import _Job
from engine.parallel.watchdog import RankActivity
from tests.helpers.faults import quicken
from tests.helpers.thread_ranks import CPU, Ranks


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the times after which ranks count as silent."""
    quicken(monkeypatch)


def spin(seconds: float) -> None:
    """Keep the CPU busy for some seconds."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("spins", [False, True])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_rank_that_does_nothing_is_named_and_left_behind(n: int, *, spins: bool) -> None:
    ranks, wake = Ranks(n, spins=spins), threading.Event()
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
    """In a layer split no other rank waits in a collective for the last one."""
    ranks, wake = Ranks(2), threading.Event()
    with pytest.raises(CommError, match=r"cpu \(rank 1\) has shown no sign"):
        ranks.run(lambda comm: wake.wait() if comm.rank else None)  # type: ignore[arg-type,return-value]
    wake.set()
    ranks.pool.close()


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("spins", [False, True])
def test_a_rank_that_left_early_is_named(*, spins: bool) -> None:
    ranks = Ranks(3, spins=spins)
    with pytest.raises(
        CommError, match=r"cpu \(rank 1\) has not reached the point where other ranks are waiting"
    ):
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
    with pytest.raises(CommError, match="have not reached the point where other ranks are waiting"):
        ranks.run(lambda comm: comm.all_reduce(torch.ones(1), groups[comm.rank]))
    ranks.pool.close()


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("work", "spins"),
    [(spin, True), (lambda s: [time.sleep(0.01) for _ in range(int(s * 100))], False)],
)
def test_a_rank_that_computes_is_waited_for(
    work: Callable[[float], object], *, spins: bool
) -> None:
    """A rank may compute for any time, or wait again and again, as for a disk."""
    ranks = Ranks(2, spins=spins)

    def step(comm: ThreadCommunicator) -> Tensor:
        if comm.rank == 0:
            work(1.2)
        return comm.all_reduce(torch.ones(1), (0, 1))

    assert [x.item() for x in ranks.run(step) if x is not None] == [2, 2]
    ranks.pool.close()


@pytest.mark.usefixtures("hasty")
def test_a_rank_that_waits_for_one_that_computes_is_none_that_stalls() -> None:
    """It may wait for a lock that another rank holds while it compiles."""
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

    def help_rank(activity: RankActivity) -> None:
        activity.include_this_thread()
        spin(1)

    def step(comm: ThreadCommunicator) -> Tensor:
        if comm.rank == 0:
            activity = RankActivity.of_this_thread()
            assert activity is not None
            thread = threading.Thread(target=help_rank, args=(activity,))
            thread.start()
            thread.join()
        return comm.all_reduce(torch.ones(1), (0, 1))

    assert [x.item() for x in ranks.run(step) if x is not None] == [2, 2]
    ranks.pool.close()


@pytest.mark.usefixtures("hasty")
def test_a_rank_waits_for_a_process_that_it_has_started() -> None:
    """The process may be a compiler."""
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
    """Torch starts such threads, unknown to Python; other threads of the process do not count."""
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
    monkeypatch.setattr("engine.parallel.watchdog.MAX_S", 0.8)
    ranks = Ranks(2)

    def step(comm: ThreadCommunicator) -> Tensor:
        if comm.rank == 1:
            spin(1.5)
        return comm.all_reduce(torch.ones(1), (0, 1))

    with pytest.raises(
        CommError, match=r"cpu \(rank 1\) has not exchanged values with any other rank for"
    ):
        ranks.run(step)
    assert not ranks.pool.lost, "it has come back"
    ranks.pool.close()


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(("is_alive", "stalls"), [(True, False), (False, True)])
def test_a_device_may_tell_by_itself_whether_it_does_something(
    monkeypatch: pytest.MonkeyPatch, *, is_alive: bool, stalls: bool
) -> None:
    """A device may compute while its thread sleeps, or hang while its thread spins."""
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
    original = _Job.compute

    def compute(job: _Job[Tensor | None], rank: int) -> None:
        if rank == 2:
            sys.exit()  # ends the thread silently
        original(job, rank)

    monkeypatch.setattr(_Job, "compute", compute)
    with pytest.raises(CommError, match=r"cpu \(rank 2\) has stopped in the middle of a step"):
        ranks.run(lambda comm: comm.all_reduce(torch.ones(1), ranks.everyone))
    assert ranks.pool.lost == {2}
    ranks.pool.close()
