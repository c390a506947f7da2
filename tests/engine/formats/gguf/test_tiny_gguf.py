"""The small models that other tests rest on."""

from pathlib import Path

import numpy as np
import pytest

from engine.formats.gguf.reader import GGUFFile
from tests.helpers.tiny_gguf import tiny_gguf


def test_the_same_arguments_give_the_same_file(tmp_path: Path) -> None:
    """And another seed gives others."""
    first = tiny_gguf(tmp_path / "a.gguf", seed=1).read_bytes()
    assert tiny_gguf(tmp_path / "b.gguf", seed=1).read_bytes() == first
    assert tiny_gguf(tmp_path / "c.gguf", seed=2).read_bytes() != first


def test_weights_keep_the_scale_of_what_passes_through(tmp_path: Path) -> None:
    """Matrices shrink with their fan-in and norms are near one."""
    with GGUFFile.open(tiny_gguf(tmp_path / "m.gguf", n_ff=1024)) as file:
        down = file.raw(file.tensors["blk.0.ffn_down.weight"]).read().view(np.float32)
        norm = file.raw(file.tensors["blk.0.ffn_norm.weight"]).read().view(np.float32)
    assert down.std() == pytest.approx(1 / 32, rel=0.05)
    assert norm.mean() == pytest.approx(1, abs=0.1)


def test_sizes_and_options_show_in_the_tensors(tmp_path: Path) -> None:
    """Heads of their own size, biases, norms of q and k, a tied head."""
    path = tiny_gguf(
        tmp_path / "m.gguf",
        arch="qwen3",
        n_layer=1,
        n_head=6,
        n_head_kv=3,
        head_dim=16,
        tied=True,
        qkv_bias=True,
        qk_norm=True,
    )
    with GGUFFile.open(path) as file:
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        assert file.meta.int("qwen3.attention.key_length") == 16
    assert shapes["blk.0.attn_q.weight"] == (96, 64)
    assert shapes["blk.0.attn_k.weight"] == (48, 64)
    assert shapes["blk.0.attn_output.weight"] == (64, 96)
    assert shapes["blk.0.attn_v.bias"] == (48,)
    assert shapes["blk.0.attn_q_norm.weight"] == (16,)
    assert "output.weight" not in shapes
    assert "blk.1.attn_q.weight" not in shapes


def test_only_rows_that_fit_are_quantised(tmp_path: Path) -> None:
    """Rows of 48 are no whole number of blocks of 32."""
    with GGUFFile.open(tiny_gguf(tmp_path / "m.gguf", quant="Q4_0", n_ff=48)) as file:
        types = {name: tensor.type.name for name, tensor in file.tensors.items()}
    assert types["blk.0.ffn_up.weight"] == types["token_embd.weight"] == "Q4_0"
    assert types["blk.0.ffn_down.weight"] == types["blk.0.attn_norm.weight"] == "F32"


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_a_vocabulary_holds_every_byte_and_fits_the_embedding(tmp_path: Path, arch: str) -> None:
    """It grows to what it needs and is padded to what was asked."""
    for n_vocab in (64, 500):
        with GGUFFile.open(tiny_gguf(tmp_path / "m.gguf", arch=arch, n_vocab=n_vocab)) as file:
            tokens = file.meta.strs("tokenizer.ggml.tokens")
            assert len(tokens) == len(set(tokens)) == max(n_vocab, len(tokens))
            assert len(tokens) > 256
            assert len(file.meta.ints("tokenizer.ggml.token_type")) == len(tokens)
            assert file.tensors["token_embd.weight"].shape[0] == len(tokens)


def test_every_merge_joins_two_tokens_into_a_third(tmp_path: Path) -> None:
    """Else the vocabulary would be one that no trainer writes."""
    with GGUFFile.open(tiny_gguf(tmp_path / "m.gguf", arch="qwen2")) as file:
        tokens = set(file.meta.strs("tokenizer.ggml.tokens"))
        for merge in file.meta.strs("tokenizer.ggml.merges"):
            left, right = merge.split(" ")
            assert {left, right, left + right} <= tokens


def test_extra_adds_replaces_and_drops(tmp_path: Path) -> None:
    """Metadata by value, tensors by array, and None takes a key away."""
    extra = {
        "llama.context_length": 7,
        "llama.rope.freq_base": None,
        "note": "x",
        "rope_freqs.weight": np.ones(8, dtype=np.float32),
    }
    with GGUFFile.open(tiny_gguf(tmp_path / "m.gguf", extra=extra)) as file:
        assert file.meta.int("llama.context_length") == 7
        assert "llama.rope.freq_base" not in file.meta
        assert file.meta.str("note") == "x"
        assert file.tensors["rope_freqs.weight"].shape == (8,)


def test_without_a_tokenizer_there_is_none(tmp_path: Path) -> None:
    """And the vocabulary has the asked size."""
    with GGUFFile.open(tiny_gguf(tmp_path / "m.gguf", tokenizer=False, n_vocab=40)) as file:
        assert not any(key.startswith("tokenizer.") for key in file.meta.keys())  # noqa: SIM118
        assert file.tensors["output.weight"].shape == (40, 64)
