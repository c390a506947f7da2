"""Captured computations: as one graph, or as several with host steps between them."""

import gc
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.gpu.launch import graph
from engine.backends.gpu.launch.graph import (
    CudaGraph,
    CudaGraphRecorder,
    NotRepeatable,
    capture,
    host_step,
    host_step_value,
    refuse_capture,
)
from engine.hardware.garbage import collect_garbage

CPU = torch.device("cpu")


class Device:
    """A device that runs work immediately, or captures it for later."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self._graph: list[Callable[[], object]] | None = None

    def do(self, name: str, work: Callable[[], object] = lambda: None) -> None:
        def step() -> None:
            self.done.append(name)
            work()

        if self._graph is None:
            step()
        else:
            self._graph.append(step)

    def open(self) -> None:
        self.done.append("open")

    def begin(self) -> None:
        assert self._graph is None
        self._graph = []

    def end(self) -> Callable[[], object]:
        steps, self._graph = self._graph, None
        assert steps is not None
        return lambda: [step() for step in steps]

    def close(self) -> None:
        self.done.append("close")


class Sums:
    """A computation with two host steps that compute sums, on memory that stays."""

    def __init__(self, device: Device) -> None:
        self.x, self.y = torch.zeros(1), torch.zeros(1)
        self.others = 100.0
        self._device = device

    def compute(self) -> Tensor:
        self._device.do("double", lambda: self.x.mul_(2))
        total = host_step_value(lambda: self.x + self.others)
        assert total is not None
        self._device.do("add", lambda: self.x.copy_(total + 1))
        host_step(lambda: self._device.done.append("met"))
        self._device.do("keep", lambda: self.y.copy_(self.x))
        return self.y


def test_a_whole_graph_is_not_computed_while_it_is_captured() -> None:
    device, x = Device(), torch.zeros(1)

    def compute() -> Tensor:
        device.do("add", lambda: x.add_(1))
        return x

    captured = CudaGraph(device, compute)
    assert captured.is_whole
    assert device.done == ["open", "close"]
    captured.replay()
    captured.replay()
    assert captured.result.item() == 2


def test_what_the_host_does_cuts_a_graph() -> None:
    device = Device()
    sums = Sums(device)
    sums.x.fill_(3)
    captured = CudaGraph(device, sums.compute)
    once = ["double", "add", "met", "keep"]
    assert device.done == ["open", *once, "close"], "each part when the next step needs it"
    assert not captured.is_whole
    assert captured.result.item() == 107
    for others in (10.0, 20.0):
        device.done.clear()
        sums.x.fill_(5)
        sums.others = others
        captured.replay()
        assert device.done == once
        assert captured.result.item() == 11 + others


def test_a_step_that_fails_leaves_nothing_captured() -> None:
    device = Device()

    def fail() -> Tensor:
        raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        CudaGraph(device, lambda: host_step_value(fail))
    assert device.done == ["open", "close"]
    assert getattr(graph._thread, "record_step", None) is None


@pytest.mark.parametrize("place", ["compute", "begin", "end", "open"])
def test_what_a_device_refuses_is_not_repeatable(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()

    def fail() -> Any:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    if place != "compute":
        monkeypatch.setattr(device, place, fail)
    with pytest.raises(NotRepeatable, match=r"not permitted$"):
        CudaGraph(device, fail if place == "compute" else lambda: None)
    refuse_capture("nothing is being captured")


def test_a_tape_repeats_what_is_done_between() -> None:
    x, met = torch.ones(3), []
    y = torch.zeros(3)

    def meet() -> Tensor:
        met.append(x.tolist())
        return x.sum(0, keepdim=True) * len(met)

    def compute() -> Tensor:
        x.mul_(2)
        total = host_step_value(meet)
        assert total is not None
        assert host_step_value(lambda: None) is None
        y.copy_(x + total)
        return y

    captured = capture(CPU, compute)
    assert not captured.is_whole
    assert captured.result.tolist() == [8, 8, 8]
    x.fill_(3)
    captured.replay()
    assert met == [[2, 2, 2], [6, 6, 6]]
    assert captured.result.tolist() == [42, 42, 42]


def test_what_a_step_does_is_not_captured_itself() -> None:
    """Its operations would be replayed twice, and it may read numbers back."""
    x = torch.zeros(1)

    def step() -> None:
        host_step(lambda: None)
        refuse_capture("a step is not part of the capture")
        x.add_(1 + int(x.item()))

    captured = capture(CPU, lambda: host_step(step))
    assert x.item() == 1
    captured.replay()
    assert x.item() == 3


def test_without_a_capture_steps_are_just_done() -> None:
    done: list[int] = []
    host_step(lambda: done.append(1))
    x = torch.ones(2)
    assert host_step_value(lambda: x) is x
    assert done == [1]
    assert capture(CPU, lambda: x.add_(1)).is_whole


class FakeCuda:
    """A fake of the part of `torch.cuda` that captures graphs; it records the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.fails_at = ""
        self.current = self.stream("main")

        def stream(device: torch.device, priority: int) -> SimpleNamespace:
            assert priority < 0, "copies have the others: torch gives each stream several times"
            return self.stream("side")

        def set_stream(stream: SimpleNamespace) -> None:
            self.current = stream

        def device(device: torch.device) -> AbstractContextManager[None]:
            return nullcontext()

        for name, what in {
            "Stream": stream, "set_stream": set_stream, "device": device,
            "current_stream": lambda device: self.current, "graph_pool_handle": lambda: (0, 7),
            "CUDAGraph": lambda: self,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, what)
        for name in ("endAllocateToPool", "releasePool"):
            ended = partial(self.end_in_pool, name)
            monkeypatch.setattr(torch._C, f"_cuda_{name}", ended, raising=False)
        self.is_in_pool = False

    def end_in_pool(self, what: str, device: int, pool: object) -> None:
        if what == "endAllocateToPool" and not self.is_in_pool:
            raise RuntimeError("not currently recording")
        self.is_in_pool = False
        self.asked.append((what, device, pool))

    def stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name, wait_stream=lambda other: self.ask(f"{name} waits for {other.name}")
        )

    def ask(self, *what: object) -> None:
        self.asked.append(what)
        if what[0] == self.fails_at:
            raise RuntimeError("CUDA error: illegal")

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert graph._capturing.locked(), "PyTorch captures one graph at a time"
        assert self.current.name == "side"
        assert not self.is_in_pool, "the allocator was switched twice"
        self.is_in_pool = True
        self.ask("begin", pool, capture_error_mode)

    def capture_end(self) -> None:
        self.ask("end")
        self.is_in_pool = False

    def replay(self) -> None:
        assert not graph._capturing.locked(), "others may capture during a step"
        self.ask("replay")


def test_no_garbage_is_collected_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeing another graph, or memory, would make the capture fail."""
    FakeCuda(monkeypatch)
    seen: list[bool] = []

    def compute() -> None:
        seen.extend([gc.isenabled(), collect_garbage()])

    capture(torch.device("cuda:1"), compute)
    assert seen == [False, False]
    assert gc.isenabled()


def test_parts_share_a_stream_and_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    captured = CudaGraph(CudaGraphRecorder(torch.device("cuda:1")), lambda: host_step(lambda: None))
    begin = "begin", (0, 7), "thread_local"
    part = [begin, ("end",), ("replay",)]
    first = ("side waits for main",)
    assert cuda.asked == [first, *part, *part, ("main waits for side",)]
    assert cuda.current.name == "main"
    cuda.asked.clear()
    captured.replay()
    assert cuda.asked == [("replay",)] * 2


@pytest.mark.parametrize("place", ["side waits for main", "begin", "end", "main waits for side"])
def test_a_capture_that_fails_lets_others_capture(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch)
    cuda.fails_at = place
    with pytest.raises(NotRepeatable, match="illegal"):
        CudaGraph(CudaGraphRecorder(torch.device("cuda:0")), lambda: None)
    assert not graph._capturing.locked()
    assert cuda.current.name == "main"


@pytest.mark.parametrize("place", ["begin", "end"])
def test_the_allocator_knows_that_a_capture_has_failed(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it frees no cached memory when the device is full; torch does not end the mode."""
    cuda = FakeCuda(monkeypatch)
    cuda.fails_at = place
    with pytest.raises(NotRepeatable, match="illegal"):
        CudaGraph(CudaGraphRecorder(torch.device("cuda:1")), lambda: None)
    assert not cuda.is_in_pool
    assert cuda.asked[-3:-1] == [("endAllocateToPool", 1, (0, 7)), ("releasePool", 1, (0, 7))]
    cuda.asked.clear()
    cuda.fails_at = ""
    CudaGraph(CudaGraphRecorder(torch.device("cuda:1")), lambda: None)
    assert not {"endAllocateToPool", "releasePool"} & {what for what, *_ in cuda.asked}


def test_one_rank_captures_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it, but not during host steps between graphs."""
    FakeCuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(FakeCuda, "capture_begin", lambda self, pool, capture_error_mode: None)
    monkeypatch.setattr(FakeCuda, "capture_end", lambda self: None)
    monkeypatch.setattr(FakeCuda, "replay", lambda self: None)
    busy, most = 0, 0
    met = threading.Barrier(3)

    def compute() -> None:
        for _ in range(4):
            nonlocal busy, most
            busy += 1
            most = max(most, busy)
            time.sleep(0.002)
            busy -= 1
            host_step(lambda: met.wait(10) and None)

    threads = [
        threading.Thread(target=lambda: CudaGraph(CudaGraphRecorder(CPU), compute))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert most == 1
    assert not any(thread.is_alive() for thread in threads)
