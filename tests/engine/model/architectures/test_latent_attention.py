"""Latent attention: older files, any number of ranks, the cache, and broken sizes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from engine import LoadParams, Planner, load_model
from engine.errors import InvalidGGUF
from engine.model.forward.pages import PAGE
from tests.helpers.golden import TOLERANCE, Case, golden_error, golden_logits, golden_path, nmse
from tests.helpers.model_draft import DraftTensor, ModelDraft

DEEPSEEK = "deepseek3-mla-q4_k_m"
MODELS = [DEEPSEEK, "deepseek2-lite-q4_0", "mistral4-q4_k_m", "minicpm3-q4_0"]
ODD = [
    Case((1, 1, 1, 1)),
    Case((1, 1, 1, 1, 1), chunk=7, n_decode=3),
    Case((0, 1, 0)),
    Case((1, 9, 2, 4)),
    Case((2, 1, 1), mode="layer"),
]
SPLITS = [Case((1,)), Case((3, 1), chunk=11, n_decode=4), Case((1, 1, 1, 1, 1))]


@pytest.fixture(scope="module")
def draft() -> ModelDraft:
    """Return DeepSeek V3 of two layers: 4 heads of 32 + 32 and 48 elements, and 64 latents."""
    return ModelDraft.read(golden_path(f"{DEEPSEEK}.gguf"))


@pytest.fixture(scope="module")
def reference() -> tuple[list[int], Any]:
    return golden_logits(DEEPSEEK)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "m.gguf"
    yield path
    path.unlink(missing_ok=True)


def values(name: str, path: Path) -> Any:
    (tensor,) = [t for t in gguf.GGUFReader(path).tensors if t.name == name]
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


def older(draft: ModelDraft) -> ModelDraft:
    """Return a file as before 2025: one matrix to keys and values, and the keys of attention."""
    old, source = draft.copy(), golden_path(f"{DEEPSEEK}.gguf")
    for layer in range(2):
        p = f"blk.{layer}.attn_"
        k, v = values(f"{p}k_b.weight", source), values(f"{p}v_b.weight", source)
        joint = np.concatenate([k.swapaxes(1, 2), v], axis=1).reshape(-1, k.shape[1])
        old.tensors[f"{p}kv_b.weight"] = DraftTensor.of(joint.astype(np.float32))
        del old.tensors[f"{p}k_b.weight"], old.tensors[f"{p}v_b.weight"]
    sizes = {
        "attention.head_count_kv": 4,
        "attention.key_length": 64,
        "attention.value_length": 48,
        "attention.key_length_mla": None,
        "attention.value_length_mla": None,
    }
    return old.changed(sizes, "deepseek2.")


def folded(draft: ModelDraft) -> ModelDraft:
    """Return a file as some are: matrices of all heads stacked, and the joint one unused."""
    other = draft.copy()
    for layer in range(2):
        for part in ("k_b", "v_b"):
            name = f"blk.{layer}.attn_{part}.weight"
            tensor = other.tensors[name]
            n_head, n_out, n_in = tensor.shape
            other.tensors[name] = DraftTensor(
                (n_head * n_out, n_in), tensor.type_number, tensor.data
            )
        unused = np.zeros((320, 64), np.float32)
        other.tensors[f"blk.{layer}.attn_kv_b.weight"] = DraftTensor.of(unused)
    return other


@pytest.mark.parametrize("case", ODD, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_any_number_of_ranks_equals_llama_cpp(name: str, case: Case) -> None:
    assert golden_error(name, case) <= TOLERANCE


@pytest.mark.parametrize("case", SPLITS, ids=str)
@pytest.mark.parametrize("make", [older, folded])
def test_older_files_give_the_same_logits(
    draft: ModelDraft, path: Path, make: Any, case: Case
) -> None:
    make(draft).write(path)
    assert golden_error(DEEPSEEK, case, path) <= TOLERANCE


@pytest.mark.parametrize("make", [older, folded])
def test_older_files_need_as_much_memory(draft: ModelDraft, path: Path, make: Any) -> None:
    """Cache and working memory: heads are not spread out, so their number does not matter."""
    newer = golden_path(f"{DEEPSEEK}.gguf")
    make(draft).write(path)
    expected, found = (
        [(device.memory.kv, device.memory.compute) for device in plan.devices]
        for plan in (Planner(p).plan(LoadParams(str(p), ("cpu",) * 3)) for p in (newer, path))
    )
    assert found == expected


@pytest.mark.parametrize("make", [older, folded])
def test_packed_maps_give_the_same_logits(
    draft: ModelDraft, path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.planning.plan.DENSE_FRACTION", 0.0)
    make(draft).write(path)
    assert golden_error(DEEPSEEK, Case((2, 1, 1)), path) <= TOLERANCE


def test_every_rank_with_heads_holds_the_latents_once(reference: tuple[list[int], Any]) -> None:
    """64 + 32 numbers per token of a page and layer, whatever the share."""
    path = golden_path(f"{DEEPSEEK}.gguf")
    with load_model(path, ["cpu"] * 3, [2, 1, 1], kv_type="f16", n_ctx=128) as model:
        model.logits(reference[0])
        held = [memory.measured.kv for memory in model.memory()]
        assert held == [memory.predicted.kv for memory in model.memory()]
        first, *others = [
            layer.k for rank in model.runtime.ranks for layer in rank.context.cache.layers[:1]
        ]
    assert held == [2 * PAGE * (64 + 32) * 2] * 3
    assert len(others) == 2
    assert all(first.equal(other) for other in others)


def test_half_precision_latents_stay_close(reference: tuple[list[int], Any]) -> None:
    tokens, expected = reference
    with load_model(golden_path(f"{DEEPSEEK}.gguf"), ["cpu"] * 2, kv_type="f16") as model:
        assert TOLERANCE**2 < nmse(model.logits(tokens), expected) < 1e-4


def test_long_contexts_sharpen_queries_from_a_length_on(
    draft: ModelDraft, path: Path, reference: tuple[list[int], Any]
) -> None:
    """Mistral Large 3: no token is as far as the first length, and half of them the second."""
    tokens, expected = reference
    errors = []
    for length in (len(tokens), len(tokens) // 2):
        keys = {"attention.temperature_scale": 0.5, "attention.temperature_length": length}
        draft.changed(keys, "deepseek2.").write(path)
        with load_model(path, ["cpu"] * 2, kv_type="f32") as model:
            logits = model.logits(tokens)
        errors.append(nmse(logits, expected))
        assert nmse(logits[:length], expected[:length]) <= TOLERANCE
    assert errors[0] <= TOLERANCE < errors[1]


BROKEN = [
    ({"attention.kv_lora_rank": 0}, "size of its latents is missing"),
    ({"attention.kv_lora_rank": None}, "kv_lora_rank"),
    ({"attention.kv_lora_rank": 65}, "attn_kv_a_mqa"),
    ({"attention.q_lora_rank": None}, "q_lora_rank"),
    ({"attention.q_lora_rank": 95}, "attn_q_a"),
    ({"rope.dimension_count": 64}, "rotates 64 of 64 elements"),
    ({"attention.key_length_mla": 16}, "rotates 32 of 16 elements"),
    ({"attention.key_length_mla": 62}, "attn_q_b"),
    ({"attention.value_length_mla": 47}, "attn_v_b"),
    ({"attention.head_count": 3}, "attn_q_b"),
    ({"expert_group_count": 4}, "groups"),
    ({"expert_group_used_count": 0, "expert_used_count": 3}, "groups"),
    ({"expert_gating_func": 9}, "its expert gating"),
    (
        {
            "attention.temperature_scale": 0.1,
            "rope.scaling.original_context_length": None,
            "rope.scaling.type": "none",
            "context_length": 0,
        },
        "length of its attention temperature is missing",
    ),
]


@pytest.mark.parametrize(("keys", "problem"), BROKEN, ids=str)
def test_sizes_that_do_not_fit_are_named(
    draft: ModelDraft, path: Path, keys: dict[str, Any], problem: str
) -> None:
    draft.changed(keys, "deepseek2.").write(path)
    with pytest.raises(InvalidGGUF, match=problem):
        load_model(path, ["cpu"] * 2).close()
