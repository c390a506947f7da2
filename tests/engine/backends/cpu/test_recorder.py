"""Replays of recordings with other data give the same results as computing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.cpu.kernels.running.thread_pool import ThreadPool
from engine.backends.cpu.kernels.small.small_ops import SmallOps
from engine.backends.cpu.recorder import Recorder, Recording
from engine.model.forward.recording import refuse_replay

TEAM = ThreadPool(1)
OPS = SmallOps(TEAM)
WEIGHT = torch.randn(8, 8)
STATE = torch.zeros(8)


def kernel(x: Tensor) -> Tensor:
    y = OPS.rms_norm(x, WEIGHT[0], None, 1e-5)
    assert y is not None
    return y


def into_a_view(x: Tensor) -> Tensor:
    y = x.new_zeros(3, 8)
    y[1:2] = x * 2
    return y.sum(0, keepdim=True)


def with_a_state(x: Tensor) -> Tensor:
    STATE.mul_(0.5).add_(x[0])
    return STATE.clone()[None]


def picked(x: Tensor) -> Tensor:
    best = x.topk(3).indices
    return x[0, best] + WEIGHT.index_select(0, best[0]).sum()


REPEATABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "torch": lambda x: torch.softmax(x @ WEIGHT, -1),
    "a kernel": kernel,
    "kernels between torch": lambda x: kernel(torch.sigmoid(kernel(x)) * x) + 1,
    "sums and products": lambda x: x * kernel(x) + x,
    "a sum with one of fewer dimensions": lambda x: x + WEIGHT[3],
    "a sum that is spread": lambda x: x + x.T,
    "a sum with a factor": lambda x: torch.add(x, x.square(), alpha=3),
    "views": lambda x: kernel(x.view(1, 2, 4).transpose(1, 2).reshape(1, 8)),
    "a copy that may be a view": lambda x: x.contiguous().float()[0] + x.T.contiguous().T,
    "several results": lambda x: torch.cat(torch.sort(x)[0].split([3, 5], 1)[::-1], 1),
    "writing into a view": into_a_view,
    "a state": with_a_state,
    "numbers that choose": picked,
    "a constant": lambda x: x + torch.tensor([1.0] * 8),
    "what came in": lambda x: x,
}  # fmt: skip


def recorded(compute: Callable[[Tensor], Any], x: Tensor) -> tuple[Recorder, Any]:
    recorder = Recorder(TEAM, ())

    def whole() -> Tensor | None:
        result = compute(x)
        return recorder.run_live(lambda: result)

    return recorder, recorder.record(whole)


def repeatable(recorder: Recorder) -> Recording:
    found = recorder.recording(0, ())
    assert found is not None, recorder.log.refusal
    return found


@pytest.mark.parametrize("name", REPEATABLE)
def test_replays_read_new_data(name: str) -> None:
    compute = REPEATABLE[name]
    x = torch.randn(1, 8)
    STATE.zero_()
    expected = [compute(x).clone()]
    later = [torch.randn(1, 8) for _ in range(3)]
    expected.extend(compute(other).clone() for other in later)
    STATE.zero_()
    recorder, first = recorded(compute, x)
    again = repeatable(recorder)
    found = [first]
    for other in later:
        x.copy_(other)
        found.append(again.run())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len({y.data_ptr() for y in found}) == len(found), "no result is overwritten"


def test_a_recording_keeps_its_memory() -> None:
    x = torch.randn(1, 4096)

    def compute(x: Tensor) -> Tensor:
        for _ in range(50):
            x = kernel_of_any_width(x)
        return x

    recorder, _ = recorded(compute, x)
    again = repeatable(recorder)
    del recorder
    garbage = [torch.full((1, 4096), 1e9) for _ in range(200)]
    found = again.run()
    assert found is not None
    assert torch.equal(found, compute(x))
    assert all((g == 1e9).all() for g in garbage)


def kernel_of_any_width(x: Tensor) -> Tensor:
    y = OPS.rms_norm(x, None, None, 1e-5)
    assert y is not None
    return y


def asked_kernel(x: Tensor) -> Tensor:
    refuse_replay("it depends")
    return x


UNREPEATABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "a number for Python": lambda x: x * x.sum().item(),
    "a truth value": lambda x: x if x.sum() > 0 else -x,
    "as many as there are": lambda x: x[x > 0],
    "as many as are not zero": lambda x: x.nonzero(),
    "chance": lambda x: x + torch.rand(8),
    "what says so": asked_kernel,
}


@pytest.mark.parametrize("name", UNREPEATABLE)
def test_data_dependent_operations_are_refused(name: str) -> None:
    recorder, _ = recorded(UNREPEATABLE[name], torch.randn(1, 8))
    assert recorder.recording(0, ()) is None
    assert recorder.log.refusal


def test_operations_after_the_last_step_are_refused() -> None:
    recorder = Recorder(TEAM, ())
    x = torch.randn(1, 8)
    recorder.record(lambda: recorder.run_live(lambda: x * 2).exp())  # type: ignore[union-attr]
    assert recorder.recording(0, ()) is None


def test_a_failure_ends_the_recording() -> None:
    recorder = Recorder(TEAM, ())
    with pytest.raises(ZeroDivisionError):
        recorder.record(lambda: torch.zeros(1 // 0))
    n = recorder.log.n_used
    kernel(torch.randn(1, 8))
    assert recorder.log.n_used == n
