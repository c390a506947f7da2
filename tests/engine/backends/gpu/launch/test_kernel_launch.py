"""Launches: Triton is asked once for equal ones; devices, hooks, Triton's launcher."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from engine.backends.gpu.launch import kernel_launch as kernel_launch
from engine.backends.gpu.launch.kernel_launch import KernelLaunch, intercept_launches, launch


class FakeKernel:
    """A Triton kernel with parameters a, SIZE, n and f, which counts requests for its code.

    Attributes:
        asked: arguments of each request for compiled code.
        started: what Triton's launcher got for each start.
    """

    __name__ = "fake"

    def __init__(self) -> None:
        self.fn = object()
        self.params = [
            SimpleNamespace(is_constexpr=name == "SIZE") for name in ["a", "SIZE", "n", "f"]
        ]
        self.asked: list[tuple[Any, ...]] = []
        self.started: list[tuple[Any, ...]] = []

    def warmup(self, *args: Any, grid: Sequence[int], **options: Any) -> SimpleNamespace:
        self.asked.append(args)
        return SimpleNamespace(
            run=lambda *all_: self.started.append(all_), function=7, packed_metadata="packed"
        )


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Pretend that all tensors are on GPU 1; return the devices made current, in order."""
    entered = [1]

    def exchange(device: int) -> int:
        entered.append(device)
        return entered[-2]

    for name in ("_exchange_device", "_maybe_exchange_device"):
        monkeypatch.setattr(torch.cuda, name, exchange)
    monkeypatch.setattr(Tensor, "get_device", lambda tensor: 1)
    monkeypatch.setattr(kernel_launch, "current_device", lambda: entered[-1])
    monkeypatch.setattr(kernel_launch, "current_stream", lambda device: 4711 + device)
    monkeypatch.setattr(kernel_launch, "prepare", lambda: "triton")
    with patch.dict(kernel_launch._known, clear=True):
        yield entered


X = torch.zeros(64)

DIFFERENT: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((X, 5, 1.0), {"SIZE": 16}),
    ((X.half(), 5, 1.0), {"SIZE": 16}),
    ((X[1:], 5, 1.0), {"SIZE": 16}),
    ((X, 6, 1.0), {"SIZE": 16}),
    ((X, 1, 1.0), {"SIZE": 16}),
    ((X, True, 1.0), {"SIZE": 16}),
    ((X, 1.0, 1.0), {"SIZE": 16}),
    ((X, 1, 1), {"SIZE": 16}),
    ((X, 5, X), {"SIZE": 16}),
    ((X, 5, X[1:]), {"SIZE": 16}),
    ((X[1:], 5, X), {"SIZE": 16}),
    ((X, 5, 1.0), {"SIZE": 32}),
    ((X, 5, 1.0), {"SIZE": "16"}),
    ((X, 5, 1.0), {"OTHER": 16}),
    ((X, 5, 1.0), {"SIZE": 16, "num_warps": 8}),
    ((X, 5, 1.0), {"SIZE": 16, "num_stages": 3}),
]
"""Launches for which Triton may have compiled different variants."""


def test_what_may_be_another_variant_is_asked_for(devices: list[int]) -> None:
    kernel = FakeKernel()
    for _ in range(2):
        for args, options in DIFFERENT:
            launch(kernel, (1,), *args, **options)
    assert len(kernel.asked) == len(DIFFERENT)
    assert len(kernel.started) == 2 * len(DIFFERENT)
    launch(FakeKernel(), (1,), X, 5, 1.0, SIZE=16)
    assert len(kernel_launch._known) == len(DIFFERENT) + 1


def test_what_is_alike_is_asked_for_once(devices: list[int]) -> None:
    kernel = FakeKernel()
    for x, grid, f in ((X, (3,), 1.0), (X[4:], (1, 2), 7.5), (torch.ones(3), (1,), -0.0)):
        launch(kernel, grid, x, 5, f, SIZE=16)
    launch(kernel, (0,), X, 6, 1.0, SIZE=16)
    assert len(kernel.asked) == 1
    about = (4712, 7, "packed", None, None, None)
    assert kernel.started[1] == (1, 2, 1, *about, X[4:].data_ptr(), None, 5, 7.5)
    assert [start[:3] for start in kernel.started] == [(3, 1, 1), (1, 2, 1), (1, 1, 1)]


def test_the_tensors_device_is_current_for_a_launch(devices: list[int]) -> None:
    kernel = FakeKernel()
    launch(kernel, (1,), X, 5, 1.0, SIZE=16)
    del devices[1:]
    launch(kernel, (1,), X, 5, 1.0, SIZE=16)
    assert devices == [1], "it was current before"
    devices.append(0)
    launch(kernel, (1,), X, 5, 1.0, SIZE=16)
    assert devices[1:] == [0, 1, 0], "and is left as it was"


def test_amds_short_offsets_are_not_used_for_large_memory(
    devices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, large = FakeKernel(), torch.empty(1 << 32, dtype=torch.uint8, device="meta")
    small = large.new_empty(16)
    for hip, n_asked in ((None, 1), ("6.4", 3)):
        monkeypatch.setattr(torch.version, "hip", hip)
        for x in (small, large):
            launch(kernel, (1,), x, 5, 1.0, SIZE=16)
        assert len(kernel.asked) == n_asked


def test_not_everything_is_remembered_for_ever(
    devices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_launch, "MAX_KNOWN", 3)
    for n in range(10):
        launch(FakeKernel(), (1,), X, n, 1.0, SIZE=16)
        assert len(kernel_launch._known) <= 3


def test_hooks_decide(devices: list[int]) -> None:
    kernel, seen = FakeKernel(), list[KernelLaunch]()
    with intercept_launches(lambda start: seen.append(start) is not None):
        launch(kernel, (2,), X, 5, 1.0, SIZE=16, num_warps=8)
    assert kernel.started == []
    assert (seen[0].grid, seen[0].args[1:], seen[0].num_warps) == ((2,), (5, 1.0), 8)
    with intercept_launches(lambda start: True):
        launch(kernel, (2,), X, 5, 1.0, SIZE=16)
    assert len(kernel.started) == 1


def test_without_memory_nothing_is_launched() -> None:
    kernel = FakeKernel()
    launch(kernel, (2,), X.to("meta"), 5, 1.0, SIZE=16)
    assert kernel.asked == kernel.started == []
