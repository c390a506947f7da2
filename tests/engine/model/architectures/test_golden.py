"""Logits against llama.cpp's, for every reference model, on every kind of split."""

from collections.abc import Iterator
from typing import Any

import pytest

from engine.model.architectures.registry import is_supported
from tests.helpers.golden import CASES, TOLERANCE, Case, golden_error, golden_models, golden_path


def test_the_reference_set_is_complete() -> None:
    golden_path("MANIFEST.json")
    architectures = golden_models().values()
    assert len(architectures) >= 113
    assert [name for name in architectures if not is_supported(name)] == []


def pairs() -> Iterator[Any]:
    """Yield each model with each case; half of the cases with several ranks are slow, by turns."""
    for i, name in enumerate(golden_models()):
        for j, case in enumerate(CASES):
            marks = () if j == 0 or (i + j) % 2 else pytest.mark.slow
            yield pytest.param(name, case, marks=marks, id=f"{name}-{case}")


@pytest.mark.parametrize(("name", "case"), list(pairs()))
def test_logits_equal_llama_cpp(name: str, case: Case) -> None:
    assert golden_error(name, case) <= TOLERANCE


@pytest.mark.parametrize("mode", ["tensor", "layer"])
@pytest.mark.parametrize("name", ["llama-gqa-q4_k_m", "mixtral-q4_k_m", "gemma4-e2b-q5_1"])
@pytest.mark.parametrize("split", [(0, 1, 0), (1, 2, 3, 4, 5), (1, 0, 0, 0, 9)], ids=str)
def test_odd_splits_equal_llama_cpp(mode: str, name: str, split: tuple[float, ...]) -> None:
    assert golden_error(name, Case(split, mode)) <= TOLERANCE


MOVED = [
    ("mixtral-q4_k_m", "attn_"),
    ("mixtral-q4_k_m", "ffn_"),
    ("mixtral-q4_k_m", "ffn_.*_exps"),
    ("mixtral-q4_k_m", r"blk\.0\."),
    ("glm4moe-q4_k_m", "shexp"),
    ("glm4moe-q4_k_m", r"blk\.1\.ffn_.*_exps"),
    ("falcon-h1-q4_k_m", "ssm_"),
    ("falcon-h1-q4_k_m", "attn_"),
    ("qwen3next-q4_k_m", r"blk\.0\.attn_"),
    ("gemma4-e2b-q5_1", r"blk\.1\.attn_"),
    ("deepseek3-mla-q4_k_m", "attn_"),
]


@pytest.mark.parametrize(("name", "pattern"), MOVED)
def test_a_part_on_another_rank_changes_nothing(name: str, pattern: str) -> None:
    """With a rank that has nothing but what was moved to it, and between two that have more."""
    overrides = [(pattern, "cpu")]
    for split in ((0, 1), (1, 2, 1)):
        error = golden_error(name, Case(split, chunk=9), overrides=overrides)
        assert error <= TOLERANCE


@pytest.mark.parametrize("name", ["qwen35-q4_k_m", "phi3-q4_k_m", "deepseek3-mla-q4_k_m"])
def test_packed_weights_equal_llama_cpp(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments, columns of heads and matrices per head, dequantised on each use."""
    monkeypatch.setattr("engine.planning.plan.DENSE_FRACTION", 0.0)
    for case in CASES[:4]:
        assert golden_error(name, case) <= TOLERANCE
