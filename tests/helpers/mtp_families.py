"""Small models of further families with an MTP block, and the same plainly in float64.

Which hidden state a block reads, its parts and their order are those of the published modelling
codes, as llama.cpp has them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.mtp_models import PlainMTP
from tests.helpers.plain_llama import Array, silu
from tests.helpers.tiny_gguf import tiny_gguf

N_EMBD, N_EXPERT, N_FF_EXP, N_FF_SHARED, N_VOCAB = 64, 4, 32, 64, 320
WINDOW = 9

Random = Callable[..., np.ndarray]
Tensors = dict[str, np.ndarray]


def family_gguf(path: Path, family: str, *, quant: str = "F32", seed: int = 0) -> Path:
    """Write a model of two blocks and an MTP block, and return `path`.

    Args:
        family: one of `FAMILIES`.
    """
    rng = np.random.default_rng(seed + 7)

    def matrix(*shape: int) -> np.ndarray:
        made = rng.standard_normal(shape, dtype=np.float32)
        return 1 + 0.2 * made if len(shape) == 1 else made / np.float32(np.sqrt(shape[-1]))

    arch, meta, blocks = FAMILIES[family](matrix)
    blocks[-1] |= {
        "nextn.enorm": matrix(N_EMBD), "nextn.hnorm": matrix(N_EMBD),
        "nextn.eh_proj": matrix(N_EMBD, 2 * N_EMBD),
    }  # fmt: skip
    extra: dict[str, Any] = {f"{arch}.{key}": value for key, value in meta.items()}
    extra[f"{arch}.nextn_predict_layers"] = 1
    for layer, block in enumerate(blocks):
        for name in PLAIN:
            extra[f"blk.{layer}.{name}.weight"] = None
        for name, value in block.items():
            extra[f"blk.{layer}.{name}" + ("" if name.endswith(".bias") else ".weight")] = value
    sizes = {"n_vocab": N_VOCAB, "tokenizer": False, "n_ctx": 600}
    return tiny_gguf(path, arch=arch, n_layer=len(blocks), extra=extra, quant=quant, **sizes)


PLAIN = (
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up",
    "ffn_down",
)  # fmt: skip
"""Tensors of a block that `tiny_gguf` writes unless told otherwise."""


def attention(matrix: Random, n_kv: int = 2) -> Tensors:
    return {
        "attn_norm": matrix(N_EMBD), "attn_q": matrix(N_EMBD, N_EMBD),
        "attn_k": matrix(16 * n_kv, N_EMBD), "attn_v": matrix(16 * n_kv, N_EMBD),
        "attn_output": matrix(N_EMBD, N_EMBD),
    }  # fmt: skip


def experts(matrix: Random, n_in: int = N_EMBD, *, is_gated: bool = True) -> Tensors:
    found = {"ffn_gate_inp": matrix(N_EXPERT, N_EMBD), "exp_probs_b.bias": matrix(1, N_EXPERT)[0]}
    for part in ("gate", "up", "down") if is_gated else ("up", "down"):
        routed, shared = (N_FF_EXP, n_in), (N_FF_SHARED, N_EMBD)
        if part == "down":
            routed, shared = routed[::-1], shared[::-1]
        found[f"ffn_{part}_exps"] = matrix(N_EXPERT, *routed)
        found[f"ffn_{part}_shexp"] = matrix(*shared)
    return found


def routing(**more: Any) -> dict[str, Any]:
    return {
        "expert_count": N_EXPERT, "expert_used_count": 2, "expert_feed_forward_length": N_FF_EXP,
        "expert_shared_feed_forward_length": N_FF_SHARED, "expert_shared_count": 1,
        "expert_weights_norm": True, "expert_weights_scale": 1.5, "expert_gating_func": 2, **more,
    }  # fmt: skip


Family = tuple[str, dict[str, Any], list[Tensors]]


def nemotron(matrix: Random, latent: int = 0) -> Family:
    """Return Nemotron 3: blocks of attention or experts, a guessing one of both."""
    parts = experts(matrix, latent or N_EMBD, is_gated=False)
    if latent:
        parts["ffn_latent_down"] = matrix(latent, N_EMBD)
        parts["ffn_latent_up"] = matrix(N_EMBD, latent)
    norm = {"attn_norm": matrix(N_EMBD)}
    name = "ffn_norm" if latent else "post_attention_norm"  # files may have either
    mtp = attention(matrix) | parts | {name: matrix(N_EMBD)}
    meta = routing(**{"attention.head_count_kv": [2, 0, 2], "feed_forward_length": [0, 32, 32]})
    if latent:
        meta["moe_latent_size"] = latent
    return "nemotron_h_moe", meta, [attention(matrix), norm | parts, mtp]


def cohere(matrix: Random) -> Family:
    """Return Command with experts: parallel blocks, a dense one that rotates, a window."""
    dense = {"ffn_gate": matrix(96, N_EMBD), "ffn_up": matrix(96, N_EMBD)}
    dense["ffn_down"] = matrix(N_EMBD, 96)
    blocks = [attention(matrix) | (experts(matrix) if n else dense) for n in range(3)]
    for block in blocks:
        block.pop("exp_probs_b.bias", None)
    meta = routing(leading_dense_block_count=1, logit_scale=0.7)
    meta |= {"attention.sliding_window": WINDOW}
    meta |= {"attention.sliding_window_pattern": [False, True, True]}
    return "cohere2moe", meta, blocks


def bailing(matrix: Random) -> Family:
    """Return Ling: experts behind normalised heads, and a norm of its own behind the guess."""
    blocks = []
    for _ in range(3):
        heads = {"attn_q_norm": matrix(16), "attn_k_norm": matrix(16), "ffn_norm": matrix(N_EMBD)}
        blocks.append(attention(matrix) | experts(matrix) | heads)
    blocks[-1]["layer_output_norm"] = matrix(N_EMBD)
    return "bailingmoe2", routing(), blocks


RANK, NOPE, ROPE, VALUE = 32, 16, 8, 16


def deepseek(matrix: Random) -> Family:
    """Return DeepSeek V3: experts behind latent attention."""
    blocks = []
    for _ in range(3):
        latent = {
            "attn_norm": matrix(N_EMBD), "attn_q": matrix(4 * (NOPE + ROPE), N_EMBD),
            "attn_kv_a_mqa": matrix(RANK + ROPE, N_EMBD), "attn_kv_a_norm": matrix(RANK),
            "attn_k_b": matrix(4, RANK, NOPE), "attn_v_b": matrix(4, VALUE, RANK),
            "attn_output": matrix(N_EMBD, 4 * VALUE), "ffn_norm": matrix(N_EMBD),
        }  # fmt: skip
        blocks.append(latent | experts(matrix))
    blocks[-1]["nextn.shared_head_norm"] = matrix(N_EMBD)
    meta = routing(leading_dense_block_count=0) | {
        "attention.head_count_kv": 1, "attention.q_lora_rank": 0,
        "attention.kv_lora_rank": RANK, "attention.key_length": RANK + ROPE,
        "attention.value_length": RANK, "attention.key_length_mla": NOPE + ROPE,
        "attention.value_length_mla": VALUE, "rope.dimension_count": ROPE,
    }  # fmt: skip
    return "deepseek2", meta, blocks


FAMILIES: dict[str, Callable[[Random], Family]] = {
    "nemotron": nemotron,
    "nemotron latent": lambda matrix: nemotron(matrix, 32),
    "cohere": cohere,
    "bailing": bailing,
    "deepseek": deepseek,
}


class PlainFamilyMTP(PlainMTP):
    """Model of a file that `family_gguf` has written, in float64."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        final = f"{self.own}layer_output_norm.weight"
        if final in self.t:
            self.t[f"{self.own}nextn.shared_head_norm.weight"] = self.t[final]
        self._block = ""

    def key(self, name: str, default: Any = None) -> Any:
        found = super().key(name, default)
        is_list = name == "attention.head_count_kv" and self.arch == "nemotron_h_moe"
        return max(found) if is_list else found

    def trunk(self, ids: Any) -> Array:
        return super().trunk(ids) * self.key("logit_scale", 1.0)

    def pairs(self, ids: Any, before: Array, number: int = 0) -> tuple[Array, Array]:
        logits, own = super().pairs(ids, before, number)
        return logits * self.key("logit_scale", 1.0), own

    def block(self, x: Array, p: str) -> Array:
        self._block = p
        has_attention = f"{p}attn_output.weight" in self.t
        first = self.norm(x, f"{p}attn_norm.weight")
        mixed = 0.0
        if has_attention:
            heads = self.latent(first, p) if self.arch == "deepseek2" else self.attention(first, p)
            mixed = self.linear(heads, f"{p}attn_output")
        if self.arch == "cohere2moe":
            return x + mixed + self.feed(first, p)
        x = x + mixed
        if f"{p}ffn_gate_inp.weight" not in self.t:
            return x
        names = [f"{p}{n}.weight" for n in ("post_attention_norm", "ffn_norm", "attn_norm")]
        return x + self.feed(self.norm(x, next(name for name in names if name in self.t)), p)

    @property
    def _is_local(self) -> bool:
        return self.arch == "cohere2moe" and self._block == "blk.1."

    def rope(self, x: Array) -> Array:
        if self.arch == "nemotron_h_moe":
            return x
        if self.arch == "bailingmoe2":
            return super().rope(x)
        n_rot = self.key("rope.dimension_count")
        angle = np.arange(len(x))[:, None, None] * self.key("rope.freq_base") ** (
            -np.arange(0, n_rot, 2) / n_rot
        )
        pair = x[..., 0:n_rot:2] + 1j * x[..., 1:n_rot:2]
        turned, y = pair * np.exp(1j * angle), x.copy()
        y[..., 0:n_rot:2], y[..., 1:n_rot:2] = turned.real, turned.imag
        return y

    def mask(self, n: int, head: int) -> Array:
        mask = super().mask(n, head)
        if self._is_local:
            mask[np.tri(n, k=-WINDOW, dtype=bool)] = -np.inf
        return mask

    def latent(self, x: Array, p: str) -> Array:
        """Return the heads of latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""
        n = len(x)
        q = self.linear(x, f"{p}attn_q").reshape(n, 4, NOPE + ROPE)
        compressed = self.linear(x, f"{p}attn_kv_a_mqa")
        c = self.norm(compressed[:, :RANK], f"{p}attn_kv_a_norm.weight")
        turned = self.rope(compressed[:, None, RANK:])[:, 0]
        q_turned, out = self.rope(q[..., NOPE:]), np.empty((n, 4, VALUE))
        for head in range(4):
            k = c @ self.t[f"{p}attn_k_b.weight"][head]
            v = c @ self.t[f"{p}attn_v_b.weight"][head].T
            scores = q[:, head, :NOPE] @ k.T + q_turned[:, head] @ turned.T
            scores = scores / np.sqrt(NOPE + ROPE) + self.mask(n, head)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = weights / weights.sum(-1, keepdims=True) @ v
        return out.reshape(n, -1)

    def feed(self, x: Array, p: str) -> Array:
        """Return what FFN or experts give: the chosen ones by sigmoid, with the shared one."""
        if f"{p}ffn_gate_inp.weight" not in self.t:
            return self.ffn(x, p)
        shared = self._expert(x, p, lambda part: self.t[f"{p}ffn_{part}_shexp.weight"])
        narrow = x
        if f"{p}ffn_latent_down.weight" in self.t:
            narrow = self.linear(x, f"{p}ffn_latent_down")
        scores = 1 / (1 + np.exp(-(x @ self.t[f"{p}ffn_gate_inp.weight"].T)))
        biased = scores + self.t.get(f"{p}exp_probs_b.bias", 0.0)
        routed = np.zeros_like(narrow)
        for row, chosen in enumerate(np.argsort(-biased, axis=-1)[:, :2]):
            weights = scores[row, chosen] / scores[row, chosen].sum()
            for expert, weight in zip(chosen, weights, strict=True):

                def matrix(part: str, at: int = expert) -> Array:
                    return self.t[f"{p}ffn_{part}_exps.weight"][at]

                factor = weight * self.key("expert_weights_scale")
                routed[row] += factor * self._expert(narrow[row], p, matrix)
        if narrow is not x:
            routed = self.linear(routed, f"{p}ffn_latent_up")
        total = routed + shared
        return total / 2 if self.arch == "cohere2moe" else total

    def _expert(self, x: Array, p: str, matrix: Callable[[str], Array]) -> Array:
        up = x @ matrix("up").T
        if self.arch == "nemotron_h_moe":
            inner = np.maximum(up, 0) ** 2
        else:
            inner = silu(x @ matrix("gate").T) * up
        return inner @ matrix("down").T
