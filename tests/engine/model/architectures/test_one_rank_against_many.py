"""Random models of random sizes give the same logits for every split."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import load_model
from tests.helpers.plain_llama import PlainLlama
from tests.helpers.tiny_gguf import tiny_gguf

IDS = [3, 17, 40, 5, 5, 9, 61, 22]


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, object]:
    n_kv = draw(st.integers(1, 4))
    return {
        "arch": draw(st.sampled_from(["llama", "qwen2", "qwen3", "bitnet"])),
        "n_layer": draw(st.integers(1, 3)),
        "n_embd": 64,
        "n_head_kv": n_kv,
        "n_head": n_kv * draw(st.integers(1, 3)),
        "head_dim": draw(st.sampled_from([8, 16, 24])),
        "n_ff": draw(st.sampled_from([32, 40, 96, 172, 256])),
        "tied": draw(st.booleans()),
        "quant": draw(st.sampled_from(["F32", "Q8_0", "Q4_0"])),
    }


def extras(model: dict[str, object]) -> dict[str, bool]:
    return {"qkv_bias": model["arch"] == "qwen2", "qk_norm": model["arch"] == "qwen3"}


@settings(max_examples=25, deadline=None)
@given(
    model=sizes(),
    split=st.lists(st.integers(0, 5), min_size=2, max_size=5).filter(any),
    mode=st.sampled_from(["tensor", "tensor", "layer", "groups"]),
    seed=st.integers(0, 99),
)
def test_any_split_equals_one_rank_and_the_plain_reference(
    model: dict[str, object], split: list[int], mode: str, seed: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_gguf(
            Path(folder) / "m.gguf", tokenizer=False, seed=seed, **model, **extras(model)
        )
        expected = PlainLlama(path).logits(IDS)
        with load_model(path, kv_type="f32") as one:
            alone = one.logits(IDS)
        devices = ["cpu"] * len(split)
        with load_model(path, devices, split, split_mode=mode, kv_type="f32") as many:
            together = many.logits(IDS)
    scale = np.abs(expected).max()
    assert np.abs(alone - expected).max() < 2e-5 * scale
    assert np.abs(together - alone).max() < 2e-5 * scale


@st.composite
def patterns(draw: st.DrawFn) -> dict[str, Any]:
    """Strategy of splits: groups of ranks, blocks on the CPU, parts on ranks of their own."""
    groups = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    n_ranks = sum(groups)
    split = st.lists(st.integers(0, 4), min_size=n_ranks, max_size=n_ranks).filter(any)
    names = ("attn", "ffn", r"blk\.0\.", r"blk\.0\.attn_k", "token_embd", "token_embd|ffn", ".")
    ranks = st.integers(0, n_ranks - 1).map("#{}".format)
    return {
        "devices": ["cpu"] * n_ranks,
        "split": draw(split),
        "split_mode": "groups",
        "groups": groups,
        "n_cpu_blocks": draw(st.integers(0, 2)),
        "overrides": draw(st.lists(st.tuples(st.sampled_from(names), ranks), max_size=3)),
        "kv_on_host": draw(st.booleans()),
    }


@settings(max_examples=25, deadline=None)
@given(model=sizes(), pattern=patterns(), seed=st.integers(0, 99))
def test_any_pattern_of_shares_equals_the_plain_reference(
    model: dict[str, object], pattern: dict[str, Any], seed: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_gguf(
            Path(folder) / "m.gguf", tokenizer=False, seed=seed, **model, **extras(model)
        )
        expected = PlainLlama(path).logits(IDS)
        with load_model(path, kv_type="f32", **pattern) as many:
            logits = many.logits(IDS)
            for memory in many.memory():
                assert memory.measured.weights == memory.predicted.weights
                assert memory.measured.kv == memory.predicted.kv
    assert np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("storage", ["f32", "packed"])
@pytest.mark.parametrize("quant", ["F16", "Q4_0", "Q8_0", "Q5_1"])
def test_packed_weights_give_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str, quant: str
) -> None:
    """Where dequantised weights do not fit, they stay packed; a cut may lie inside a block."""
    if storage == "packed":
        monkeypatch.setattr("engine.planning.plan.DENSE_FRACTION", 0.0)
    path = tiny_gguf(tmp_path / "m.gguf", n_head_kv=4, n_embd=64, head_dim=24, quant=quant)
    expected = PlainLlama(path).logits(IDS)
    with load_model(path, ["cpu"] * 3, [2, 1, 1], kv_type="f32") as model:
        assert model.plan.storage == storage
        logits = model.logits(IDS)
        for memory in model.memory():
            assert memory.measured.weights == memory.predicted.weights
            assert memory.measured.kv == memory.predicted.kv
    assert np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("split", [[1, 1], [3, 1], [1, 1, 1]], ids=str)
def test_every_rank_holds_the_same_bits_after_a_pass(tmp_path: Path, split: list[int]) -> None:
    """Duplicated key-value heads are computed on several ranks and must agree to the bit."""
    path = tiny_gguf(tmp_path / "m.gguf", n_head=4, n_head_kv=1, n_embd=64)
    with load_model(path, ["cpu"] * len(split), split, kv_type="f32") as model:
        model.logits(IDS)
        caches = [rank.context.cache.layers[-1] for rank in model.runtime.ranks]
        first, *others = [c.k[:, : len(IDS)] for c in caches if c is not None]
        assert all(first.equal(other) for other in others)


def test_half_precision_caches_stay_close(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    with load_model(path, kv_type="f32") as exact:
        expected = exact.logits(IDS)
    for kv_type, tolerance in (("f16", 2e-3), ("bf16", 2e-2)):
        with load_model(path, ["cpu"] * 2, kv_type=kv_type) as model:
            error = np.abs(model.logits(IDS) - expected).max() / np.abs(expected).max()
        assert 0 < error < tolerance


@pytest.mark.parametrize("split", [[1], [1, 1], [3, 1], [1, 2, 1], [5, 0, 1]], ids=str)
def test_routed_experts_equal_the_plain_reference(tmp_path: Path, split: list[float]) -> None:
    rng = np.random.default_rng(1)
    n_expert, n_ff, n_embd = 5, 96, 64
    extra: dict[str, object] = {"llama.expert_count": n_expert, "llama.expert_used_count": 2}
    for layer in range(2):
        p = f"blk.{layer}.ffn_"
        extra[f"{p}gate_inp.weight"] = rng.normal(size=(n_expert, n_embd)).astype(np.float32)
        for name, shape in (
            ("gate_exps", (n_expert, n_ff, n_embd)),
            ("up_exps", (n_expert, n_ff, n_embd)),
            ("down_exps", (n_expert, n_embd, n_ff)),
        ):
            weight = rng.normal(size=shape) / np.sqrt(shape[-1])
            extra[f"{p}{name}.weight"] = weight.astype(np.float32)
        extra |= {f"{p}{name}.weight": None for name in ("gate", "up", "down")}
    path = tiny_gguf(tmp_path / "m.gguf", n_ff=n_ff, n_embd=n_embd, extra=extra)
    expected = PlainLlama(path).logits(IDS)
    for mode in ("tensor", "layer"):
        devices = ["cpu"] * len(split)
        with load_model(path, devices, split, split_mode=mode, kv_type="f32") as model:
            logits = model.logits(IDS)
        assert np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max()
