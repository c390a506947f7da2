"""Gemma files with missing or unused tensors and keys, and their memory."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import LoadParams, Planner, load_model
from engine.errors import ModelFileError
from tests.helpers.hf_models import FAMILIES
from tests.helpers.model_draft import DraftTensor, ModelDraft

IDS = list(range(5, 25))


def draft_of(name: str, folder: Path) -> ModelDraft:
    (family,) = [family for family in FAMILIES if family.name == name]
    family.build(folder / f"{name}.gguf")
    return ModelDraft.read(folder / f"{name}.gguf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gemma")


@pytest.fixture(scope="module")
def small(folder: Path) -> ModelDraft:
    """Return a model of six layers, the last three sharing keys, with per-layer inputs."""
    return draft_of("gemma4-shared-kv", folder)


def logits(draft: ModelDraft, path: Path, **options: Any) -> Any:
    draft.write(path)
    with load_model(path, ["cpu", "cpu"], [2, 1], kv_type="f32", **options) as model:
        return model.logits(IDS)


REFUSED = [
    ({"attention.shared_kv_layers": 4}, "block 2 has no keys, and no earlier block has keys"),
    ({"attention.shared_kv_layers": 6}, "block 0 has no keys"),
    ({"attention.shared_kv_layers": 4096}, "block 0 has no keys"),
    ({"attention.shared_kv_layers": 2}, "blk.3.attn_k.weight is missing"),
    ({"attention.head_count_kv": [1, 1, 1, 1, 2, 1]}, "block 4 has no keys"),
    ({"attention.head_count": [4, 4, 4, 4, 4, 2]}, "block 5 has no keys"),
    ({"attention.sliding_window_pattern": None}, "which layers have a sliding window"),
    ({"attention.sliding_window_pattern": [True] * 5}, "has 5 entries for 6 layers"),
    ({"attention.sliding_window": 0}, "blk.0.attn_q.weight has shape"),
    ({"attention.value_length_swa": 8}, "heads differ in size"),
    ({"attention.value_length": 16}, "heads differ in size"),
    ({"rope.dimension_count_swa": 18}, "rotates 18 of 16 elements"),
    ({"rope.dimension_count_swa": 15}, "rotates 15 of 16 elements"),
    ({"rope.dimension_count": 30}, "rope_freqs.weight has shape (16,) instead of (15,)"),
    ({"embedding_length_per_layer_input": 0}, "which gemma4 models do not have"),
    ({"embedding_length_per_layer_input": 23}, "blk.0.inp_gate.weight has shape"),
    ({"attention.shared_kv_layers": -1}, "'gemma4.attention.shared_kv_layers' is -1"),
]


@pytest.mark.parametrize(("meta", "problem"), REFUSED, ids=str)
def test_values_that_contradict_each_other_are_refused(
    small: ModelDraft, tmp_path: Path, meta: dict[str, Any], problem: str
) -> None:
    path = small.changed(meta, "gemma4.").write(tmp_path / "refused.gguf")
    with pytest.raises(ModelFileError) as caught:
        load_model(path, ["cpu", "cpu"]).close()
    assert problem in str(caught.value)


def test_keys_that_nothing_reads_change_nothing(small: ModelDraft, tmp_path: Path) -> None:
    """Checkpoints have such tensors in layers that share, and converters may keep them."""
    whole = small.copy()
    for layer, source in ((3, 1), (4, 1), (5, 2)):
        for name in ("attn_k", "attn_v", "attn_k_norm"):
            tensor = small.tensors[f"blk.{source}.{name}.weight"]
            whole.tensors[f"blk.{layer}.{name}.weight"] = tensor
    expected = logits(small, tmp_path / "a.gguf")
    np.testing.assert_array_equal(logits(whole, tmp_path / "b.gguf"), expected)


@pytest.mark.parametrize("mode", ["tensor", "layer"])
def test_only_layers_with_keys_have_a_cache(small: ModelDraft, tmp_path: Path, mode: str) -> None:
    """Two layers of 16 and one of 32 elements a head, keys and values."""
    path = small.write(tmp_path / "model.gguf")
    params = LoadParams(path, ("cpu", "cpu"), (2, 1), mode, kv_type="f32", n_ctx=512)
    with closing(Planner(path)) as planner:
        plan = planner.plan(params)
    n_copies = 2 if mode == "tensor" else 1  # the one key-value head is held by both ranks
    assert sum(d.memory.kv for d in plan.devices) == n_copies * 4 * 512 * 2 * (16 + 16 + 32)


def test_the_table_of_inputs_stays_as_in_the_file(small: ModelDraft, tmp_path: Path) -> None:
    name, half = "per_layer_token_embd.weight", small.copy()
    whole = small.tensors[name]
    values = np.frombuffer(whole.data, np.float32).reshape(whole.shape).astype(np.float16)
    half.tensors[name] = DraftTensor.of(values)
    weights = []
    for draft in (small, half):
        path = draft.write(tmp_path / "model.gguf")
        with load_model(path, ["cpu", "cpu"], [2, 1]) as model:
            memory = model.memory()
            assert [m.measured.weights for m in memory] == [m.predicted.weights for m in memory]
            weights.append(sum(m.measured.weights for m in memory))
    assert weights[0] - weights[1] == 2 * values.size


def test_gemma_2_without_caps_and_window_has_those_of_all_its_models(
    folder: Path, tmp_path: Path
) -> None:
    draft = draft_of("gemma2", folder)
    said = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    silent = draft.changed(dict.fromkeys(said), "gemma2.")
    expected = logits(draft.changed(said, "gemma2."), tmp_path / "a.gguf")
    np.testing.assert_array_equal(logits(silent, tmp_path / "b.gguf"), expected)
    assert np.abs(logits(draft, tmp_path / "c.gguf") - expected).max() > 1e-3


def test_gemma_3_without_a_base_for_windows_has_that_of_all_its_models(
    folder: Path, tmp_path: Path
) -> None:
    draft = draft_of("gemma3", folder)
    assert draft.meta["gemma3.rope.freq_base_swa"] == 10000
    silent = draft.changed({"rope.freq_base_swa": None}, "gemma3.")
    expected = logits(draft, tmp_path / "a.gguf")
    np.testing.assert_array_equal(logits(silent, tmp_path / "b.gguf"), expected)


def test_a_fused_projection_of_gemma_4_has_values(small: ModelDraft, tmp_path: Path) -> None:
    """Rows q, k, v in one tensor, as converters can be told to write."""
    fused = small.copy()
    for layer in range(3):
        names = [f"blk.{layer}.attn_{part}.weight" for part in "qkv"]
        parts = [fused.tensors.pop(name) for name in names]
        shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        data = b"".join(part.data for part in parts)
        fused.tensors[f"blk.{layer}.attn_qkv.weight"] = DraftTensor(shape, 0, data)
    expected = logits(small, tmp_path / "a.gguf")
    np.testing.assert_array_equal(logits(fused, tmp_path / "b.gguf"), expected)
