"""Rare variants of files, such as final blocks that only draft tokens (MTP)."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import inspect_model, load_model
from engine.errors import InvalidGGUF
from tests.helpers.golden import TOLERANCE, Case, golden_error, golden_path
from tests.helpers.model_draft import DraftTensor, ModelDraft

CASES = [Case((1, 1)), Case((2, 1), mode="layer", chunk=9, n_decode=3)]
DRAFTING = [
    "glm4moe-q4_k_m",
    "solar-open-q4_k_m",
    "deepseek3-mla-q4_k_m",
    "bailingmoe2-q4_k_m",
    "exaone-moe-q4_k_m",
    "exaone4-q4_k_m",
    "hy_v3-q4_k_m",
    "step35-q4_k_m",
    "glm4-q4_k_m",
    "cohere2moe-q4_k_m",
    "qwen3next-q4_k_m",
    "qwen35-q4_k_m",
    "qwen35moe-q4_k_m",
    "nemotron_h_moe-q4_k_m",
]


def with_drafting_block(name: str) -> ModelDraft:
    """Return the reference model with one more block: a copy of the last, plus drafting tensors."""
    draft = ModelDraft.read(golden_path(f"{name}.gguf"))
    arch = draft.meta["general.architecture"]
    n_layer = draft.meta[f"{arch}.block_count"]
    for tensor in list(draft.tensors):
        if found := re.fullmatch(rf"blk\.{n_layer - 1}\.(.+)", tensor):
            draft.tensors[f"blk.{n_layer}.{found[1]}"] = draft.tensors[tensor]
    for part, shape in (
        ("nextn.eh_proj", (256, 512)),
        ("nextn.enorm", (256,)),
        ("nextn.hnorm", (256,)),
        ("nextn.shared_head_norm", (256,)),
        ("layer_output_norm", (256,)),
    ):
        values = np.ones(shape, np.float32)
        draft.tensors[f"blk.{n_layer}.{part}.weight"] = DraftTensor.of(values)
    keys: dict[str, Any] = {
        f"{arch}.block_count": n_layer + 1,
        f"{arch}.nextn_predict_layers": 1,
        **{
            key: [*value, value[-1]]
            for key, value in draft.meta.items()
            if key.startswith(f"{arch}.") and isinstance(value, list) and len(value) == n_layer
        },
    }
    return draft.changed(keys)


@pytest.mark.parametrize("name", DRAFTING)
def test_drafting_blocks_are_left_out(tmp_path: Path, name: str) -> None:
    path = with_drafting_block(name).write(tmp_path / "m.gguf")
    for case in CASES:
        assert golden_error(name, case, path) <= TOLERANCE


def test_a_block_that_drafts_must_be_said_to_do_so(tmp_path: Path) -> None:
    """It would be run as one of the others, without what makes it a draft."""
    draft = with_drafting_block("glm4moe-q4_k_m")
    path = tmp_path / "m.gguf"
    draft.changed({"glm4moe.nextn_predict_layers": 0}).write(path)
    with pytest.raises(InvalidGGUF, match=r"has the tensor 'blk.*nextn"):
        load_model(path, ["cpu"]).close()


def halves_apart(draft: ModelDraft) -> ModelDraft:
    """Return GLM 4 with rows of each head ordered for M-RoPE: 32 of 64 rotated, one half first."""
    other = draft.copy()
    order = np.array([*range(0, 32, 2), *range(1, 32, 2), *range(32, 64)])
    for layer in range(2):
        for name, n_head in (("attn_q", 4), ("attn_k", 2)):
            rows = (np.arange(n_head)[:, None] * 64 + order).ravel()
            for kind in ("weight", "bias"):
                key = f"blk.{layer}.{name}.{kind}"
                tensor = other.tensors[key]
                raw = np.frombuffer(tensor.data, np.uint8).reshape(len(rows), -1)
                other.tensors[key] = DraftTensor(
                    tensor.shape, tensor.type_number, raw[rows].tobytes()
                )
    return other.changed({"glm4.rope.dimension_sections": [8, 12, 12, 0]})


def test_text_of_glm_4_vision_models(tmp_path: Path) -> None:
    draft = ModelDraft.read(golden_path("glm4-q4_k_m.gguf"))
    path = halves_apart(draft).write(tmp_path / "m.gguf")
    for case in CASES:
        assert golden_error("glm4-q4_k_m", case, path) <= TOLERANCE


@pytest.mark.parametrize("window", [None, 0])
def test_windows_without_a_length_are_refused(tmp_path: Path, window: int | None) -> None:
    draft = ModelDraft.read(golden_path("exaone-moe-q4_k_m.gguf"))
    keys = {"exaone-moe.attention.sliding_window": window}
    path = draft.changed(keys).write(tmp_path / "m.gguf")
    inspect_model(path)
    with pytest.raises(InvalidGGUF, match="its sliding-window length is missing"):
        load_model(path, ["cpu"]).close()


@pytest.mark.parametrize("name", ["deepseek3-mla-q4_k_m", "glm4moe-q4_k_m", "hy_v3-q4_k_m"])
def test_a_file_need_not_say_how_experts_are_scored(tmp_path: Path, name: str) -> None:
    """Early files of some models lack the key; a softmax would give other weights."""
    draft = ModelDraft.read(golden_path(f"{name}.gguf"))
    key = f"{draft.meta['general.architecture']}.expert_gating_func"
    path = tmp_path / "m.gguf"
    draft.changed({key: None}).write(path)
    assert golden_error(name, CASES[0], path) <= TOLERANCE
    draft.changed({key: 1}).write(path)
    assert golden_error(name, CASES[0], path) > TOLERANCE
