"""Times of kernels per token, from a profiler's records, and the host's time."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine import BenchTest
from engine.decoding.sampling.sampler import Sampler
from engine.generation.benchmark import Benchmark
from engine.model.forward.batch import Batch, Piece
from engine.runtime.measuring import kernel_times
from engine.runtime.measuring.kernel_times import Span, gpu_times, host_s, short_name, summed
from engine.runtime.timeline import GpuTimes, KernelTime

GEMM = "void cutlass::Kernel<cutlass_80_tensorop>(Params)"


def test_times_are_added_up_per_token() -> None:
    spans = [
        Span("cuda:0", "products", 0, 10), Span("cuda:0", "products", 20, 35),
        Span("cuda:0", GEMM, 5, 25), Span("cuda:1", "norm", 3, 4),
    ]  # fmt: skip
    found = summed(spans, 2)
    assert found is not None
    assert found.busy_s == {"cuda:0": pytest.approx(35e-6 / 2), "cuda:1": pytest.approx(1e-6 / 2)}
    assert found.kernels == (
        KernelTime("cuda:0", "products", 1, pytest.approx(25e-6 / 2)),
        KernelTime("cuda:0", "Kernel", 0.5, pytest.approx(20e-6 / 2)),
        KernelTime("cuda:1", "norm", 0.5, pytest.approx(1e-6 / 2)),
    )
    assert summed([], 2) is None


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (GEMM, "Kernel"),
        ("void at::native::(anonymous namespace)::fill<float>(int)", "fill"),
        ("Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH"),
        ("sm90_xmma_gemm_bf16", "sm90_xmma_gemm_bf16"),
    ],
)
def test_names_are_short(name: str, short: str) -> None:
    assert short_name(name) == short


def test_only_what_ran_on_devices_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def event(kind: str, name: str, begin: float) -> SimpleNamespace:
        span = SimpleNamespace(start=begin, end=begin + 2)
        device_type = SimpleNamespace(name=kind)
        return SimpleNamespace(device_type=device_type, device_index=0, name=name, time_range=span)

    class Profile:
        def __init__(self, activities: list[object]) -> None:
            assert activities == [torch.profiler.ProfilerActivity.CUDA]

        def __enter__(self) -> "Profile":
            return self

        def __exit__(self, *_: object) -> None:
            computed.append("end")

        def events(self) -> list[SimpleNamespace]:
            return [event("CPU", "cudaGraphLaunch", 0), event("CUDA", "norm", 1)]

    computed: list[str] = []
    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: computed.append("waited"))
    found = gpu_times(lambda: computed.append("tokens"), 4)
    assert computed == ["tokens", "waited", "end"]
    assert found == GpuTimes((KernelTime("cuda:0", "norm", 0.25, 0.5e-6),), {"cuda:0": 0.5e-6})


class FakeRuntime:
    """Runtime of ranks on GPUs whose tokens are replayed."""

    def __init__(self, *, is_whole: bool = True, has_gpus: bool = True) -> None:
        self.starts: list[tuple[int, int]] = []
        self.n_waited = 0
        executor = SimpleNamespace(has_gpus=has_gpus, wait=self._wait)
        self.runner = SimpleNamespace(
            is_captured_whole=is_whole, executor=executor, start=self._start
        )
        self.devices = [torch.device("cuda:0")]
        self.ranks: list[object] = []
        self.hp = SimpleNamespace(n_vocab=100)
        self.token_source: SimpleNamespace | None = None

    def _start(self, ids: list[int], batch: Batch) -> None:
        self.starts.append((ids[0], batch.pieces[0].n_past))

    def _wait(self) -> None:
        self.n_waited += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the clock by one that is a second later each time it is read."""
    now = iter(range(1000))
    monkeypatch.setattr(kernel_times, "perf_counter", lambda: float(next(now)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)


def test_the_host_starts_tokens_without_waiting(clock: None) -> None:
    """Waiting comes between the tokens, and does not count."""
    runtime: Any = FakeRuntime()
    assert host_s(runtime, Piece(7, 1)) == 1
    assert set(runtime.starts) == {(0, 7)}
    assert len(runtime.starts) == runtime.n_waited == kernel_times.N_STARTED
    for other in (FakeRuntime(is_whole=False), FakeRuntime(has_gpus=False)):
        no_graph: Any = other
        assert host_s(no_graph, Piece(7, 1)) is None
        assert not other.starts


def test_a_benchmark_on_a_gpu_has_both(clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime: Any = FakeRuntime()
    runtime.kernel_s = lambda: None
    sequence: Any = SimpleNamespace(
        n_ctx=64, ids=[], hold=lambda ids: None, scratch=lambda: nullcontext(Piece(0, 1)),
        compute=lambda ids, first: [torch.zeros(1, 100).numpy()],
    )  # fmt: skip
    monkeypatch.setattr("engine.generation.benchmark.timed", lambda runtime, position, compute: (
        compute(), SimpleNamespace(ranks=())
    ))  # fmt: skip
    tokens: list[int] = []

    def times(compute: Any, n_tokens: int) -> GpuTimes:
        compute()
        tokens.append(n_tokens)
        return GpuTimes((), {"cuda:0": 1e-3})

    monkeypatch.setattr(kernel_times, "gpu_times", times)
    bench = Benchmark(sequence, runtime)
    result = bench.run(BenchTest(0, 20), 1, warm_up=False, has_kernels=True)
    assert tokens == [8], "not more than are needed"
    assert result.gpu == GpuTimes((), {"cuda:0": 1e-3})
    assert result.host_s == 1
    assert bench.run(BenchTest(0, 3), 1, warm_up=False).gpu is None


def test_a_device_that_samples_does_so_for_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are sampled as for an answer; the host works all the time that it does not wait."""
    now = 0.0
    asked: list[tuple[int, int]] = []

    def follow(token: int, sampler: Sampler, never: object, n_left: int) -> Any:
        nonlocal now
        asked.append((token, n_left))
        now += 1.0
        runtime.token_source.waited_s += 0.75
        return np.eye(100, dtype=np.float32)[9] if n_left == 2 else 20 + n_left

    runtime: Any = FakeRuntime()
    runtime.kernel_s = lambda: None
    runtime.token_source = SimpleNamespace(waited_s=5.0)
    sequence: Any = SimpleNamespace(n_ctx=64, ids=[], hold=lambda ids: None, follow=follow)
    monkeypatch.setattr(
        "engine.generation.benchmark.time", SimpleNamespace(perf_counter=lambda: now)
    )
    monkeypatch.setattr("engine.generation.benchmark.timed", lambda runtime, position, compute: (
        compute(), SimpleNamespace(ranks=())
    ))  # fmt: skip
    result = Benchmark(sequence, runtime).run(BenchTest(0, 4), 1, warm_up=False)
    assert [n_left for _, n_left in asked] == [4, 3, 2, 1]
    assert [token for token, _ in asked][1:] == [24, 23, 9], "the host samples where it has to"
    assert result.samples_s == (4.0,)
    assert result.host_s == 0.25
