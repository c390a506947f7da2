"""Micro-batches: a batch in two halves that take turns gives the whole one's numbers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engine import Model, load_model
from engine.backends.gpu.comm.one_shot import OneShot
from engine.parallel.batch_overlap import BatchOverlap
from engine.runtime.micro_batches import ORDER, MicroBatches, micro_batches_pay
from tests.helpers.golden import nmse
from tests.helpers.hf_models import FAMILIES
from tests.helpers.passes import forward_alone
from tests.helpers.tiny_gguf import least_gguf

IDS = [5, 9, 33, 12, 7, 40, 2]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ranks meet as on GPUs, and never use one-shot all-reduces."""
    monkeypatch.setenv("TANDEM_BACKEND", "interpreter")
    monkeypatch.setattr("engine.runtime.micro_batches.MIN_MICRO_ROWS", 2)
    monkeypatch.setattr(OneShot, "serves", lambda one_shot, n: False)
    monkeypatch.setattr(
        "engine.runtime.model_runner.captures_tokens", lambda: False
    )  # capturing them takes long


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[BatchOverlap]:
    """Return the log of the times a rank switched to its other micro-batch."""
    seen: list[BatchOverlap] = []
    switch = BatchOverlap.switch

    def noted(self: BatchOverlap) -> None:
        seen.append(self)
        switch(self)

    monkeypatch.setattr(BatchOverlap, "switch", noted)
    return seen


def in_micro_batches(model: Model, *, wanted: bool) -> None:
    model.runtime.runner.batches.in_micro_batches = wanted


def batches(model: Model) -> np.ndarray:
    """Return the logits of a first batch, and of one that attends to it."""
    return np.stack(
        [
            forward_alone(model.runtime.runner, IDS[:4], 0, 3),
            forward_alone(model.runtime.runner, IDS[4:], 4, 2),
        ]
    )


@pytest.mark.parametrize(
    ("split_mode", "n_layer"), [("tensor", 1), pytest.param("layer", 2, marks=pytest.mark.slow)]
)
def test_halves_give_what_a_whole_batch_gives(
    tmp_path: Path, turns: list[BatchOverlap], split_mode: str, n_layer: int
) -> None:
    path = least_gguf(tmp_path / "m.gguf", quant="F32", n_layer=n_layer)
    with load_model(path, ["cpu"] * 2, n_ctx=16, split_mode=split_mode) as model:
        expected = batches(model)
        assert not turns
        in_micro_batches(model, wanted=True)
        found = batches(model)
        n_sum = 1 + 2 * n_layer  # the embedding, and two in each block
        assert len(turns) == (2 * 2 * 2 * n_sum if split_mode == "tensor" else 0)
        assert nmse(found, expected) < 1e-9
        in_micro_batches(model, wanted=False)
        assert np.array_equal(batches(model), expected), "nothing stays of it"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3next", "gpt-oss", "mamba2"])
def test_states_and_experts_see_the_first_half_first(name: str, tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    ids, _ = family.build(tmp_path / "m.gguf")
    with load_model(tmp_path / "m.gguf", ["cpu"] * 2, n_ctx=16) as model:
        expected = forward_alone(model.runtime.runner, ids[:5], 0, 4)
        in_micro_batches(model, wanted=True)
        assert nmse(forward_alone(model.runtime.runner, ids[:5], 0, 4), expected) < 1e-6


def test_logits_of_the_first_half_are_computed_whole_and_a_failure_in_it_is_forgotten(
    tmp_path: Path, turns: list[BatchOverlap], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = least_gguf(tmp_path / "m.gguf", quant="F32")
    with load_model(path, ["cpu"] * 2, n_ctx=16) as model:
        expected = batches(model)
        in_micro_batches(model, wanted=True)
        assert forward_alone(model.runtime.runner, IDS, 0).shape[0] == len(IDS)
        assert not turns
        with monkeypatch.context() as patch:
            patch.setattr(BatchOverlap, "switch", lambda turns: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                batches(model)
        assert nmse(batches(model), expected) < 1e-9
        assert turns


@pytest.mark.parametrize(("whole_s", "halves_s", "pays"), [(10, 9, True), (10, 9.9, False)])
def test_what_takes_less_time_is_kept(
    monkeypatch: pytest.MonkeyPatch, whole_s: float, halves_s: float, pays: bool
) -> None:
    clock, done = [0.0], list[bool]()

    def compute(in_micro_batches: bool) -> None:
        done.append(in_micro_batches)
        clock[0] += halves_s if in_micro_batches else whole_s

    monkeypatch.setattr("engine.runtime.micro_batches.time.perf_counter", lambda: clock[0])
    assert micro_batches_pay(compute) == pays
    assert tuple(done) == ORDER


@pytest.mark.slow
def test_it_is_tried_at_load_where_kernels_were_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Callable[[bool], object]] = []

    def pay(compute: Callable[[bool], object]) -> bool:
        tried.append(compute)
        compute(True)
        return True

    monkeypatch.setattr("engine.runtime.micro_batches.micro_batches_pay", pay)
    monkeypatch.setattr("engine.backends.gpu.backend.GpuBackend.compiles", True)
    monkeypatch.setattr("engine.runtime.loader.RankBuilder._compiled", _nothing)
    path = least_gguf(tmp_path / "m.gguf", quant="F32")
    with load_model(path, ["cpu"] * 2, n_ctx=4) as model:
        assert len(tried) == 1
        assert model.runtime.runner.batches.in_micro_batches
        assert all(isinstance(rank.micro_batches, MicroBatches) for rank in model.runtime.ranks)
    with load_model(path, n_ctx=4) as model:
        assert len(tried) == 1, "a single rank waits for no other"


class _nothing:  # noqa: N801 a context manager is a verb
    def __init__(self, *args: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...
