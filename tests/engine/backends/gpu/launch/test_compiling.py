"""Background compilation of kernels: variants, progress, cancelling, failures."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.backends.gpu.kernels import elementwise as norm
from engine.backends.gpu.launch.kernel_launch import (
    Argument,
    Compiling,
    KernelLaunch,
    compile_launch,
    variant_key,
    variants,
)
from engine.errors import Cancelled, EngineError
from tests.engine.backends.gpu.offline import run_offline

CASES = "tests.engine.backends.gpu.offline_cases"
CPU = torch.device("cpu")


class FakeKernel:
    """A kernel like Triton's with two arguments; it is not specialised for the second."""

    __name__ = "fake"

    def __init__(self) -> None:
        self.params = [
            SimpleNamespace(is_constexpr=False, do_not_specialize=False),
            SimpleNamespace(is_constexpr=False, do_not_specialize=True),
            SimpleNamespace(is_constexpr=True, do_not_specialize=False),
        ]
        self.compiled: list[tuple[Argument, ...]] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.error: Exception | None = None

    def warmup(self, *args: Argument, grid: tuple[int, ...], **facts: object) -> str:
        self.go_on.wait()
        self.compiled.append(args)
        if self.error:
            raise self.error
        return "kernel"


def start(
    kernel: FakeKernel, a: Argument, b: Argument, size: int = 1, n_warps: int = 4
) -> KernelLaunch:
    return KernelLaunch(kernel, (1,), (a, b), {"SIZE": size}, n_warps, 2)


def test_what_is_the_same_variant() -> None:
    kernel, x = FakeKernel(), torch.empty(64, device="meta")
    same = [
        (start(kernel, x, 1), start(kernel, x[4:], 16)),
        (start(kernel, 2, 5), start(kernel, 3, 7)),
        (start(kernel, 16, x), start(kernel, 32, x[1:])),
        (start(kernel, 1.0, 5), start(kernel, 16.0, 5)),
        (start(kernel, 7, 1 << 40), start(kernel, 7, 1 << 41)),
    ]
    for a, b in same:
        assert variant_key(a) == variant_key(b)
    other = [
        start(kernel, 2, 5), start(kernel, 1, 5), start(kernel, 16, 5), start(kernel, 1 << 31, 5),
        start(kernel, 1 << 63, 5), start(kernel, 2.0, 5), start(kernel, True, 5),
        start(kernel, 2, 1 << 31), start(kernel, x, 5), start(kernel, x[1:], 5),
        start(kernel, x.half(), 5), start(kernel, 2, 5, size=2), start(kernel, 2, 5, n_warps=8),
    ]  # fmt: skip
    assert len({variant_key(s) for s in other}) == len(other)
    assert variants([*other, *other]) == other


def test_what_is_interpreted_is_not_compiled() -> None:
    assert variants([KernelLaunch(norm.norm, (1,), (), {}, 4, 2)]) == []


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the cases in a process where kernels are compiled; return their results."""
    cases = ("ahead", "broken", "whole_passes", "full_disk")  # the last one leaves the cache
    folder = tmp_path_factory.mktemp("cache")
    return dict(run_offline(CASES, *cases, TRITON_CACHE_DIR=str(folder)))


def test_variants_collected_without_memory_are_those_of_real_starts(found: dict[str, Any]) -> None:
    n_starts, n_variants, n_ahead, n_in_all = found["ahead"]
    assert n_starts == 36
    assert n_variants < n_starts
    assert n_ahead == n_variants
    assert n_in_all == n_ahead, "real starts compile nothing"


def test_a_kernel_that_is_wrong_is_a_sentence(found: dict[str, Any]) -> None:
    sentence, hint = found["broken"]
    assert sentence.startswith("The kernel wrong cannot be compiled for this GPU (")
    assert hint


def test_no_number_of_tokens_needs_a_kernel_that_loading_has_not_compiled(
    found: dict[str, Any],
) -> None:
    assert found["whole_passes"] == []


def test_work_can_be_cancelled() -> None:
    kernel = FakeKernel()
    kernel.go_on.clear()
    work = Compiling(CPU, [start(kernel, 2, 5, size=n) for n in range(9)], n_threads=1)
    asked = iter([False, True])
    with pytest.raises(Cancelled, match="Compiling kernels was cancelled"):
        work.wait(lambda: next(asked))
    kernel.go_on.set()
    with pytest.raises(Cancelled):
        work.wait()
    assert work.n_done <= 1
    assert work.n_total == 9


def test_the_first_failure_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    kernel = FakeKernel()
    kernel.error = RuntimeError("first line\nno registers left")
    work = Compiling(CPU, [start(kernel, 2, 5, size=n) for n in range(50)], n_threads=1)
    with pytest.raises(EngineError, match=r"fake cannot be compiled .*no registers left") as caught:
        work.wait()
    assert "TANDEM_BACKEND=reference" in caught.value.hint
    assert len(kernel.compiled) == 1
    kernel.error = OSError(5, "Input/output error")
    with pytest.raises(EngineError, match="Input/output error"):
        compile_launch(start(kernel, 2, 5), CPU)


def test_a_full_disk_is_no_failure(found: dict[str, Any]) -> None:
    has_left, stayed, n_kept = found["full_disk"]
    assert has_left
    assert stayed
    assert n_kept > 0
