"""Copies between GPU and CPU: they pass one pinned buffer, which is never written too early."""

import pytest
import torch
from torch import Tensor

from engine.parallel.transfers import MIN_BYTES, DeviceCopier, copy_over

CPU = torch.device("cpu")
GPU = torch.device("cuda:0")


class Copies:
    """Fake GPU copies that happen only when somebody waits for them, as late as possible."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Tensor, Tensor]] = []

    def __call__(self, goal: Tensor, source: Tensor) -> "Copies":
        self.waiting.append((goal, source))
        return self

    def synchronize(self) -> None:
        for goal, source in self.waiting:
            goal.copy_(source)
        self.waiting.clear()


@pytest.fixture(autouse=True)
def unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.hardware.host_memory._pin", lambda held, device: False)


def test_values_of_a_gpu_are_whole_and_stay() -> None:
    copier = DeviceCopier(CPU, Copies())
    values = [torch.randn(3, 5), torch.randn(40), torch.arange(7)]
    found = [copier.through_pinned(value, GPU) for value in values]
    assert all(torch.equal(a, b) for a, b in zip(found, values, strict=True))


def test_a_buffer_is_not_written_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies()
    copier = DeviceCopier(torch.device("meta"), copies)
    goals: list[Tensor] = []
    empty = torch.empty

    def on_the_cpu(*shape: object, **options: object) -> Tensor:
        goals.append(empty(*shape, dtype=options["dtype"]))
        return goals[-1]

    values = [torch.randn(1000), torch.randn(1000)]
    monkeypatch.setattr(torch, "empty", on_the_cpu)
    for value in values:
        copier.through_pinned(value, GPU)
    copies.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(goals, values, strict=True))


def test_a_longer_value_gets_a_longer_buffer() -> None:
    copier = DeviceCopier(CPU, Copies())
    value = torch.randn(MIN_BYTES)
    assert torch.equal(copier.through_pinned(value[:10], GPU), value[:10])
    assert torch.equal(copier.through_pinned(value, GPU), value)


class OnGpu(Tensor):
    """A CPU tensor that claims to be on a GPU; no direct copy to another device is allowed."""

    is_cuda = True

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:1")

    def to(self, *_: object, **__: object) -> Tensor:  # type: ignore[override]
        raise AssertionError("copied straight to another GPU")


def test_values_of_one_gpu_come_to_another_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies()
    value, goal = torch.randn(300), torch.empty(300)
    steps: list[tuple[bool, bool]] = []

    def copied(to: Tensor, source: Tensor) -> Copies:
        steps.append((source.is_cuda, to is goal))
        return copies(to, source.as_subclass(Tensor))

    copier = DeviceCopier(GPU, copied)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: goal)
    assert copier.to_device(value.as_subclass(OnGpu)) is goal
    copies.synchronize()
    assert steps == [(True, False), (False, True)]
    assert torch.equal(goal, value)


def test_what_is_copied_over_passes_the_host_between_gpus_only() -> None:
    calls = []

    class Held(OnGpu):
        def cpu(self) -> Tensor:  # type: ignore[override]
            calls.append("cpu")
            return self.as_subclass(Tensor)

    value, goal = torch.randn(8), torch.zeros(8)
    copy_over(goal, value)
    assert torch.equal(goal, value)
    assert not calls

    class Goal(OnGpu):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return GPU

        def copy_(self, source: Tensor) -> Tensor:  # type: ignore[override]
            assert not source.is_cuda
            return self.as_subclass(Tensor).copy_(source)

    goal.zero_()
    copy_over(goal.as_subclass(Goal), value.as_subclass(Held))
    assert calls == ["cpu"]
    assert torch.equal(goal, value)


def test_what_is_there_is_not_copied() -> None:
    value = torch.randn(4)
    assert DeviceCopier(CPU).to_device(value) is value


@pytest.mark.gpu
def test_there_and_back_on_a_gpu() -> None:
    value = torch.randn(1 << 16)
    up, down = DeviceCopier(GPU), DeviceCopier(CPU)
    for n in (1, 100, 1 << 16):
        assert torch.equal(down.to_device(up.to_device(value[:n])), value[:n])
