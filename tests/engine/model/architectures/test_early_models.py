"""Baichuan and the first Qwen, which `transformers` lacks, against models like them."""

from pathlib import Path

import numpy as np
import pytest

from engine import load_model
from tests.helpers.golden import TOLERANCE, nmse
from tests.helpers.model_draft import ModelDraft
from tests.helpers.plain_llama import Array, PlainLlama
from tests.helpers.tiny_gguf import tiny_gguf

IDS = list(range(3, 40))
SPLITS = [[1], [1, 1], [3, 1, 2], [5, 0, 1]]


def logits(path: Path, split: list[int]) -> Array:
    with load_model(path, ["cpu"] * len(split), split, kv_type="f32") as model:
        return np.asarray(model.logits(IDS), np.float64)


def renamed(path: Path, arch: str) -> ModelDraft:
    """Return a model under the name of another architecture."""
    draft = ModelDraft.read(path)
    old = draft.meta["general.architecture"]
    draft.meta = {key.replace(f"{old}.", f"{arch}."): v for key, v in draft.meta.items()}
    return draft.changed({"general.architecture": arch})


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_baichuan_7b_is_a_llama(tmp_path: Path, split: list[int]) -> None:
    llama = tiny_gguf(tmp_path / "llama.gguf", n_layer=2)
    path = renamed(llama, "baichuan").write(tmp_path / "baichuan.gguf")
    assert nmse(logits(path, split), PlainLlama(llama).logits(IDS)) <= TOLERANCE


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_the_first_qwen_counts_gate_and_up_together(tmp_path: Path, split: list[int]) -> None:
    qwen2 = tiny_gguf(tmp_path / "qwen2.gguf", arch="qwen2", n_ff=96, qkv_bias=True)
    draft = renamed(qwen2, "qwen").changed({"qwen.feed_forward_length": 2 * 96})
    path = draft.write(tmp_path / "qwen.gguf")
    assert nmse(logits(path, split), PlainLlama(qwen2).logits(IDS)) <= TOLERANCE


class PlainAlibi(PlainLlama):
    """ALiBi of six heads: the slopes of four, then two that lie between those of the first."""

    def rope(self, x: Array) -> Array:
        return x

    def mask(self, n: int, head: int) -> Array:
        slope = (2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3)[head]
        distance = np.arange(n)[:, None] - np.arange(n)
        return super().mask(n, head) - slope * distance


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_baichuan_13b_has_alibi(tmp_path: Path, split: list[int]) -> None:
    path = tiny_gguf(
        tmp_path / "m.gguf", arch="baichuan", n_layer=40, n_embd=48, n_head=6, n_head_kv=6, n_ff=64
    )
    assert nmse(logits(path, split), PlainAlibi(path).logits(IDS)) <= TOLERANCE
