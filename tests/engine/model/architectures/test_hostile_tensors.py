"""Well-formed files whose tensors do not make a model: each gives a sentence, nothing else."""

from pathlib import Path

import numpy as np
import pytest

from engine import EngineError, load_model
from engine.errors import UnsupportedQuant
from tests.helpers.model_draft import DraftTensor, ModelDraft
from tests.helpers.refusals import answers, refusal
from tests.helpers.tiny_gguf import tiny_gguf

NAN, INF = float("nan"), float("inf")
Q8_K = 15


def values(*shape: int) -> DraftTensor:
    rng = np.random.default_rng(1)
    return DraftTensor.of(rng.standard_normal(shape).astype(np.float32))


MISSHAPEN = [
    ("token_embd.weight", values(1, 64)),
    ("token_embd.weight", values(64, 301)),
    ("token_embd.weight", values(301)),
    ("token_embd.weight", values(301 * 64)),
    ("token_embd.weight", values(301, 64, 1)),
    ("token_embd.weight", values(1, 301, 64)),
    ("token_embd.weight", values(306, 64)),
    ("token_embd.weight", values(296, 64)),
    ("output.weight", values(306, 64)),
    ("output.weight", values(296, 64)),
    ("output.weight", values(64, 301)),
    ("output.weight", values(301)),
    ("output_norm.weight", values(64, 1)),
    ("blk.1.attn_norm.weight", values(63)),
    ("blk.0.attn_output.weight", values(32, 64)),
    ("blk.0.attn_q.bias", values(32)),
    ("blk.0.attn_q.scale", values(2)),
    ("rope_freqs.weight", values(7)),
    ("blk.0.attn_qkv.weight", values(127, 64)),
    ("blk.0.attn_qkv.weight", values(128, 64, 1)),
]


@pytest.mark.parametrize(
    ("name", "tensor"), MISSHAPEN, ids=[f"{name}-{t.shape}" for name, t in MISSHAPEN]
)
def test_a_misshapen_tensor_is_refused(
    sound: ModelDraft, path: Path, name: str, tensor: DraftTensor
) -> None:
    draft = sound.copy()
    draft.tensors[name] = tensor
    sentence = refusal(draft, path)
    assert "shape" in sentence or "token_embd.weight" in sentence


def test_every_missing_tensor_but_the_output_head_is_named(sound: ModelDraft, path: Path) -> None:
    for name in sound.tensors:
        draft = sound.copy()
        del draft.tensors[name]
        if name == "output.weight":
            assert len(answers(draft, path)) == 3  # the embedding serves as the head
        else:
            assert name in refusal(draft, path)


def vocabulary(draft: ModelDraft, n: int) -> ModelDraft:
    draft = draft.copy()
    tokens = draft.meta["tokenizer.ggml.tokens"]
    tokens = (tokens + [f"<more {i}>" for i in range(n)])[:n]
    draft.meta |= {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * n,
        "tokenizer.ggml.token_type": [1] * n,
    }
    return draft


def test_more_tokens_than_rows_are_refused(sound: ModelDraft, path: Path) -> None:
    """Text could turn into tokens that the model does not have."""
    sentence = refusal(vocabulary(sound, 302), path)
    assert "302 tokens, but token_embd.weight has 301 rows" in sentence


@pytest.mark.parametrize("n", [2, 290, 300])
def test_rows_without_a_token_are_padding(sound: ModelDraft, path: Path, n: int) -> None:
    assert len(answers(vocabulary(sound, n), path)) == 3


@pytest.mark.parametrize("value", [NAN, INF, -INF, 3e38])
@pytest.mark.parametrize("name", ["output.weight", "blk.0.attn_q.weight", "blk.1.ffn_down.weight"])
def test_weights_that_are_no_numbers_end_in_a_sentence(
    sound: ModelDraft, path: Path, name: str, value: float
) -> None:
    draft = sound.copy()
    shape = draft.tensors[name].shape
    draft.tensors[name] = DraftTensor.of(np.full(shape, value, np.float32))
    with pytest.raises(EngineError, match="no usable probabilities"):
        answers(draft, path)


@pytest.mark.parametrize("value", [0.0, NAN])
def test_broken_rope_factors_end_in_a_sentence(sound: ModelDraft, path: Path, value: float) -> None:
    draft = sound.copy()
    draft.tensors["rope_freqs.weight"] = DraftTensor.of(np.full(8, value, np.float32))
    with pytest.raises(EngineError, match="no usable probabilities"):
        answers(draft, path)


def test_integer_weights_are_numbers_like_others(sound: ModelDraft, path: Path) -> None:
    """GGUF has integer tensors, so a model may be stored in them."""
    draft, same = sound.copy(), sound.copy()
    ones = np.ones((64,), np.float32)
    draft.tensors["blk.0.attn_norm.weight"] = DraftTensor.of(ones.astype(np.int32))
    same.tensors["blk.0.attn_norm.weight"] = DraftTensor.of(ones)
    assert answers(draft, path) == answers(same, path)


def test_a_type_that_cannot_be_read_is_named(folder: Path, path: Path) -> None:
    draft = ModelDraft.read(tiny_gguf(folder / "wide.gguf", n_embd=256, tokenizer=False))
    name = "blk.1.ffn_up.weight"
    n_rows = draft.tensors[name].shape[0]
    draft.tensors[name] = DraftTensor((n_rows, 256), Q8_K, bytes(n_rows * 292))
    draft.write(path)
    with pytest.raises(UnsupportedQuant, match=f"stores {name} as Q8_K"):
        load_model(path)


def test_a_fused_bias_that_cannot_be_taken_apart_is_refused(folder: Path, path: Path) -> None:
    """Its parts end inside a block of its type."""
    draft = ModelDraft.read(
        tiny_gguf(folder / "odd.gguf", n_head=2, n_head_kv=1, head_dim=24, tokenizer=False)
    )
    draft.tensors["blk.0.attn_qkv.bias"] = DraftTensor((96,), 8, bytes(3 * 34))
    assert "blk.0.attn_qkv.bias" in refusal(draft, path)
