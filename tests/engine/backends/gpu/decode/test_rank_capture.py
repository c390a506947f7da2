"""All ranks capture a token before one is replayed, and whatever fails leaves them as they were."""

import contextlib
import gc
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.cpu.thread_comm import ThreadGroup
from engine.backends.executor import RankExecutor, RankOutOfMemory
from engine.backends.gpu.decode.rank_capture import (
    CaptureTask,
    Recomputed,
    Unproven,
    capture_on_all,
)
from engine.backends.gpu.launch.graph import NotRepeatable, capture
from engine.errors import CommError
from engine.model.forward.batch import Batch
from engine.model.forward.pages import NO_WINDOW
from engine.model.forward.state import CacheSize
from engine.runtime.model_runner import ModelRunner
from engine.runtime.rank import NO_RANKS

CPU = torch.device("cpu")


class Ranks:
    """Ranks with the sum of the requested token and all earlier ones as result."""

    def __init__(self, n: int) -> None:
        self.executor = RankExecutor([CPU] * n, ThreadGroup())
        self.told: list[str] = []
        self.x = [torch.zeros(2) for _ in range(n)]
        self.state = [torch.full((2,), float(rank)) for rank in range(n)]
        self.fails: dict[int, Exception] = {}

    def capture_task(self, rank: int) -> CaptureTask:
        def begin() -> None:
            self.x[rank].fill_(1)

        def compute() -> Tensor:
            self.state[rank].add_(self.x[rank])
            return self.state[rank] * 10

        def captured() -> Any:
            self.told.append(f"capture {rank}")
            if rank in self.fails:
                raise self.fails[rank]
            return Noted(capture(CPU, compute), self.told, rank)

        return CaptureTask(begin, compute, captured, [self.state[rank]])

    def captured(self, one_shots: Any = None) -> Any:
        return capture_on_all(
            self.executor, [self.capture_task(rank) for rank in self.executor.ranks], one_shots
        )


class Noted:
    """A capture that logs its replays."""

    def __init__(self, inner: Any, told: list[str], rank: int) -> None:
        self._inner, self._told, self._rank = inner, told, rank
        self.is_whole = inner.is_whole

    @property
    def result(self) -> Tensor:
        found: Tensor = self._inner.result
        return found

    def replay(self) -> None:
        self._told.append(f"replay {self._rank}")
        self._inner.replay()


class FakeOneShots:
    """Logs when kernels must not wait, and reports a given problem."""

    def __init__(self, told: list[str], problem: CommError | None = None) -> None:
        self._told, self._problem = told, problem

    @contextlib.contextmanager
    def without_waiting(self) -> Iterator[None]:
        self._told.append("nobody waits")
        yield
        self._told.append("all wait")

    def problem(self) -> CommError | None:
        return self._problem


@pytest.fixture(params=[1, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = Ranks(request.param)
    yield made
    made.executor.close()


def states(ranks: Ranks) -> list[float]:
    return [float(state[0]) for state in ranks.state]


def test_a_token_is_computed_once_and_can_be_repeated(ranks: Ranks) -> None:
    n = len(ranks.x)
    replays, results = ranks.captured()
    expected = [10.0 * (rank + 1) for rank in range(n)]
    assert [float(x[0]) for x in results] == expected
    assert states(ranks) == [rank + 1.0 for rank in range(n)], "as after one token"
    assert replays.is_whole
    replays.replay()
    assert [float(part.result[0]) for part in replays.parts] == [x + 10 for x in expected]
    assert [float(x[0]) for x in results] == expected, "results have their own memory"


def test_all_capture_before_one_is_started(ranks: Ranks) -> None:
    """In their first replay, kernels do not wait for other ranks."""
    n = len(ranks.x)
    ranks.captured(FakeOneShots(ranks.told))
    captures, replays = ([f"{what} {rank}" for rank in range(n)] for what in ("capture", "replay"))
    assert sorted(ranks.told[:n]) == captures
    assert ranks.told[n:] == ["nobody waits", *replays, "all wait", *replays]
    assert states(ranks) == [rank + 1.0 for rank in range(n)]


def test_on_gpus_nobody_waits_at_first(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's first pass allocates and loads; kernels that wait during that would time out."""
    monkeypatch.setattr(RankExecutor, "has_gpus", True)
    monkeypatch.setattr(RankExecutor, "make_room", RankExecutor.wait)
    tasks = [ranks.capture_task(rank) for rank in ranks.executor.ranks]

    def noted(rank: int) -> CaptureTask:
        def compute() -> Tensor | None:
            ranks.told.append(f"compute {rank}")
            return tasks[rank].compute()

        return CaptureTask(tasks[rank].begin, compute, tasks[rank].capture, tasks[rank].states)

    _, results = capture_on_all(
        ranks.executor, [noted(rank) for rank in ranks.executor.ranks], FakeOneShots(ranks.told)
    )
    n = len(ranks.x)
    computed = [f"compute {rank}" for rank in range(n)]
    assert ranks.told[0] == "nobody waits"
    assert sorted(ranks.told[1 : n + 1]) == computed
    assert ranks.told[n + 1] == "all wait"
    assert sorted(ranks.told[n + 2 : 2 * n + 2]) == computed
    assert [float(found[0]) for found in results if found is not None] == [
        10.0 * (rank + 1) for rank in range(n)
    ], "from the states before"


@pytest.mark.parametrize(
    ("error", "is_unproven"),
    [
        (NotRepeatable("it reads results back"), False),
        (CommError(1, "is gone"), True),
        (RankOutOfMemory(1, CPU), False),
    ],
    ids=lambda given: type(given).__name__,
)
def test_one_that_cannot_be_captured_is_enough(error: Exception, is_unproven: bool) -> None:
    ranks = Ranks(3)
    ranks.fails[1] = error
    with pytest.raises(NotRepeatable, match=re.escape(str(error))) as caught:
        ranks.captured()
    assert isinstance(caught.value, Unproven) == is_unproven
    assert states(ranks) == [0, 1, 2], "nothing has been computed"
    assert not any(told.startswith("replay") for told in ranks.told)
    ranks.fails.clear()
    ranks.captured()
    ranks.executor.close()


def test_what_gives_other_bits_is_not_repeated(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = len(ranks.x) - 1

    def replay(self: Noted) -> None:
        self._inner.replay()
        if self._rank == wrong:
            self._inner.result[1] = -0.0

    monkeypatch.setattr(Noted, "replay", replay)
    with pytest.raises(Unproven, match="different results"):
        ranks.captured()
    assert states(ranks) == list(range(len(ranks.x)))


def test_a_rank_that_does_not_come_is_a_reason_to_do_without(ranks: Ranks) -> None:
    problem = CommError(0, "did not answer", "cuda:3")
    with pytest.raises(Unproven, match="cuda:3"):
        ranks.captured(FakeOneShots(ranks.told, problem))
    assert states(ranks) == list(range(len(ranks.x)))
    ranks.captured(FakeOneShots(ranks.told))


def test_a_device_that_does_not_end_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other kind of capture is tried then: waiting for the device would not return."""
    ranks = Ranks(3)
    monkeypatch.setattr("engine.backends.executor.STALL_S", 0.05)
    monkeypatch.setattr(RankExecutor, "is_idle", lambda self, rank: rank != 1)
    with pytest.raises(CommError, match=r"cpu \(rank 1\) has not computed a token"):
        ranks.captured()
    assert ranks.executor.lost == {1}
    ranks.executor.close()


def test_a_single_device_has_all_the_time_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = RankExecutor([CPU], ThreadGroup())
    monkeypatch.setattr("engine.backends.executor.STALL_S", 0.0)
    asked: list[int] = []

    def is_idle(self: RankExecutor, rank: int) -> bool:
        asked.append(rank)
        return len(asked) > 20

    monkeypatch.setattr(RankExecutor, "is_idle", is_idle)
    executor.wait()
    assert len(asked) == 21


def test_a_token_that_cannot_be_computed_is_an_error(ranks: Ranks) -> None:
    tasks = [ranks.capture_task(rank) for rank in ranks.executor.ranks]

    def fail() -> Tensor:
        raise ZeroDivisionError("on a rank")

    tasks[-1] = CaptureTask(lambda: None, fail, tasks[-1].capture)
    with pytest.raises(ZeroDivisionError, match="on a rank"):
        capture_on_all(ranks.executor, tasks)


class Full(SimpleNamespace):
    """A state too large to copy."""

    def clone(self) -> Tensor:
        raise torch.OutOfMemoryError("no room")


def test_states_that_cannot_be_copied_are_a_reason_not_to_capture(ranks: Ranks) -> None:
    """Plans do not count these copies, so the pass is computed step by step; no answer fails."""
    tasks = [ranks.capture_task(rank) for rank in ranks.executor.ranks]
    full: Any = (Full(),)
    last = CaptureTask(tasks[-1].begin, tasks[-1].compute, tasks[-1].capture, full)
    with pytest.raises(NotRepeatable, match="out of memory"):
        capture_on_all(ranks.executor, [*tasks[:-1], last])
    with pytest.raises(NotRepeatable, match="another machine's"):
        capture_on_all(ranks.executor, tasks, agreed=lambda why: why or "another machine's is full")
    before = states(ranks)
    replays, _ = capture_on_all(ranks.executor, tasks)
    replays.replay()
    assert states(ranks) != before


def test_ranks_without_graphs_compute_anew() -> None:
    """Ranks with graphs are started on their own threads, in parallel."""
    ranks = Ranks(2)
    idle = Recomputed(lambda: None, is_idle=True)
    tasks = [ranks.capture_task(0), ranks.capture_task(1)]
    again = Recomputed(tasks[1].compute)
    for part, is_whole in ((idle, True), (again, False)):
        found: Any = part
        task = tasks[1] if part is again else CaptureTask(lambda: None, lambda: None, lambda: None)
        task = CaptureTask(task.begin, task.compute, lambda found=found: found, task.states)
        replays, _ = capture_on_all(ranks.executor, [tasks[0], task])
        assert replays.is_whole == is_whole
    before = states(ranks)
    replays.replay()
    assert states(ranks) == [x + 1 for x in before]
    ranks.executor.close()


def test_no_garbage_is_collected_between_the_starts() -> None:
    executor = RankExecutor([CPU] * 3, ThreadGroup())
    assert gc.isenabled()
    assert executor.call_inline(lambda rank: gc.isenabled()) == [False] * 3
    assert gc.isenabled()
    assert executor.call_inline(lambda rank: torch.is_inference_mode_enabled()) == [True] * 3
    gc.disable()
    try:
        executor.call_inline(lambda rank: rank)
        assert not gc.isenabled(), "the window collects by itself"
    finally:
        gc.enable()
    executor.close()


def test_where_a_rank_is_lost_all_is_closed() -> None:
    closed: list[int] = []

    class FakeRank:
        """A rank that notes whether it was closed."""

        def __init__(self, number: int) -> None:
            self.number = number
            self.recordings = {1: object()}
            self.draft_recordings = {1: object()}

        def close(self) -> None:
            closed.append(self.number)

    executor = RankExecutor([CPU] * 3, ThreadGroup())
    passes = ModelRunner(executor, 10, CacheSize(10, n_batch=4), [NO_WINDOW], can_rewind=True)
    fakes: list[Any] = [FakeRank(number) for number in range(3)]
    passes.ranks += fakes
    passes.recover()
    assert [fake.recordings for fake in fakes] == [{}] * 3
    assert [fake.draft_recordings for fake in fakes] == [{}] * 3
    assert len(passes.ranks) == 3
    with pytest.raises(CommError, match="rank 1"):
        executor.check(1, -1e9)
    executor.group.settle()
    with pytest.raises(threading.BrokenBarrierError):
        executor.group.barrier((0, 1)).exchange(
            0, None
        )  # kernels that wait end as well, see `abort`
    passes.recover()
    assert closed == [0, 2], "what a lost one uses stays as it is"
    assert not passes.ranks
    executor.close()


def test_all_devices_are_asked_while_one_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows a query makes a device start, and another device may wait for it."""
    monkeypatch.setattr("engine.backends.executor.STALL_S", 0.2)
    executor = RankExecutor([CPU] * 2, ThreadGroup())
    begun: set[int] = set()

    def is_idle(self: RankExecutor, rank: int) -> bool:
        begun.add(rank)
        return len(begun) == 2

    monkeypatch.setattr(RankExecutor, "is_idle", is_idle)
    executor.wait()
    assert not executor.lost
    executor.close()


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_work_for_a_gpu_touches_no_other(n_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving a stream makes the previous device torch's current one, and opens it if necessary:
    so the rank's device has to be current around that.
    """
    asked: list[str] = []

    class Current(threading.local):
        index = 0

    current = Current()

    @contextmanager
    def device(goal: torch.device) -> Iterator[None]:
        before, current.index = current.index, goal.index
        yield
        current.index = before

    @contextmanager
    def stream(goal: SimpleNamespace) -> Iterator[None]:
        assert current.index == goal.device.index, "this would touch another GPU in the end"
        yield
        asked.append("left")

    def make(device: torch.device, priority: int) -> SimpleNamespace:
        return SimpleNamespace(device=device, query=lambda: True, synchronize=lambda: None)

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "Stream", make)
    executor = RankExecutor([torch.device("cuda:1")] * n_ranks, ThreadGroup())
    assert executor.call_inline(lambda rank: current.index) == [1] * n_ranks
    assert executor.run(lambda rank: current.index) == [1] * n_ranks
    assert current.index == 0
    assert len(asked) == (0 if n_ranks == 1 else 4)
    executor.close()


class Warming(ModelRunner):
    """Passes that only report whether they compute with one-shot all-reduces."""

    def __init__(self, one_shots: Any, fails: Callable[[int], bool]) -> None:
        super().__init__(
            RankExecutor([CPU] * 2, ThreadGroup()),
            10,
            CacheSize(8, n_batch=4),
            [NO_WINDOW],
            can_rewind=True,
        )
        self.meeting.control, self._fails = one_shots, fails
        self.asked: list[tuple[int, bool]] = []
        rank: Any = SimpleNamespace(
            backend=SimpleNamespace(
                records=False, captures=True, compiles=True, prepare=lambda: None
            ),
            micro_batches=None, is_idle=False, elsewhere=NO_RANKS,
        )  # fmt: skip
        self.ranks += [rank]

    def compute(self, ids: Sequence[int], batch: Batch) -> Any:
        self.asked.append((len(ids), self.one_shots is not None))
        if self._fails(len(ids)):
            raise CommError(1, "did not answer the other devices in time")


class Capturing(ModelRunner):
    """Passes of ranks that compute tokens one by one, as they cannot capture."""

    def __init__(self, one_shots: Any) -> None:
        super().__init__(
            RankExecutor([CPU], ThreadGroup()),
            10,
            CacheSize(8, n_batch=4),
            [NO_WINDOW],
            can_rewind=True,
        )
        self.meeting.control = one_shots
        rank: Any = SimpleNamespace(
            backend=SimpleNamespace(records=False, captures=True, compiles=False, samples=True),
            micro_batches=None, recordings={}, is_idle=False, refusal="", device=CPU,
            elsewhere=NO_RANKS,
            capture_task=lambda ids, batch: (ids, batch),
            compute=lambda ids, batch, *, in_micro_batches: torch.zeros(1, 10),
        )  # fmt: skip
        self.ranks += [rank]


@pytest.mark.parametrize(
    ("error", "keeps_one_shots"),
    [(NotRepeatable("no kernel can read this cache"), True), (Unproven("something else"), False)],
)
def test_kernels_meet_no_more_only_if_that_may_be_the_reason(
    monkeypatch: pytest.MonkeyPatch, error: NotRepeatable, keeps_one_shots: bool
) -> None:
    """Without one-shot all-reduces, tokens that are not captured are far slower."""
    tried: list[object] = []

    def fail(executor: RankExecutor, tasks: object, one_shots: object, **_: object) -> None:
        tried.append(one_shots)
        raise error

    monkeypatch.setattr("engine.backends.gpu.decode.rank_capture.capture_on_all", fail)
    one_shots = SimpleNamespace(retire=lambda why: None, problem=lambda: None)
    passes = Capturing(one_shots)
    assert passes.compute([3], Batch.of_one(0, 1, 0)).shape == (1, 10)
    assert passes.ranks[0].refusal == str(error)
    assert (passes.one_shots is one_shots) == keeps_one_shots
    assert tried == ([one_shots] if keeps_one_shots else [one_shots, one_shots, None])
    passes.executor.close()


def test_a_capture_is_tried_again_before_kernels_meet_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[object] = []
    replay = SimpleNamespace(result=torch.zeros(1, 10), is_whole=True)

    def fail_once(executor: RankExecutor, tasks: object, one_shots: object, **_: object) -> object:
        tried.append(one_shots)
        if len(tried) == 1:
            raise Unproven("something else")
        return SimpleNamespace(parts=[replay]), [replay.result]

    monkeypatch.setattr("engine.backends.gpu.decode.rank_capture.capture_on_all", fail_once)
    monkeypatch.setattr(ModelRunner, "sample_on_device", lambda self, token, piece: None)
    one_shots = SimpleNamespace(retire=None, problem=lambda: None)
    passes = Capturing(one_shots)
    passes.compute([3], Batch.of_one(0, 1, 0))
    assert tried == [one_shots] * 2
    assert passes.one_shots is one_shots
    assert passes.ranks[0].refusal == ""
    passes.executor.close()


def test_passes_are_rehearsed_while_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So everything is allocated and loaded before kernels wait for other ranks."""
    monkeypatch.setattr(RankExecutor, "has_gpus", True)
    told: list[str] = []
    one_shots = FakeOneShots(told)
    passes = Warming(one_shots, lambda n: told.append(f"compute {n}") is not None)
    monkeypatch.setattr(
        passes, "_computed", lambda ids, *rest: told.append(f"try {len(ids)}") or torch.zeros(1)
    )
    passes.warm_up()
    passes.executor.close()
    rehearsed = [
        step for n in (1, 2, 4)
        for step in ("nobody waits", f"try {n}", "all wait", f"compute {n}")
    ]  # fmt: skip
    assert told == ["compute 1", *rehearsed]


def test_a_load_computes_few_tokens_and_one_large_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    one_shots: Any = SimpleNamespace(without_waiting=nullcontext, problem=lambda: None)
    passes, tried = Warming(one_shots, lambda n: False), list[int]()
    passes.n_ctx, passes.n_batch = 4096, 2048
    passes.warm_up()
    passes.executor.close()
    few = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert [n for n, _ in passes.asked] == [1, *few, 2048]
    monkeypatch.setattr(RankExecutor, "has_gpus", True)
    passes = Warming(one_shots, lambda n: False)
    passes.n_ctx, passes.n_batch = 4096, 2048
    monkeypatch.setattr(
        passes, "_computed", lambda ids, *rest: tried.append(len(ids)) or torch.zeros(1)
    )
    passes.warm_up()
    assert tried == [*few, 2048]
    assert [n for n, _ in passes.asked] == [1, *few], "the large batch was computed while trying"
    passes.executor.close()


def test_a_model_is_loaded_without_kernels_that_wait_in_vain() -> None:
    """Kernels time out where a device allocates, or loads a kernel, only after another ends."""
    whys: list[str] = []
    one_shots = SimpleNamespace(retire=whys.append)
    passes = Warming(one_shots, lambda n: n == 2 and passes.one_shots is not None)
    passes.warm_up()
    assert passes.asked == [
        (1, True), (1, True), (2, True),
        (1, True), (1, True), (2, True),
        (1, False), (1, False), (2, False), (4, False),
    ]  # fmt: skip
    assert len(whys) == 1
    assert "did not answer" in whys[0]
    failing = Warming(None, lambda n: n == 2)
    with pytest.raises(CommError, match="did not answer"):
        failing.warm_up()
    losing = Warming(one_shots, lambda n: n == 2)
    losing.executor._stalled.add(1)
    with pytest.raises(CommError, match="did not answer"):
        losing.warm_up()
    assert losing.one_shots is one_shots
    for some in (passes, failing, losing):
        some.executor.close()
