"""Converted files with what reference files lack: factors, other heads, sizes per layer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import load_model
from engine.errors import InvalidGGUF
from tests.helpers.golden import TOLERANCE, Case, golden_error, golden_path, nmse
from tests.helpers.model_draft import DraftTensor, ModelDraft
from tests.helpers.plain_llama import Array, PlainLlama, silu
from tests.helpers.tiny_gguf import tiny_gguf

IDS = list(range(3, 40))
SPLITS = [[1], [1, 1], [3, 1, 2], [5, 0, 1]]
IN_STEPS = Case((2, 1), chunk=9, n_decode=3)
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def logits(path: Path, split: list[int]) -> Array:
    with load_model(path, ["cpu"] * len(split), split, kv_type="f32") as model:
        return np.asarray(model.logits(IDS), np.float64)


class PlainExperts(PlainLlama):
    """Experts with scales and biases, as many for a token as a layer's entry in a list says."""

    def moe(self, x: Array, p: str) -> Array:
        n_used = self.key("expert_used_count")
        n_used = n_used if isinstance(n_used, int) else n_used[int(p.split(".")[1])]
        out = np.zeros_like(x)
        for row, scores in enumerate(x @ self.t[f"{p}ffn_gate_inp.weight"].T):
            best = np.argsort(-scores)[:n_used]
            weights = np.exp(scores[best] - scores[best].max())
            for expert, weight in zip(best, weights / weights.sum(), strict=True):
                gate, up = (self.expert(x[row], f"{p}{name}", expert) for name in EXPERTS[:2])
                out[row] += weight * self.expert(silu(gate) * up, f"{p}{EXPERTS[2]}", expert)
        return out

    def expert(self, x: Array, name: str, expert: int) -> Array:
        factor = self.t[f"{name}.scale"][expert] if f"{name}.scale" in self.t else 1.0
        bias = self.t[f"{name}.bias"][expert] if f"{name}.bias" in self.t else 0.0
        y: Array = x @ self.t[f"{name}.weight"][expert].T * factor + bias
        return y


def with_experts(path: Path, widths: tuple[int, int], extra: dict[str, Any]) -> Path:
    """Return a llama of two layers with five experts of this many columns each."""
    rng = np.random.default_rng(7)
    parts: dict[str, Any] = {"llama.expert_count": 5, "llama.expert_used_count": 2}
    for layer, n_ff in enumerate(widths):
        p = f"blk.{layer}."
        for name, shape in (
            ("ffn_gate_inp", (5, 64)),
            ("ffn_gate_exps", (5, n_ff, 64)),
            ("ffn_up_exps", (5, n_ff, 64)),
            ("ffn_down_exps", (5, 64, n_ff)),
        ):
            values = rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
            parts[f"{p}{name}.weight"] = values
        parts |= {f"{p}ffn_{name}.weight": None for name in ("gate", "up", "down")}
    return tiny_gguf(path, extra=parts | extra)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_matrices_may_have_factors(tmp_path: Path, split: list[int]) -> None:
    """NVFP4 checkpoints have one per matrix, and one of activations that nothing rounds here."""
    rng = np.random.default_rng(3)
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    extra: dict[str, Any] = {}
    for layer in range(2):
        for name in names:
            p = f"blk.{layer}.{name}"
            extra[f"{p}.scale"] = rng.uniform(0.5, 2, 1).astype(np.float32)
            extra[f"{p}.input_scale"] = np.array([9], np.float32)
    path = tiny_gguf(tmp_path / "m.gguf", arch="qwen2", qkv_bias=True, extra=extra)
    assert nmse(logits(path, split), PlainLlama(path).logits(IDS)) <= TOLERANCE


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_fused_matrix_may_have_a_factor(tmp_path: Path, split: list[int]) -> None:
    """It is that of queries, keys and values; biases beside it are theirs, too."""
    plain = tiny_gguf(tmp_path / "plain.gguf", arch="qwen2", qkv_bias=True)
    fused = ModelDraft.read(plain)
    for layer in range(2):
        p = f"blk.{layer}.attn_"
        rows = [fused.tensors.pop(f"{p}{part}.weight") for part in "qkv"]
        joined = np.concatenate(
            [np.frombuffer(t.data, np.float32).reshape(t.shape) / 4 for t in rows]
        )
        fused.tensors[f"{p}qkv.weight"] = DraftTensor.of(joined)
        fused.tensors[f"{p}qkv.scale"] = DraftTensor.of(np.array([4], np.float32))
    path = fused.write(tmp_path / "fused.gguf")
    assert nmse(logits(path, split), PlainLlama(plain).logits(IDS)) <= TOLERANCE


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_experts_may_have_factors_and_biases(tmp_path: Path, split: list[int]) -> None:
    """The factor is one on the matrix: the bias is added after it."""
    rng = np.random.default_rng(5)
    extra: dict[str, Any] = {}
    for layer in range(2):
        for name, n_out in zip(EXPERTS, (96, 96, 64), strict=True):
            p = f"blk.{layer}.{name}"
            extra[f"{p}.scale"] = rng.uniform(0.5, 2, 5).astype(np.float32)
            extra[f"{p}.input_scale"] = np.full(5, 9, np.float32)
            extra[f"{p}.bias"] = rng.standard_normal((5, n_out), np.float32)
    path = with_experts(tmp_path / "m.gguf", (96, 96), extra)
    assert nmse(logits(path, split), PlainExperts(path).logits(IDS)) <= TOLERANCE


class PlainShared(PlainExperts):
    """Plain experts with a gated shared one that has a bias."""

    def moe(self, x: Array, p: str) -> Array:
        gate, up = (x @ self.t[f"{p}ffn_{name}_shexp.weight"].T for name in ("gate", "up"))
        shared = silu(gate) * up @ self.t[f"{p}ffn_down_shexp.weight"].T
        shared += self.t[f"{p}ffn_down_shexp.bias"]
        weight = 1 / (1 + np.exp(-(x @ self.t[f"{p}ffn_gate_inp_shexp.weight"])))
        return super().moe(x, p) + shared * weight[:, None]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_the_bias_of_a_shared_expert_counts_once(tmp_path: Path, split: list[int]) -> None:
    """Its gate weighs the bias, too; on several ranks one of them adds it."""
    rng = np.random.default_rng(6)
    extra: dict[str, Any] = {}
    for layer in range(2):
        for name, shape in (
            ("ffn_gate_shexp.weight", (96, 64)),
            ("ffn_up_shexp.weight", (96, 64)),
            ("ffn_down_shexp.weight", (64, 96)),
            ("ffn_down_shexp.bias", (64,)),
            ("ffn_gate_inp_shexp.weight", (64,)),
        ):
            values = rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
            extra[f"blk.{layer}.{name}"] = values
    path = with_experts(tmp_path / "m.gguf", (96, 96), extra)
    assert nmse(logits(path, split), PlainShared(path).logits(IDS)) <= TOLERANCE


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_norms_over_cut_rows_may_have_biases(tmp_path: Path, split: list[int]) -> None:
    rng = np.random.default_rng(8)
    extra = {
        f"blk.{layer}.{name}.bias": rng.standard_normal(n, np.float32)
        for layer in range(2)
        for name, n in (("attn_sub_norm", 64), ("ffn_sub_norm", 96))
    }
    path = tiny_gguf(tmp_path / "m.gguf", arch="bitnet", extra=extra)
    assert nmse(logits(path, split), PlainLlama(path).logits(IDS)) <= TOLERANCE


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("widths", [[96, 64], None], ids=["listed", "not said"])
def test_layers_may_differ_in_their_experts(
    tmp_path: Path, split: list[int], widths: list[int] | None
) -> None:
    """Nemotron 3 Puzzle lists both; the first files of Qwen 2 do not say how wide experts are."""
    lists = {"llama.expert_used_count": [3, 1], "llama.expert_feed_forward_length": widths}
    path = with_experts(tmp_path / "m.gguf", (96, 64), lists)
    assert nmse(logits(path, split), PlainExperts(path).logits(IDS)) <= TOLERANCE


@pytest.mark.parametrize("used", [[2, 0], [6, 2], 0, 6], ids=str)
def test_layers_must_use_experts_that_exist(tmp_path: Path, used: int | list[int]) -> None:
    path = with_experts(tmp_path / "m.gguf", (96, 96), {"llama.expert_used_count": used})
    with pytest.raises(InvalidGGUF, match=r"it uses [06] of 5 experts"):
        load_model(path, ["cpu"]).close()


def test_experts_in_tensors_of_their_own_are_named(tmp_path: Path) -> None:
    """llama.cpp no longer reads such files either (the first ones of Mixtral)."""
    draft = ModelDraft.read(with_experts(tmp_path / "m.gguf", (96, 96), {}))
    for layer in range(2):
        for part in ("gate", "up", "down"):
            joined = draft.tensors.pop(f"blk.{layer}.ffn_{part}_exps.weight")
            values = np.frombuffer(joined.data, np.float32).reshape(joined.shape)
            for expert, value in enumerate(values):
                name = f"blk.{layer}.ffn_{part}.{expert}.weight"
                draft.tensors[name] = DraftTensor.of(value)
    path = draft.write(tmp_path / "early.gguf")
    with pytest.raises(InvalidGGUF, match="stores each expert in a separate tensor"):
        load_model(path, ["cpu"]).close()


@pytest.mark.parametrize("name", ["qwen2moe-q5_k_m", "qwen3moe-q4_k_m", "glm4moe-q4_k_m"])
def test_a_file_need_not_say_how_wide_experts_are(tmp_path: Path, name: str) -> None:
    draft = ModelDraft.read(golden_path(f"{name}.gguf"))
    arch = draft.meta["general.architecture"]
    draft = draft.changed({f"{arch}.expert_feed_forward_length": None})
    path = draft.write(tmp_path / "m.gguf")
    assert golden_error(name, IN_STEPS, path) <= TOLERANCE


def test_what_follows_the_last_norm_in_other_uses_is_left_out(tmp_path: Path) -> None:
    """Rerankers have a classifier beside the (tied) output, embedding models dense layers."""
    plain = tiny_gguf(tmp_path / "plain.gguf", arch="qwen3", qk_norm=True, tied=True)
    draft = ModelDraft.read(plain)
    for name, shape in (
        ("cls.output.weight", (2, 64)),
        ("dense_2.weight", (128, 64)),
        ("dense_2.bias", (128,)),
        ("dense_3.weight", (64, 128)),
    ):
        draft.tensors[name] = DraftTensor.of(np.ones(shape, np.float32))
    draft = draft.changed({"qwen3.classifier.output_labels": ["yes", "no"]})
    path = draft.write(tmp_path / "m.gguf")
    assert np.array_equal(logits(path, [1, 1]), logits(plain, [1, 1]))


@pytest.mark.parametrize(
    ("name", "kind", "other"),
    [
        ("nemotron_h-q4_k_m", "layer_norm_rms_epsilon", "layer_norm_epsilon"),
        ("starcoder2-q4_k_m", "layer_norm_epsilon", "layer_norm_rms_epsilon"),
    ],
)
def test_the_epsilon_may_have_the_other_norms_key(
    tmp_path: Path, name: str, kind: str, other: str
) -> None:
    """It is not the default: with that one, the logits differ."""
    draft = ModelDraft.read(golden_path(f"{name}.gguf"))
    prefix = f"{draft.meta['general.architecture']}.attention."
    moved = {kind: None, other: 0.5}
    kept = {kind: 0.5, other: None}
    found = []
    for index, keys in enumerate((moved, kept)):
        path = draft.changed(keys, prefix).write(tmp_path / f"{index}.gguf")
        found.append(logits(path, [1, 1]))
    assert np.array_equal(*found)
    assert golden_error(name, IN_STEPS, path) > TOLERANCE


def test_the_reader_may_have_to_stretch_frequencies(tmp_path: Path) -> None:
    draft = ModelDraft.read(golden_path("hunyuan-dense-q4_k_m.gguf"))
    n_rot = draft.meta["hunyuan-dense.attention.key_length"]
    stretched = 10000.0 * 50.0 ** (n_rot / (n_rot - 2))
    found = []
    for index, keys in enumerate(
        (
            {"rope.freq_base": stretched},
            {"rope.freq_base": 10000.0, "rope.scaling.alpha": 50.0},
            {"rope.freq_base": 10000.0},
        )
    ):
        path = draft.changed(keys, "hunyuan-dense.").write(tmp_path / f"{index}.gguf")
        found.append(logits(path, [1, 1]))
    assert nmse(found[1], found[0]) <= TOLERANCE < nmse(found[2], found[0])
