"""Results of `Model.bench` with a clock that only forward passes move."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine import BenchResult, BenchTest, Cancelled, EngineError, Model, load_model
from engine.model.forward.batch import Batch
from engine.runtime.model_runner import ModelRunner
from engine.runtime.thread_runtime import ThreadRuntime
from tests.helpers.answers import ask
from tests.helpers.hf_models import FAMILIES
from tests.helpers.tiny_gguf import tiny_gguf

OUTSIDE_S = 0.25


class Trace:
    """Record of a model's forward passes, on a fake clock that only these move.

    Each pass takes a second per token and `OUTSIDE_S` more. The last rank spends those seconds in
    kernels, the others none.

    Attributes:
        passes: passes so far, (n_past, n_tokens) each.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[tuple[int, int]] = []
        self.ids: list[int] = []
        self.logits: list[np.ndarray] = []
        self.now = self.kernel_s = 0.0
        original = ModelRunner.forward

        def forward(runtime: ModelRunner, ids: Sequence[int], batch: Batch) -> Any:
            logits = original(runtime, ids, batch)
            self.passes.append((batch.pieces[0].n_past, len(ids)))
            self.ids += ids
            self.logits.append(logits)
            self.kernel_s += len(ids)
            self.now += len(ids) + OUTSIDE_S
            return logits

        monkeypatch.setattr(ModelRunner, "forward", forward)
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(
            ThreadRuntime,
            "kernel_s",
            lambda runtime: [0.0] * (len(runtime.devices) - 1) + [self.kernel_s],
        )
        monkeypatch.setattr("engine.generation.benchmark.time", clock)


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Trace:
    return Trace(monkeypatch)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("bench") / "m.gguf")


def load(path: Path, n_ranks: int = 1) -> Model:
    return load_model(path, ["cpu"] * n_ranks, n_ctx=64, n_batch=8, kv_type="f32")


def test_a_prompt_is_computed_in_batches(path: Path, trace: Trace) -> None:
    with load(path) as model:
        result = model.bench(BenchTest(20), 2, warm_up=False)
    assert trace.passes == [(0, 8), (8, 8), (16, 4)] * 2
    assert result.samples_s == (20 + 3 * OUTSIDE_S,) * 2
    assert result.samples_ts == (20 / 20.75,) * 2
    assert trace.ids[:20] == trace.ids[20:]
    assert len(set(trace.ids)) > 10
    assert result.overhead_s is result.overhead is None


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_tokens_are_computed_one_by_one_from_the_logits_before(
    path: Path, trace: Trace, n_ranks: int
) -> None:
    with load(path, n_ranks) as model:
        result = model.bench(BenchTest(0, 6), 1, warm_up=False)
        n_vocab = model.info.n_vocab
    assert trace.passes == [(n, 1) for n in range(6)]
    assert result.samples_s == (6 * (1 + OUTSIDE_S),)
    assert result.overhead_s == OUTSIDE_S
    assert result.overhead == OUTSIDE_S / (1 + OUTSIDE_S)
    random = np.random.default_rng(0).integers(0, n_vocab, 6)
    best = [int(row[0].argmax()) for row in trace.logits]
    assert trace.ids[1:] == [(b + r) % n_vocab for b, r in zip(best, random[:5], strict=False)]


def test_what_is_cached_before_is_not_measured_and_kept(path: Path, trace: Trace) -> None:
    with load(path) as model:
        result = model.bench(BenchTest(4, 3, 10), 3, warm_up=False)
    fill, measured = [(0, 8), (8, 2)], [(10, 4), (14, 1), (15, 1), (16, 1)]
    assert trace.passes == fill + 3 * measured
    assert result.samples_s == (7 + 4 * OUTSIDE_S,) * 3


def test_a_warm_up_generates_little_and_does_not_count(path: Path, trace: Trace) -> None:
    with load(path) as model:
        result = model.bench(BenchTest(0, 30), 1)
    assert len(trace.passes) == 4 + 30
    assert len(result.samples_s) == 1


def test_a_state_that_cannot_be_cut_is_brought_back_before_the_clock_starts(
    tmp_path: Path, trace: Trace
) -> None:
    path = tmp_path / "mamba.gguf"
    next(family for family in FAMILIES if family.name == "mamba").build(path)
    with load(path) as model:
        tokens = model.bench(BenchTest(0, 3, 10), 2, warm_up=False)
        fill, measured = [(0, 8), (8, 1), (9, 1)], [(10, 1), (11, 1), (12, 1)]
        assert trace.passes == fill + 2 * measured
        prompts = model.bench(BenchTest(5, 0, 10), 2, warm_up=False)
        single = model.bench(BenchTest(1), 1, warm_up=False)
    assert tokens.samples_s == (3 * (1 + OUTSIDE_S),) * 2
    assert prompts.samples_s == (5 + 2 * OUTSIDE_S,) * 2  # the last token apart, as in an answer
    assert single.samples_s == (1 + OUTSIDE_S,)


def test_answers_are_the_same_after_a_benchmark(path: Path) -> None:
    with load_model(path, ["cpu", "cpu"], n_ctx=64) as model:
        before, _ = ask(model, [5, 6, 7])
        model.bench(BenchTest(5, 5, 5), 1)
        assert ask(model, [5, 6, 7]) == (before, 0)


def test_on_several_ranks_real_time_passes(path: Path) -> None:
    with load_model(path, ["cpu", "cpu"], [3, 1], cpu_threads=2) as model:
        result = model.bench(BenchTest(0, 8), 3)
        assert model.n_threads == 2
    assert len(result.samples_s) == 3
    assert result.overhead_s is not None
    assert 0 < result.overhead_s < max(result.samples_s) / 8


def test_what_kernels_take_is_no_overhead(tmp_path: Path) -> None:
    path = tiny_gguf(
        tmp_path / "large.gguf", n_embd=1024, n_ff=4096, n_head=8, n_head_kv=8, quant="Q8_0"
    )
    with load_model(path, cpu_threads=1) as model:
        result = model.bench(BenchTest(0, 8), 3)
    assert result.overhead is not None
    assert 0.01 < result.overhead < 0.8


@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"]])
def test_what_ranks_spend_is_a_part_of_the_time(path: Path, devices: list[str]) -> None:
    with load_model(path, devices) as model:
        result = model.bench(BenchTest(n_gen=6), 3)
        both = model.bench(BenchTest(n_prompt=4, n_gen=6), 1)
    assert both.ranks == ()
    assert len(result.ranks) == len(devices)
    for rank in result.ranks:
        assert rank.computed_s > 0
        assert 0 < rank.computed_s + rank.waited_s <= result.token_s
    if len(devices) == 1:
        assert result.ranks[0].waited_s == 0
    else:
        assert max(rank.waited_s for rank in result.ranks) > 0


@pytest.mark.parametrize("test", [BenchTest(n_gen=20), BenchTest(n_prompt=20)])
def test_it_can_be_cancelled_between_passes(path: Path, trace: Trace, test: BenchTest) -> None:
    with load_model(path, n_batch=1) as model:
        with pytest.raises(Cancelled):
            model.bench(test, is_cancelled=lambda: len(trace.passes) == 9)
        assert len(trace.passes) == 9
        assert model.bench(BenchTest(n_gen=2), 1).avg_ts > 0, "and used again"


@pytest.mark.usefixtures("reference")
def test_without_kernels_python_cannot_be_told_from_arithmetic(path: Path) -> None:
    with load(path) as model:
        result = model.bench(BenchTest(0, 4), 1)
    assert result.samples_s
    assert result.overhead_s is result.overhead is None


def test_mean_and_deviation_are_those_of_the_rates() -> None:
    result = BenchResult(BenchTest(60, 40), (1.0, 2.0, 4.0))
    assert result.samples_ts == (100, 50, 25)
    assert result.avg_ts == pytest.approx(175 / 3)
    assert result.stddev_ts == pytest.approx(np.std([100, 50, 25], ddof=1))
    assert BenchResult(BenchTest(1), (2.0,)).stddev_ts == 0


@pytest.mark.parametrize(
    ("test", "name"),
    [
        (BenchTest(512), "pp512"),
        (BenchTest(0, 128), "tg128"),
        (BenchTest(512, 128), "pp512+tg128"),
        (BenchTest(512, 0, 64), "pp512 @ d64"),
    ],
)
def test_names_are_those_of_llama_bench(test: BenchTest, name: str) -> None:
    assert str(test) == name


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [((0, 0, 5), "needs tokens"), ((1, -1), "negative"), ((-1,), "negative")],
)
def test_nothing_to_measure_is_an_error(numbers: tuple[int, ...], problem: str) -> None:
    with pytest.raises(EngineError, match=problem):
        BenchTest(*numbers)


def test_what_the_context_cannot_hold_is_an_error(path: Path) -> None:
    with load(path) as model:
        with pytest.raises(EngineError, match="pp60 @ d5 needs a context of 65 tokens"):
            model.bench(BenchTest(60, 0, 5))
        with pytest.raises(EngineError, match="at least one repetition"):
            model.bench(BenchTest(6), 0)
