"""The Llama family written plainly in numpy and float64: a reference that shares no code.

Reads tensors with the reference reader and dequantises with the reference code, so that it checks
parsing, dequantisation, placement and arithmetic at once.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize

Array = np.ndarray[Any, np.dtype[np.float64]]


class PlainLlama:
    """A model of one file; `logits(ids)` runs a whole sequence from scratch.

    Args:
        directions: vectors to add to the residual stream after a layer, by the layer's number.
    """

    def __init__(self, path: Path, directions: Mapping[int, Any] | None = None) -> None:
        self.directions = directions or {}
        reader = gguf.GGUFReader(path)
        self.t = {
            t.name: dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors
        }
        self.meta = {name: field.contents() for name, field in reader.fields.items()}
        self.arch = self.meta["general.architecture"]

    def key(self, name: str, default: Any = None) -> Any:
        return self.meta.get(f"{self.arch}.{name}", default)

    def logits(self, ids: list[int]) -> Array:
        x = self.t["token_embd.weight"][ids]
        for layer in range(self.key("block_count")):
            x = self.block(x, f"blk.{layer}.") + self.directions.get(layer, 0.0)
        x = self.norm(x, "output_norm.weight")
        return x @ self.t.get("output.weight", self.t["token_embd.weight"]).T

    def norm(self, x: Array, name: str) -> Array:
        eps = self.key("attention.layer_norm_rms_epsilon")
        y = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * self.t[name]
        return y + self.t.get(name.replace(".weight", ".bias"), 0.0)

    def linear(self, x: Array, name: str) -> Array:
        y = x @ self.t[f"{name}.weight"].T * self.t.get(f"{name}.scale", 1.0)
        return y + self.t[f"{name}.bias"] if f"{name}.bias" in self.t else y

    def block(self, x: Array, p: str) -> Array:
        a = self.attention(self.norm(x, f"{p}attn_norm.weight"), p)
        if f"{p}attn_sub_norm.weight" in self.t:
            a = self.norm(a, f"{p}attn_sub_norm.weight")
        x = x + self.linear(a, f"{p}attn_output")
        h = self.norm(x, f"{p}ffn_norm.weight")
        return x + (self.moe(h, p) if f"{p}ffn_gate_inp.weight" in self.t else self.ffn(h, p))

    def attention(self, x: Array, p: str) -> Array:
        n_head, n_kv = self.key("attention.head_count"), self.key("attention.head_count_kv")
        n = len(x)
        q = self.linear(x, f"{p}attn_q").reshape(n, n_head, -1)
        k = self.linear(x, f"{p}attn_k").reshape(n, n_kv, -1)
        v = self.linear(x, f"{p}attn_v").reshape(n, n_kv, -1)
        if f"{p}attn_q_norm.weight" in self.t:
            q = self.norm(q, f"{p}attn_q_norm.weight")
            k = self.norm(k, f"{p}attn_k_norm.weight")
        q, k = self.rope(q), self.rope(k)
        out = np.empty((n, n_head, v.shape[-1]))
        for head in range(n_head):
            kv = head // (n_head // n_kv)
            scores = q[:, head] @ k[:, kv].T / np.sqrt(q.shape[-1]) + self.mask(n, head)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, kv]
        return out.reshape(n, -1)

    def mask(self, n: int, head: int) -> Array:
        """Return the mask to add to a head's scores (n queries, n keys), which hides the future."""
        return np.triu(np.full((n, n), -np.inf), 1)

    def rope(self, x: Array) -> Array:
        n_rot = self.key("rope.dimension_count", x.shape[-1])
        base = self.key("rope.freq_base", 10000.0)
        frequency = base ** (-np.arange(0, n_rot, 2) / n_rot)
        angle = np.arange(len(x))[:, None, None] * frequency
        cos, sin = np.cos(angle), np.sin(angle)
        y = x.copy()
        if self.arch == "llama":
            first, second = slice(0, n_rot, 2), slice(1, n_rot, 2)
        else:
            first, second = slice(0, n_rot // 2), slice(n_rot // 2, n_rot)
        y[..., first] = x[..., first] * cos - x[..., second] * sin
        y[..., second] = x[..., first] * sin + x[..., second] * cos
        return y

    def ffn(self, x: Array, p: str) -> Array:
        inner = silu(self.linear(x, f"{p}ffn_gate")) * self.linear(x, f"{p}ffn_up")
        if f"{p}ffn_sub_norm.weight" in self.t:
            inner = self.norm(inner, f"{p}ffn_sub_norm.weight")
        return self.linear(inner, f"{p}ffn_down")

    def moe(self, x: Array, p: str) -> Array:
        gate, up, down = (self.t[f"{p}ffn_{name}_exps.weight"] for name in ("gate", "up", "down"))
        router = x @ self.t[f"{p}ffn_gate_inp.weight"].T
        out = np.zeros_like(x)
        for row, scores in enumerate(router):
            best = np.argsort(-scores)[: self.key("expert_used_count")]
            weights = np.exp(scores[best] - scores[best].max())
            for expert, weight in zip(best, weights / weights.sum(), strict=True):
                h = silu(x[row] @ gate[expert].T) * (x[row] @ up[expert].T)
                out[row] += weight * (h @ down[expert].T)
        return out


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))
