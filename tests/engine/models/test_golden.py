"""Logits against llama.cpp's, for every reference model of the supported architectures."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import load_model
from tests.helpers.golden import golden_path, golden_root

ARCHITECTURES = ("llama", "qwen2", "qwen3")
TOLERANCE = 1e-5
SPLITS = [("cpu",), ("cpu",) * 2, ("cpu",) * 3, ("cpu",) * 4]


def entries() -> list[dict[str, Any]]:
    manifest = golden_root() / "MANIFEST.json"
    if not manifest.exists():
        return []
    found = json.loads(manifest.read_text(encoding="utf-8"))
    return [entry for entry in found if entry["arch"] in ARCHITECTURES]


def nmse(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(((a - b) ** 2).mean() / (b**2).mean())


def reference(entry: dict[str, Any]) -> tuple[Path, list[int], Any]:
    path = golden_path(entry["file"])
    with np.load(golden_path(entry["npz"])) as data:
        return path, data["tokens"].tolist(), data["logits"]


def test_the_reference_set_is_complete() -> None:
    golden_path("MANIFEST.json")
    assert len(entries()) >= 34


@pytest.mark.parametrize("devices", SPLITS, ids=lambda d: f"{len(d)} ranks")
@pytest.mark.parametrize("entry", entries(), ids=lambda e: e["file"])
def test_logits_equal_llama_cpp(entry: dict[str, Any], devices: tuple[str, ...]) -> None:
    """Weights are exact, so what remains is the order of float additions."""
    path, tokens, expected = reference(entry)
    with load_model(path, devices, kv_type="f32", n_ctx=128) as model:
        assert nmse(model.logits(tokens), expected) <= TOLERANCE


@pytest.mark.parametrize("mode", ["tensor", "layer"])
@pytest.mark.parametrize("name", ["llama-gqa-q4_k_m.gguf", "mixtral-q4_k_m.gguf"])
@pytest.mark.parametrize("split", [[3, 1, 2], [5, 0, 1], [0, 1, 0]], ids=str)
def test_uneven_splits_equal_llama_cpp(mode: str, name: str, split: list[float]) -> None:
    golden_path("MANIFEST.json")
    (entry,) = [e for e in entries() if e["file"] == name]
    path, tokens, expected = reference(entry)
    model = load_model(path, ["cpu"] * 3, split, split_mode=mode, kv_type="f32", n_ctx=128)
    with model:
        assert nmse(model.logits(tokens), expected) <= TOLERANCE


@pytest.mark.parametrize("override", ["attn_", "ffn_", "ffn_.*_exps", r"blk\.0\."])
def test_a_part_on_another_rank_changes_nothing(override: str) -> None:
    golden_path("MANIFEST.json")
    (entry,) = [e for e in entries() if e["file"] == "mixtral-q4_k_m.gguf"]
    path, tokens, expected = reference(entry)
    model = load_model(
        path, ["cpu"] * 2, [0, 1], overrides=[(override, "cpu")], kv_type="f32", n_ctx=128
    )
    with model:
        assert nmse(model.logits(tokens), expected) <= TOLERANCE


@pytest.mark.parametrize("name", ["llama-gqa-q4_k_m", "qwen2-q4_k_m", "qwen3-q4_k_m"])
def test_chunks_and_single_tokens_equal_one_pass(name: str) -> None:
    """Prefill in chunks of 7, then token by token: the cache must make no difference."""
    golden_path("MANIFEST.json")
    (entry,) = [e for e in entries() if e["file"] == f"{name}.gguf"]
    path, tokens, expected = reference(entry)
    for n_batch in (7, 1):
        with load_model(path, ["cpu"] * 2, kv_type="f32", n_ctx=128, n_batch=n_batch) as model:
            assert nmse(model.logits(tokens), expected) <= TOLERANCE
