"""Batches of a prompt whose logits nobody reads: no head, no waiting, failures that come late."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine import (
    CommError,
    EngineError,
    Finished,
    Model,
    PrefillProgress,
    SamplingParams,
    load_model,
)
from engine.backends import executor as executor_module
from engine.backends.cpu.thread_comm import ThreadGroup
from engine.backends.executor import RankExecutor, WorkMark
from engine.generation.scheduler import Scheduler
from engine.model.architectures.base import CausalLM
from engine.model.forward.context import Context
from engine.runtime.rank import Rank
from tests.helpers.passes import forward_alone
from tests.helpers.reading import read
from tests.helpers.tiny_gguf import tiny_gguf
from tests.helpers.token_streams import answer, ids_of, request
from tests.helpers.toy_runtime import ToyRuntime

PROMPT = list(range(5, 45))
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("model") / "m.gguf", n_ctx=64)


@pytest.fixture
def model(path: Path) -> Iterator[Model]:
    with load_model(path, n_ctx=64, n_batch=8, kv_type="f32") as loaded:
        yield loaded


class FakeDevice:
    """A device that is slower than its host: a batch ends when it is waited for.

    Attributes:
        events: events of all batches so far, True once they are over.
        error: what a query raises.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[bool] = []
        self.error: Exception | None = None
        monkeypatch.setattr(RankExecutor, "mark", lambda executor: self.mark())
        wait_for = RankExecutor.wait_for

        def ended(executor: RankExecutor, mark: WorkMark) -> None:
            event: Any = mark.events[0]
            self.events[event.number] = True
            wait_for(executor, mark)

        monkeypatch.setattr(RankExecutor, "wait_for", ended)

    def mark(self) -> WorkMark:
        number = len(self.events)
        self.events.append(False)
        event: Any = SimpleNamespace(number=number, query=lambda: self._is_over(number))
        return WorkMark({0: event})

    def _is_over(self, number: int) -> bool:
        if self.error is not None:
            raise self.error
        return self.events[number]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, model: Model) -> FakeDevice:
    return FakeDevice(monkeypatch)


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_without_logits_the_cache_gets_the_same(path: Path, n_ranks: int) -> None:
    with load_model(path, ["cpu"] * n_ranks, n_ctx=64, kv_type="f32") as model:
        runner = model.runtime.runner
        forward_alone(runner, PROMPT[:20], 0, 19)
        expected = forward_alone(runner, PROMPT[20:], 20)
        found = forward_alone(runner, PROMPT[:20], 0, 20)
        assert found.shape == (0, model.info.n_vocab)
        assert np.array_equal(forward_alone(runner, PROMPT[20:], 20), expected)


def test_only_the_last_token_of_a_prompt_meets_the_head(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    head = CausalLM.head

    def counted(self: CausalLM, x: torch.Tensor, ctx: Context) -> torch.Tensor:
        rows.append(len(x))
        return head(self, x, ctx)

    monkeypatch.setattr(CausalLM, "head", counted)
    list(model.generate(PROMPT, ONE))
    assert rows == [1]


def test_hosts_are_at_most_two_batches_ahead(model: Model, device: FakeDevice) -> None:
    runner = model.runtime.runner
    for n, expected in enumerate([[False], [False] * 2, [True, False, False]]):
        forward_alone(runner, PROMPT[8 * n : 8 * n + 8], 8 * n, 8)
        assert device.events == expected
    assert runner.n_running == 16
    forward_alone(runner, PROMPT[24:], 24, 15)
    assert all(device.events)
    assert runner.n_running == 0


def test_a_token_by_itself_is_started_behind_no_batch(
    model: Model, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token has seconds; batches of a prompt before it may take longer."""
    runner = model.runtime.runner
    done: list[bool] = []
    for name in ("record", "replay"):
        compute = getattr(Rank, name)

        def noted(rank: Rank, token: int, n_past: int, compute: Any = compute) -> Any:
            done.append(all(device.events))
            return compute(rank, token, n_past)

        monkeypatch.setattr(Rank, name, noted)
    runner.drop_recordings()
    for n_past in (0, 9, 18):
        forward_alone(runner, PROMPT[:8], n_past, 8)
        forward_alone(runner, [5], n_past + 8)
    assert done == [True, True]


def test_progress_leaves_out_what_devices_still_compute(model: Model, device: FakeDevice) -> None:
    events = list(model.generate(PROMPT, ONE))
    done = [event.done for event in events if isinstance(event, PrefillProgress)]
    assert done == [0, 0, 8, 16, 40]


def test_cancel_starts_no_further_batch_and_the_next_call_waits(
    model: Model, device: FakeDevice
) -> None:
    seen = list(model.generate(PROMPT, ONE, is_cancelled=lambda: len(device.events) == 3))
    last = seen[-1]
    assert isinstance(last, Finished)
    assert last.reason == "cancelled"
    assert device.events == [True, False, False]
    assert model.n_cached == 24
    assert all(device.events), "whoever asks for the cache may use it at once"


@pytest.mark.parametrize("when", ["next batch", "last batch", "after a cancel"])
def test_a_late_failure_empties_the_cache(model: Model, device: FakeDevice, when: str) -> None:
    expected = model.logits(PROMPT)[-1].argmax()
    model.logits([1])  # forgets the others
    device.events.clear()
    n_batches = {"next batch": 2, "last batch": 4, "after a cancel": 3}[when]

    def ask() -> None:
        wanted = 3 if when == "after a cancel" else -1
        events = model.generate(PROMPT, ONE, is_cancelled=lambda: len(device.events) == wanted)
        for _ in events:
            if len(device.events) == n_batches:
                device.error = CommError(0, "did not answer")
        assert model.n_cached

    with pytest.raises(CommError, match="did not answer"):
        ask()
    device.error = None
    assert model.n_cached == 0
    assert model.runtime.runner.n_running == 0
    answer = list(model.generate(PROMPT, ONE))
    assert model.n_cached == len(PROMPT)
    assert any(getattr(event, "ids", ()) == (expected,) for event in answer)


def test_a_late_failure_drops_the_saved_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was copied from a state that the failed batch had made."""
    toy = ToyRuntime(n_ctx=40, is_recurrent=True)
    scheduler, asked = Scheduler(toy), request(toy, ONE, prompt=PROMPT[:17])
    scheduler.submit(asked)
    states = scheduler.cache.checkpoints
    while not len(states):
        scheduler.step()
    assert states.lengths(PROMPT) == [16]

    def fail() -> None:
        raise EngineError("a device failed")

    monkeypatch.setattr(toy, "finish", fail)
    with pytest.raises(EngineError, match="a device failed"):
        scheduler.settle()
    monkeypatch.undo()
    assert not len(states)
    toy.reset()
    found = read(scheduler, asked)
    assert toy.n_computed.item() == 17
    assert ids_of(found) == ids_of(answer(toy, ONE, prompt=PROMPT[:17])) != []


class FakeCuda:
    """Events and streams of a fake GPU.

    Attributes:
        log: what was done, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.is_over = False

        @contextmanager
        def current(goal: object) -> Iterator[None]:
            yield

        monkeypatch.setattr(torch.cuda, "device", current)
        monkeypatch.setattr(torch.cuda, "stream", current)
        monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: self.stream())
        monkeypatch.setattr(torch.cuda, "Event", self.event)

    def stream(self) -> SimpleNamespace:
        return SimpleNamespace(query=lambda: True, synchronize=lambda: self.log.append("waited"))

    def event(self) -> SimpleNamespace:
        return SimpleNamespace(
            record=lambda: self.log.append("recorded"), query=lambda: self.is_over
        )


def test_marks_are_events_of_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    devices = [torch.device("cuda:0"), torch.device("cpu"), torch.device("cuda:0")]
    executor = RankExecutor(devices, ThreadGroup())
    mark = executor.mark()
    assert cuda.log == ["recorded"] * 2
    assert mark.late == [0, 2]
    threading.Timer(0.05, lambda: setattr(cuda, "is_over", True)).start()
    executor.wait_for(mark)
    assert not mark.late
    cuda.is_over = False
    monkeypatch.setattr(executor_module, "BATCH_STALL_S", 0.05)
    with pytest.raises(CommError, match="a prompt batch"):
        executor.wait_for(mark)
    executor.close()


def test_ranks_on_one_gpu_are_awaited_only_for_results(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    executor = RankExecutor([torch.device("cuda:0")] * 2, ThreadGroup())
    executor.run(lambda rank: rank, is_awaited=False)
    assert cuda.log == []
    executor.run(lambda rank: rank)
    assert cuda.log == ["waited"] * 2
    executor.close()


def test_ids_are_copied_without_waiting(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch waits for all work before a copy, unless told not to and given pinned memory."""
    copied: list[tuple[bool, bool]] = []
    pinned: list[int] = []
    to = torch.Tensor.to

    def noted(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if self.dtype == torch.int64:
            copied.append((bool(options.get("non_blocking")), id(self) in pinned))
        return to(self, *args, **options)

    def pin(self: torch.Tensor) -> torch.Tensor:
        pinned.append(id(self))
        return self

    monkeypatch.setattr(RankExecutor, "has_gpus", True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", noted)
    forward_alone(model.runtime.runner, PROMPT[:8], 0, 8)
    assert copied == [(True, True)]
