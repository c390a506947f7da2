"""Devices that hang, fail or compute wrong numbers are named within seconds; others go on."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from engine import (
    AnswerRequest,
    CommError,
    EngineError,
    Failed,
    Finished,
    Load,
    LoadParams,
    Model,
    ModelLoaded,
    SamplingParams,
    load_model,
)
from engine.backends.cpu.thread_comm import ThreadCommunicator
from tests.helpers.desk import ASK, SHORT, Desk
from tests.helpers.faults import Fault, flipped, quicken
from tests.helpers.passes import forward_alone
from tests.helpers.tiers import slow
from tests.helpers.tiny_gguf import tiny_gguf

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
PROMPT = [5, 6, 7]
LIMIT_S = 5.0


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model file of which each of five ranks gets a part of every tensor."""
    return tiny_gguf(
        tmp_path_factory.mktemp("faults") / "m.gguf", quant="Q8_0", n_embd=160, n_head=5,
        n_head_kv=5, n_ff=160, n_ctx=128,
    )  # fmt: skip


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


@pytest.fixture
def wake() -> Iterator[threading.Event]:
    """Yield an event that is set at the end, so that hanging ranks return."""
    event = threading.Event()
    yield event
    event.set()
    for thread in threading.enumerate():
        if thread.name.startswith("tandem-rank"):
            thread.join(10)
            assert not thread.is_alive(), "a rank that comes back ends"


def answer(model: Model) -> list[int]:
    return [i for event in model.generate(PROMPT, GREEDY) for i in getattr(event, "ids", ())]


def singly(model: Model, n: int = 6) -> list[np.ndarray]:
    """Return the logits after tokens computed one by one, the last ones by replays."""
    return [forward_alone(model.runtime.runner, [5 + i], i)[0] for i in range(n)]


def go(model: Model, *, repeated: bool) -> None:
    """Compute a prompt or single tokens, in which the fault occurs."""
    if repeated:
        assert all(rank.recordings for rank in model.runtime.ranks), "or it would not be repeated"
        singly(model, 2)
    else:
        model.logits(PROMPT)


def hanging(wake: threading.Event) -> Callable[[Tensor], Tensor]:
    """Return a `strike` for `Fault` that hangs until `wake` is set."""

    def strike(total: Tensor) -> Tensor:
        wake.wait()
        return total

    return strike


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("repeated", [False, True], ids=["computed", "repeated"])
@pytest.mark.parametrize(("n", "rank"), [(2, 1), (5, 3), *slow((2, 0), (3, 2))])
def test_a_rank_that_hangs_is_named_and_a_new_load_works(
    path: Path, wake: threading.Event, monkeypatch: pytest.MonkeyPatch, n: int, rank: int, *,
    repeated: bool,
) -> None:  # fmt: skip
    with load_model(path, ["cpu"] * n) as model:
        expected = answer(model)
        singly(model)
        fault, begun = Fault(monkeypatch, rank, hanging(wake)), time.perf_counter()
        with pytest.raises(CommError, match=rf"cpu \(rank {rank}\) has shown no sign") as found:
            go(model, repeated=repeated)
        assert time.perf_counter() - begun < 2
        assert (found.value.rank, found.value.device, fault.n_struck) == (rank, "cpu", 1)
        assert not model.is_loaded
        with pytest.raises(EngineError, match="unloaded") as unloaded:
            model.logits(PROMPT)
        assert unloaded.value.hint == "Load it again."
        with pytest.raises(EngineError, match="unloaded"):
            model.resplit([2, 1])
    with load_model(path, ["cpu"] * n) as model:
        assert answer(model) == expected


def test_five_seconds_are_enough(
    path: Path, wake: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits are the real ones here, not shortened for the test."""
    with load_model(path, ["cpu"] * 3) as model:
        singly(model)
        Fault(monkeypatch, 1, hanging(wake))
        begun = time.perf_counter()
        with pytest.raises(CommError, match=r"cpu \(rank 1\)"):
            go(model, repeated=True)
        assert time.perf_counter() - begun < LIMIT_S


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("repeated", [False, True], ids=["computed", "repeated"])
def test_a_rank_that_computes_for_long_is_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, repeated: bool
) -> None:
    def strike(total: Tensor) -> Tensor:
        end = time.perf_counter() + 1.2
        while time.perf_counter() < end:
            pass
        return total

    with load_model(path, ["cpu"] * 3) as model:
        singly(model)
        expected = answer(model)
        fault = Fault(monkeypatch, 1, strike)
        go(model, repeated=repeated)
        assert fault.n_struck == 1
        assert answer(model) == expected


@pytest.mark.parametrize("repeated", [False, True], ids=["computed", "repeated"])
def test_a_rank_that_fails_is_a_failure_and_the_model_goes_on(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, repeated: bool
) -> None:
    def strike(total: Tensor) -> Tensor:
        raise ZeroDivisionError("on one rank")

    with load_model(path, ["cpu"] * 3) as model:
        singly(model)
        expected = answer(model)
        Fault(monkeypatch, 1, strike)
        with pytest.raises(ZeroDivisionError, match="on one rank"):
            go(model, repeated=repeated)
        assert answer(model) == expected


@pytest.mark.parametrize("repeated", [False, True], ids=["computed", "repeated"])
@pytest.mark.parametrize(("n", "rank"), [(2, 1), (5, 3), *slow((3, 0), (3, 2))])
def test_a_bit_that_is_wrong_on_one_rank_is_seen(
    path: Path, monkeypatch: pytest.MonkeyPatch, n: int, rank: int, *, repeated: bool
) -> None:
    with load_model(path, ["cpu"] * n) as model:
        singly(model)
        expected = answer(model)
        fault, begun = Fault(monkeypatch, rank, flipped), time.perf_counter()
        with pytest.raises(CommError, match="for the same input") as found:
            go(model, repeated=repeated)
        assert time.perf_counter() - begun < LIMIT_S
        assert fault.n_struck == 1
        assert f"cpu (rank {rank})" in str(found.value)
        assert found.value.rank == rank
        assert answer(model) == expected, "the fault was one of a moment"
        model.resplit([1, 2], devices=["cpu"] * 2)
        assert answer(model) == expected


def test_a_group_whose_head_is_on_one_rank_has_nothing_to_compare(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load_model(path, ["cpu"] * 3, split_mode="groups", groups=[2, 1]) as model:
        Fault(monkeypatch, 1, lambda total: total)
        assert len(answer(model)) == 5


@pytest.mark.parametrize("n", [2, 3, 5])
def test_sums_of_another_shape_name_their_rank(
    path: Path, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    with load_model(path, ["cpu"] * n) as model:
        expected, original = answer(model), ThreadCommunicator._sum
        with monkeypatch.context() as context:
            context.setattr(
                ThreadCommunicator,
                "_sum",
                lambda comm, x, group: original(comm, x[:, :-1] if comm.rank else x, group),
            )
            with pytest.raises(CommError, match="has provided values") as found:
                model.logits(PROMPT)
        assert found.value.device == "cpu"
        assert answer(model) == expected


@pytest.mark.usefixtures("hasty")
def test_a_session_behind_a_queue_says_that_the_model_is_gone(
    path: Path, wake: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, params = Desk(), LoadParams(str(path), ("cpu", "cpu"))
    assert isinstance(desk.run(Load(params)), ModelLoaded)
    with monkeypatch.context() as context:
        Fault(context, 1, hanging(wake))
        failed = desk.run(AnswerRequest(ASK, sampling=SHORT))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, CommError)
    assert failed.is_model_lost
    again = desk.run(AnswerRequest(ASK, sampling=SHORT))
    assert isinstance(again, Failed)
    assert "No model is loaded" in str(again.error)
    assert isinstance(desk.run(Load(params)), ModelLoaded)
    assert isinstance(desk.run(AnswerRequest(ASK, sampling=SHORT)), Finished)
    begun = time.perf_counter()
    assert desk.host.close(), "nobody waits for the rank that hangs"
    assert time.perf_counter() - begun < 2


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("repeated", [False, True], ids=["computed", "repeated"])
def test_what_a_lost_rank_holds_is_freed_when_it_comes_back(
    path: Path, wake: threading.Event, monkeypatch: pytest.MonkeyPatch, *, repeated: bool
) -> None:
    model = load_model(path, ["cpu"] * 3)
    singly(model)
    held = [weakref.ref(rank) for rank in model.runtime.ranks]
    with monkeypatch.context() as context:
        Fault(context, 1, hanging(wake))
        with pytest.raises(CommError) as found:
            go(model, repeated=repeated)
        found.value.__traceback__ = None
        assert [rank() is None for rank in held] == [True, False, True]
        thread = next(t for t in threading.enumerate() if t.name == "tandem-rank-1")
        wake.set()
        thread.join(10)
    assert held[1]() is None
