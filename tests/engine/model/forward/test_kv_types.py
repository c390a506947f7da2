"""Tests of the KV types: memory, accuracy, and refused head sizes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType

from engine import EngineError, LoadParams, Planner, load_model
from engine.load_params import KV_TYPES, kv_types
from engine.model.forward.batch import Batch, Piece
from engine.model.forward.cache import LayerCache
from engine.model.forward.pages import PAGE
from engine.model.forward.state import KVState
from engine.model.sharding.shares import Ranges
from tests.helpers.answers import ask
from tests.helpers.golden import Case, golden_logits, golden_path, logits_in_steps, nmse
from tests.helpers.kv_pairs import MIXED
from tests.helpers.tiers import paired
from tests.helpers.tiny_gguf import tiny_gguf

SPLITS = [[1], [1, 1], [3, 1]]
BYTES = {"f32": 32 * 4, "f16": 32 * 2, "bf16": 32 * 2, "q8_0": 34, "q4_0": 18}
"""Bytes of 32 elements in each KV type."""

BLOCKS = [kv_type for kv_type in KV_TYPES if kv_type.startswith("q")]
TRAINED = "bitllama-3M-F16"
LATENT = "deepseek3-mla-q4_k_m"

ALONE = Piece(0, 25)
"""Tokens of a sequence that has the cache alone."""


def layer_cache(kv_type: str, *, v_in_k: bool = False, n_ctx: int = 24) -> LayerCache:
    """Return a cache of two key-value heads with keys of 64 elements and values of 32.

    Four query heads use it.
    """
    heads, kv_heads = Ranges(((0, 4),), 4), Ranges(((0, 2),), 2)
    state = KVState(heads, kv_heads, 64, 32, v_in_k=v_in_k)
    cache = LayerCache(state, 0, n_ctx, kv_type, torch.device("cpu"))
    assert cache.n_bytes == n_ctx * state.token_bytes(0, kv_type)
    return cache


def rows(n: int, width: int) -> torch.Tensor:
    return torch.randn(n, 2, width, generator=torch.Generator().manual_seed(width))


@pytest.mark.parametrize("kv_type", BLOCKS)
@pytest.mark.parametrize("v_in_k", [False, True])
def test_rows_are_the_blocks_of_the_gguf_package(kv_type: str, v_in_k: bool) -> None:
    cache, kind = layer_cache(kv_type, v_in_k=v_in_k), GGMLQuantizationType[kv_type.upper()]
    k, v = rows(9, 64), rows(9, 32)
    cache.write(k[:5], None if v_in_k else v[:5], Batch.of_one(0, 5, 0))
    cache.write(k[5:], None if v_in_k else v[5:], Batch.of_one(5, len(k) - 5, 0))
    held = {"k": (cache.k, k), "v": (cache.v, k[..., :32] if v_in_k else v)}
    for raw, numbers in held.values():
        wanted = quants.quantize(numbers.transpose(0, 1).contiguous().numpy(), kind)
        assert raw.dtype == torch.uint8
        assert raw.shape == (2, 24, wanted.shape[-1])
        assert np.array_equal(raw[:, :9].numpy(), wanted)
        assert not raw[:, 9:].any()
    for (raw, _), read in zip(held.values(), cache.read(ALONE, 2, 9), strict=True):
        wanted = quants.dequantize(raw[:, 2:9].contiguous().numpy(), kind)
        assert np.array_equal(read.numpy(), wanted)


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_what_is_read_is_what_was_written(kv_type: str) -> None:
    """Check keys and values up to a fraction of the largest of 32 numbers.

    For blocks that is half a quantisation step (a whole one at an end of Q4_0's range) and the
    scale's rounding.
    """
    step = {
        "f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 1 / 254 + 2**-11, "q4_0": 1 / 8 + 2**-11,
    }[kv_type]  # fmt: skip
    cache, k, v = layer_cache(kv_type), rows(9, 64), rows(9, 32)
    cache.write(k, v, Batch.of_one(3, len(k), 0))
    for read, wrote in zip(cache.read(ALONE, 3, 12), (k, v), strict=True):
        largest = wrote.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
        error = (read.transpose(0, 1) - wrote).unflatten(-1, (-1, 32)).abs()
        assert (error <= 1.001 * step * largest).all()


@pytest.mark.parametrize("kv_type", MIXED)
def test_keys_and_values_are_those_of_caches_of_one_type(kv_type: str) -> None:
    types, numbers = kv_types(kv_type), (rows(9, 64), rows(9, 32))
    caches = [layer_cache(text, n_ctx=25) for text in (kv_type, types.k, types.v)]
    for cache in caches:
        cache.write(*numbers, Batch.of_one(3, len(numbers[0]), 0))
    mixed, of_keys, of_values = caches
    assert torch.equal(mixed.k, of_keys.k)
    assert torch.equal(mixed.v, of_values.v)
    assert torch.equal(mixed.read(ALONE, 0, 25)[0], of_keys.read(ALONE, 0, 25)[0])
    assert torch.equal(mixed.read(ALONE, 0, 25)[1], of_values.read(ALONE, 0, 25)[1])


@pytest.mark.parametrize(
    ("split", "kv_type"),
    paired([*SPLITS, [2, 0, 1]], [*KV_TYPES, "q8_0/q4_0", "q4_0/f32"]),
    ids=str,
)
@pytest.mark.parametrize("mode", ["tensor", "layer"])
def test_a_plan_is_what_is_held(tmp_path: Path, split: list[int], kv_type: str, mode: str) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", n_layer=3, n_head_kv=2, n_head=4, head_dim=64)
    devices = ["cpu"] * len(split)
    with load_model(path, devices, split, split_mode=mode, kv_type=kv_type, n_ctx=100) as model:
        model.logits([1, 2, 3])
        held = [rank.context.cache.n_bytes for rank in model.runtime.ranks]
        assert held == [memory.predicted.kv for memory in model.memory()]
        assert held == [memory.measured.kv for memory in model.memory()]
    assert sum(held) == 3 * PAGE * 2 * 2 * sum(BYTES[kind] for kind in kv_types(kv_type))


def test_where_values_are_part_of_keys_the_type_of_keys_counts(tmp_path: Path) -> None:
    path, ids = model_path(LATENT), golden_logits(LATENT)[0]
    with load_model(path, ["cpu"] * 2, kv_type="q8_0", n_ctx=64) as model:
        ask(model, ids[:5], 2)
        model.save_state(tmp_path / "state")
        expected, predicted = model.logits(ids), [m.predicted.kv for m in model.memory()]
    with load_model(path, ["cpu"] * 2, kv_type="q8_0/q4_0", n_ctx=64) as model:
        assert model.load_state(tmp_path / "state").ids[:5] == tuple(ids[:5])
        assert np.array_equal(model.logits(ids), expected)
        assert [memory.measured.kv for memory in model.memory()] == predicted
        assert model.plan.kv_type == "q8_0"
        (warning,) = model.plan.warnings
    assert "its whole KV cache is q8_0, the type chosen for keys" in warning
    params = LoadParams(str(path), ("cpu",) * 2, kv_type="q8_0/q4_0", n_ctx=64)
    assert Planner(path).plan(params).warnings == (warning,)


@pytest.mark.parametrize("kv_type", BLOCKS)
def test_latents_are_held_once(kv_type: str) -> None:
    """Check the bytes of keys of 96 elements, whose first 64 are the values, on both ranks."""
    path, ids = model_path(LATENT), golden_logits(LATENT)[0]
    with load_model(path, ["cpu"] * 2, [3, 1], kv_type=kv_type, n_ctx=512) as model:
        model.logits(ids)
        held = [memory.measured.kv for memory in model.memory()]
        assert held == [memory.predicted.kv for memory in model.memory()]
        assert held == [2 * 512 * 3 * BYTES[kv_type]] * 2


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize(
    ("name", "kv_type", "error", "loss"),
    [  # NMSE of logits and relative change of perplexity: about twice what was measured
        (TRAINED, "q8_0", 2.5e-6, 0.0002),
        (TRAINED, "q4_0", 6e-4, 0.001),
        (TRAINED, "q8_0/q4_0", 4e-4, 0.004),
        (TRAINED, "q4_0/f16", 2.5e-4, 0.002),
        (LATENT, "q8_0", 3e-4, 0.015),
        (LATENT, "q4_0", 8e-2, 0.2),
    ],
)
def test_answers_stay_close_to_those_of_an_exact_cache(
    name: str, kv_type: str, error: float, loss: float, split: list[int]
) -> None:
    """Check that a trained model's perplexity on a story changes little: by 0.02 % to 0.4 %.

    The weights of the other model are random, and its logits more sensitive.
    """
    ids, path = story() if name == TRAINED else golden_logits(name)[0], model_path(name)
    with load_model(path, kv_type="f32", n_ctx=len(ids)) as model:
        exact = model.logits(ids)
    devices = ["cpu"] * len(split)
    with load_model(path, devices, split, kv_type=kv_type, n_ctx=len(ids)) as model:
        logits = model.logits(ids)
    assert 0 < nmse(logits, exact) < error
    assert abs(np.exp(nll(logits, ids) - nll(exact, ids)) - 1) < loss


def model_path(name: str) -> Path:
    return golden_path(*["trained"] * (name == TRAINED), f"{name}.gguf")


def story() -> list[int]:
    text = golden_path("trained", "goldens.json").read_text(encoding="utf-8")
    ids: list[int] = json.loads(text)["models"]["bitllama-3M"]["text_ids"]
    return ids


def nll(logits: Any, ids: list[int]) -> float:
    """Return the mean -log p of each token after the first."""
    p = torch.from_numpy(logits[:-1]).double().log_softmax(-1)
    return -float(p[range(len(ids) - 1), ids[1:]].mean())


@pytest.mark.parametrize("kv_type", MIXED)
def test_kernels_and_ranks_give_the_logits_of_the_reference(
    kv_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check prompts and single tokens; rounded activations may round a key or value otherwise."""
    path, ids = model_path(TRAINED), story()[:40]
    monkeypatch.setenv("TANDEM_BACKEND", "reference")
    with load_model(path, kv_type=kv_type, n_ctx=40) as model:
        expected = model.logits(ids)
    monkeypatch.delenv("TANDEM_BACKEND")
    for split in ([1], [3, 1]):
        with load_model(path, ["cpu"] * len(split), split, kv_type=kv_type, n_ctx=40) as model:
            found = logits_in_steps(model, ids, Case(tuple(split), n_decode=8))
        assert nmse(found, expected) < 1e-3


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("kv_type", [*BLOCKS, "q8_0/q4_0"])
def test_tokens_sampled_one_by_one_are_those_of_one_pass(
    tmp_path: Path, kv_type: str, split: list[int]
) -> None:
    """Compare a prompt in batches and single tokens with one pass; all read rounded keys."""
    path, prompt = tiny_gguf(tmp_path / "m.gguf", head_dim=32), [5, 9, 33, 17, 8, 40, 21]
    devices = ["cpu"] * len(split)
    with load_model(path, devices, split, kv_type=kv_type, n_ctx=32, n_batch=3) as model:
        sampled, _ = ask(model, prompt, 12)
        whole = model.logits(prompt + sampled)[len(prompt) - 1 : -1]
    assert sampled == whole.argmax(-1).tolist()


@pytest.mark.parametrize("kv_type", BLOCKS)
@pytest.mark.parametrize(
    ("head_dim_k", "head_dim_v", "problem"),
    [(80, 64, "keys have 80 elements"), (64, 80, "values have 80 elements"), (32, 32, "")],
)
def test_heads_of_broken_blocks_are_refused(
    kv_type: str, head_dim_k: int, head_dim_v: int, problem: str
) -> None:
    one = Ranges(((0, 1),), 1)
    state = KVState(one, one, head_dim_k, head_dim_v, v_in_k=head_dim_v < head_dim_k)
    for unquantised in ("f32", "f16", "bf16"):
        state.check_type(unquantised)
    if not problem:
        state.check_type(kv_type)
        return
    sentence = f"{problem}, but a {kv_type.upper()} KV cache .* of 32"
    with pytest.raises(EngineError, match=sentence) as refused:
        state.check_type(kv_type)
    assert refused.value.hint == "Choose the KV cache type f16."


def test_only_the_type_in_blocks_needs_whole_ones() -> None:
    one = Ranges(((0, 1),), 1)
    state = KVState(one, one, 80, 64)
    state.check_type("f16/q8_0")
    with pytest.raises(EngineError, match="keys have 80 elements"):
        state.check_type("q8_0/f16")


@pytest.mark.parametrize("text", ["", "q8_0/", "/q8_0", "q8_0/q5_0", "f16/f16/f16", "F16", 8])
def test_what_is_no_type_is_refused(text: Any) -> None:
    with pytest.raises(EngineError, match=r"'kv_type' must be 'f32', .*, or two of these"):
        LoadParams("m.gguf", kv_type=text)


def test_two_types_that_are_the_same_are_one() -> None:
    assert LoadParams("m.gguf", kv_type="q8_0/q8_0") == LoadParams("m.gguf", kv_type="q8_0")


@pytest.mark.parametrize("kv_type", BLOCKS)
def test_a_refusal_comes_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_type: str
) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", head_dim=24)
    monkeypatch.setattr("engine.runtime.loader.load_rank", lambda *args: pytest.fail("read"))
    with pytest.raises(EngineError, match="keys have 24 elements"):
        load_model(path, ["cpu"] * 2, kv_type=kv_type)
    with pytest.raises(EngineError, match="keys have 24 elements"):
        Planner(path).plan(LoadParams(str(path), kv_type=kv_type))
