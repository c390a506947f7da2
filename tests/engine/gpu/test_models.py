"""Whole models by the kernels for GPUs, which Triton interprets: loaded, split, asked, repeated."""

from pathlib import Path

import numpy as np
import pytest

from engine import EngineError, Model, SamplingParams, TokenText, backend, load_model
from engine.gpu.card import Card
from tests.helpers.golden import nmse
from tests.helpers.hf_models import FAMILIES
from tests.helpers.tiny_gguf import tiny_gguf

BAR = 1e-3
"""NMSE beside exact logits: activations are rounded to bytes, keys and values to F16."""

IDS = [5, 9, 33, 12]
QUICK = ("gpt-oss", "qwen3next", "mamba2")
"""Families that have what others lack: experts and sinks, linear attention, a scan."""


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_BACKEND", "interpreter")


def singly(model: Model, ids: list[int]) -> np.ndarray:
    return np.stack([model.runtime.forward([t], n, 0)[0] for n, t in enumerate(ids)])


def never_repeated(model: Model) -> None:
    model.runtime.passes.forget()
    model.runtime.passes.n_single = 1000


def answer(model: Model, **settings: object) -> list[int]:
    params = SamplingParams(max_tokens=4, ignore_eos=True, **settings)
    events = model.generate(IDS, params)
    return [token for event in events if isinstance(event, TokenText) for token in event.ids]


def test_tokens_are_captured_once_and_drawn_on_the_device(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", quant="Q8_0", n_layer=1)
    random = {"temperature": 0.8, "top_k": 20, "seed": 3}
    with load_model(path, n_ctx=32) as model:
        assert model.runtime.stream is not None
        drawn = [answer(model, temperature=0), answer(model, **random)]
        model.runtime.stream = None
        assert [answer(model, temperature=0), answer(model, **random)] == drawn
        repeated = singly(model, IDS)
        assert all(rank.recording for rank in model.runtime.ranks)
        never_repeated(model)
        assert np.array_equal(singly(model, IDS), repeated)
        assert np.array_equal(model.logits(IDS), repeated)


def test_a_split_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", quant="Q8_0", n_layer=1)
    with load_model(path, ["cpu"] * 2, [2, 1], n_ctx=32) as model:
        found = model.logits(IDS)
        for memory in model.memory():
            assert memory.measured.weights == memory.predicted.weights
            assert memory.measured.kv == memory.predicted.kv
    monkeypatch.setenv("TANDEM_BACKEND", "reference")
    with load_model(path, n_ctx=32) as model:
        assert nmse(found, model.logits(IDS)) < BAR


def check(name: str, folder: Path) -> None:
    """A family's random model beside transformers, all at once and singly."""
    family = next(family for family in FAMILIES if family.name == name)
    path = folder / "m.gguf"
    ids, expected = family.build(path)
    ids = ids[: len(IDS)]
    with load_model(path, n_ctx=32) as model:
        assert nmse(model.logits(ids), expected[: len(ids)]) < BAR
        found = singly(model, ids)
        assert all(rank.recording for rank in model.runtime.ranks)
        assert nmse(found, expected[: len(ids)]) < BAR


@pytest.mark.parametrize("name", QUICK)
def test_families(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [f.name for f in FAMILIES if f.name not in QUICK])
def test_all_families(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.parametrize(
    "split", [[1, 1], pytest.param([2, 0, 1], marks=pytest.mark.slow)], ids=str
)
def test_after_another_split_the_devices_draw_again(split: list[int], tmp_path: Path) -> None:
    """Several ranks draw the tokens that one draws, each of them the same."""
    path = tiny_gguf(tmp_path / "m.gguf", quant="Q8_0", n_layer=1)
    random = {"temperature": 0.8, "top_k": 20, "seed": 3}
    with load_model(path, n_ctx=32) as model:
        expected = [answer(model, temperature=0), answer(model, **random)]
        model.resplit(split, devices=["cpu"] * len(split))
        assert answer(model, temperature=0) == expected[0]
        assert model.runtime.stream is not None
        assert [answer(model, temperature=0), answer(model, **random)] == expected
        repeated = singly(model, IDS)
        assert all(rank.recording for rank in model.runtime.ranks)
        never_repeated(model)
        assert np.array_equal(singly(model, IDS), repeated)
        model.resplit([1], devices=["cpu"])
        assert answer(model, temperature=0) == expected[0]
        assert model.runtime.stream is not None
        assert answer(model, **random) == expected[1]


def test_a_kernel_that_cannot_be_compiled_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise EngineError("The kernel products cannot be compiled for this GPU (ptxas died).")

    monkeypatch.setattr(backend, "_refused", {})
    monkeypatch.setattr(Card, "compiles", True)
    monkeypatch.setattr(Card, "compile_ahead", fail)
    path = tiny_gguf(tmp_path / "m.gguf", quant="Q8_0", n_layer=1)
    with load_model(path, n_ctx=32) as model:
        assert not any(rank.card for rank in model.runtime.ranks)
        assert model.logits(IDS).shape[0] == len(IDS)
    assert backend.refused_kernels() == {
        "cpu": "The kernel products cannot be compiled for this GPU (ptxas died)"
    }
