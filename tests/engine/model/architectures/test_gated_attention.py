"""Variants of files with gated attention and clamped activations."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import load_model
from engine.errors import InvalidGGUF
from tests.helpers.golden import TOLERANCE, golden_path, nmse
from tests.helpers.model_draft import DraftTensor, ModelDraft

GATES = "blk.1.attn_gate.weight"


def step35() -> ModelDraft:
    return ModelDraft.read(golden_path("step35-q4_k_m.gguf"))


def logits(path: Path, n_ranks: int = 1) -> Any:
    with load_model(path, ["cpu"] * n_ranks, kv_type="f32") as model:
        return model.logits(list(range(5, 45)))


def with_divisors(draft: ModelDraft, values: list[float]) -> ModelDraft:
    other = draft.copy()
    other.tensors["rope_freqs.weight"] = DraftTensor.of(np.array(values, np.float32))
    return other


def test_divisors_may_reach_beyond_the_rotated_pairs(tmp_path: Path) -> None:
    """The converter of Step 3.5 writes one per pair of a head, of which half is rotated."""
    divisors = [1.0 + i / 4 for i in range(16)]
    short = with_divisors(step35(), divisors).write(tmp_path / "short.gguf")
    long = with_divisors(step35(), divisors + [1.0] * 16).write(tmp_path / "long.gguf")
    plain = step35().write(tmp_path / "plain.gguf")
    expected = logits(short)
    np.testing.assert_array_equal(logits(long), expected)
    assert nmse(logits(long, 3), expected) <= TOLERANCE
    assert nmse(logits(plain), expected) > TOLERANCE


def test_divisors_must_reach_all_rotated_pairs(tmp_path: Path) -> None:
    path = with_divisors(step35(), [1.0] * 15).write(tmp_path / "m.gguf")
    with pytest.raises(InvalidGGUF, match="rope_freqs"):
        load_model(path, ["cpu"]).close()


def test_a_dense_ffn_has_the_shared_experts_limit(tmp_path: Path) -> None:
    keys = {"step35.swiglu_clamp_shexp": [0.25, 0.0, 0.9]}
    limited = step35().changed(keys).write(tmp_path / "limited.gguf")
    plain = step35().write(tmp_path / "plain.gguf")
    assert nmse(logits(limited), logits(plain)) > TOLERANCE
    assert nmse(logits(limited, 3), logits(limited)) <= TOLERANCE


@pytest.mark.parametrize("window", [None, 0])
def test_windows_need_a_length(tmp_path: Path, window: int | None) -> None:
    path = step35().changed({"step35.attention.sliding_window": window}).write(tmp_path / "m.gguf")
    with pytest.raises(InvalidGGUF, match="its sliding-window length is missing"):
        load_model(path, ["cpu"]).close()


def test_layers_need_no_gates(tmp_path: Path) -> None:
    """Without, heads count as with gates that are wide open."""
    without, opened = step35(), step35()
    plain = opened.write(tmp_path / "plain.gguf")
    del without.tensors[GATES]
    for layer in range(3):
        name = f"blk.{layer}.attn_gate"
        bias = np.full(opened.tensors[f"{name}.weight"].shape[0], 50 * (layer == 1), np.float32)
        opened.tensors[f"{name}.bias"] = DraftTensor.of(bias)
    expected = logits(opened.write(tmp_path / "opened.gguf"))
    assert nmse(logits(without.write(tmp_path / "without.gguf")), expected) <= TOLERANCE
    assert nmse(logits(plain), expected) > TOLERANCE


def test_gates_are_one_per_head_or_per_element(tmp_path: Path) -> None:
    draft = step35()
    draft.tensors[GATES] = DraftTensor.of(np.zeros((12, 256), np.float32))
    with pytest.raises(InvalidGGUF, match=r"attn_gate.weight has shape \(12, 256\)"):
        load_model(draft.write(tmp_path / "m.gguf"), ["cpu"]).close()
