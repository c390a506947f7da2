"""Small models with MTP blocks, and the same computed plainly in float64.

The formulas are those of DeepSeek-V3 (arXiv 2412.19437, section 2.2): the first block sees pairs of
a token's embedding and the hidden state of the token before it, and each further one pairs of a
token's embedding and the output of the block before at the token before.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.model_draft import DraftTensor, ModelDraft
from tests.helpers.plain_llama import Array, PlainLlama, silu
from tests.helpers.tiny_gguf import tiny_gguf

N_EMBD, N_LAYER = 64, 2
MTP = f"blk.{N_LAYER}."
OWN = ("embed_tokens", "shared_head_norm", "shared_head_head")
"""Tensors that a file may have of the block, or leave to the trunk."""


def mtp_gguf(
    path: Path, arch: str = "glm4moe", *, own: Sequence[str] = (), n_mtp: int = 1, seed: int = 0,
    **options: Any,
) -> Path:  # fmt: skip
    """Write a model of `N_LAYER` blocks and MTP blocks behind them, and return `path`.

    Args:
        arch: "glm4moe", dense; "qwen35" without recurrent layers, or "step35" with windows.
        own: those of `OWN` that the file has.
        options: see `tiny_gguf`; metadata and tensors to change are `extra`.
    """
    rng, n_vocab = np.random.default_rng(seed + 1), 320
    extra: dict[str, Any] = {f"{arch}.nextn_predict_layers": n_mtp}
    for layer in range(N_LAYER + n_mtp):
        block = f"blk.{layer}."
        if arch in ("glm4moe", "qwen35"):
            extra[f"{block}ffn_norm.weight"] = None
            extra[f"{block}post_attention_norm.weight"] = _norm(rng)
        if arch == "qwen35":
            extra[f"{block}attn_q.weight"] = _matrix(rng, 2 * N_EMBD, N_EMBD)
        if layer >= N_LAYER:
            found = {"enorm": _norm(rng), "hnorm": _norm(rng)}
            found["eh_proj"] = _matrix(rng, N_EMBD, 2 * N_EMBD)
            for name in own:
                made = _norm(rng) if "norm" in name else _matrix(rng, n_vocab, N_EMBD)
                found[name] = made
            extra |= {f"{block}nextn.{name}.weight": value for name, value in found.items()}
    if arch == "qwen35":
        extra["qwen35.attention.recurrent_layers"] = [False] * N_LAYER
    if arch == "step35":
        extra["step35.attention.sliding_window"] = 9
        extra["step35.rope.freq_base_swa"] = 1000.0
    changed = extra | options.pop("extra", {})
    sizes = {"n_vocab": n_vocab, "tokenizer": False, "qk_norm": True, "n_ctx": 600} | options
    return tiny_gguf(
        path, arch=arch, n_layer=N_LAYER + n_mtp, n_embd=N_EMBD, seed=seed, extra=changed, **sizes
    )


def apart(path: Path, name: str = "mtp-m.gguf", **changed: DraftTensor | None) -> tuple[Path, Path]:
    """Write a model with MTP blocks as two files beside it, as llama.cpp's converter does.

    Args:
        name: name of the file of the blocks.
        changed: tensors of that file to replace, or None to leave one out, by names without
            ".weight".

    Returns:
        The file without the blocks, under `path`, and the file of the blocks.
    """
    whole = ModelDraft.read(path)
    arch = whole.meta["general.architecture"]
    n_layer = whole.meta[f"{arch}.block_count"]
    n_trunk = n_layer - whole.meta[f"{arch}.nextn_predict_layers"]
    own = tuple(f"blk.{layer}." for layer in range(n_trunk, n_layer))
    trunk = whole.changed({"block_count": n_trunk, "nextn_predict_layers": None}, f"{arch}.")
    for key, value in trunk.meta.items():
        if key.startswith(f"{arch}.") and isinstance(value, list):
            trunk.meta[key] = value[:n_trunk]
    trunk.tensors = {n: t for n, t in whole.tensors.items() if not n.startswith(own)}
    shared = ("token_embd.weight", "output_norm.weight", "output.weight")
    block = ModelDraft(whole.meta, {})
    for tensor, value in whole.tensors.items():
        if tensor in shared or tensor.startswith(own):
            block.tensors[tensor] = value
    for tensor, other in changed.items():
        key = tensor if tensor == "d2t" else f"{tensor}.weight"
        block.tensors.pop(key, None)
        if other is not None:
            block.tensors[key] = other
    return trunk.write(path), block.write(path.with_name(name))


def _norm(rng: np.random.Generator) -> np.ndarray:
    return 1 + 0.2 * rng.standard_normal(N_EMBD, dtype=np.float32)


def _matrix(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(shape[-1]))


GATED = "qwen35", "qwen35moe", "qwen3next"
"""Architectures whose heads have a gate each, with its rows behind those of the query."""


class PlainMTP(PlainLlama):
    """Model of a file with MTP blocks, in float64."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        for name in [name for name in self.t if name.endswith("post_attention_norm.weight")]:
            self.t[name.replace("post_attention", "ffn")] = self.t[name]
        self.is_normed, self._is_windowed = self.arch != "step35", False
        self.n_blocks = self.key("nextn_predict_layers", 0)
        self.n_trunk = self.key("block_count") - self.n_blocks
        self.own = f"blk.{self.n_trunk}."

    def hidden(self, ids: Sequence[int]) -> Array:
        """Return the trunk's hidden states that the first block reads."""
        x = self.t["token_embd.weight"][list(ids)]
        for layer in range(self.n_trunk):
            x = self.block(x, f"blk.{layer}.")
        return self.norm(x, "output_norm.weight") if self.is_normed else x

    def trunk(self, ids: Sequence[int]) -> Array:
        """Return the trunk's logits, (ids, n_vocab)."""
        x = self.hidden(ids)
        x = x if self.is_normed else self.norm(x, "output_norm.weight")
        return x @ self.t["output.weight"].T

    def guesses(self, ids: Sequence[int]) -> Array:
        """Return the first block's logits behind each token but the first, (ids - 1, n_vocab)."""
        return self.pairs(ids, self.hidden(ids)[:-1])[0]

    def chain(self, ids: Sequence[int], n: int) -> list[int]:
        """Return n guesses of what follows ids; see `chain_logits`."""
        return [int(logits.argmax()) for logits in self.chain_logits(ids, n)]

    def chain_logits(self, ids: Sequence[int], n: int) -> list[Array]:
        """Return the logits of n guesses of what follows ids, each behind those before it.

        A block that is alone makes them all, with its output as hidden state of a guess; else each
        is the next block's.
        """
        before, text, found = self.hidden(ids)[:-1], list(ids), []
        for number in range(n):
            if self.n_blocks == 1:
                logits, own = self.pairs(text, before)
                before = np.concatenate([before, own[-1:]])
            else:
                logits, before = self.pairs(text[number:], before, number)
            found.append(logits[-1])
            text.append(int(logits[-1].argmax()))
        return found

    def pairs(self, ids: Sequence[int], before: Array, number: int = 0) -> tuple[Array, Array]:
        """Return logits and output of a block for tokens 1 on and hidden states of those before.

        The first block's first pair is at position 1, as in the engine; no score depends on where
        a text begins.

        Args:
            number: index of the block.
        """
        p = f"blk.{self.n_trunk + number}."
        table = self.t.get(f"{p}nextn.embed_tokens.weight", self.t["token_embd.weight"])
        e = self.norm(table[list(ids[1:])], f"{p}nextn.enorm.weight")
        h = self.norm(before, f"{p}nextn.hnorm.weight")
        x = self.linear(np.concatenate([e, h], axis=-1), f"{p}nextn.eh_proj")
        x = self.block(x, p)
        head_norm = f"{p}nextn.shared_head_norm.weight"
        y = self.norm(x, head_norm if head_norm in self.t else "output_norm.weight")
        head = self.t.get(f"{p}nextn.shared_head_head.weight", self.t["output.weight"])
        return y @ head.T, y if self.is_normed else x

    def block(self, x: Array, p: str) -> Array:
        self._is_windowed = self.arch == "step35" and int(p.split(".")[1]) % 4 > 0
        return super().block(x, p)

    def mask(self, n: int, head: int) -> Array:
        mask = super().mask(n, head)
        if self._is_windowed:
            mask[np.tri(n, k=-self.key("attention.sliding_window"), dtype=bool)] = -np.inf
        return mask

    def key(self, name: str, default: Any = None) -> Any:
        found = super().key(name, default)
        if self.arch == "step35" and name == "rope.freq_base" and self._is_windowed:
            return super().key("rope.freq_base_swa")
        if self.arch == "step35" and name == "rope.dimension_count" and not self._is_windowed:
            return found // 2
        return found

    def attention(self, x: Array, p: str) -> Array:
        heads = super().attention(x, p)
        if self.arch not in GATED:
            return heads
        gate = self._query_and_gate(x, f"{p}attn_q")[:, 1]
        return heads / (1 + np.exp(-gate.reshape(heads.shape)))

    def linear(self, x: Array, name: str) -> Array:
        if self.arch in GATED and name.endswith("attn_q"):
            return self._query_and_gate(x, name)[:, 0].reshape(len(x), -1)
        return super().linear(x, name)

    def _query_and_gate(self, x: Array, name: str) -> Array:
        """Return (ids, 2, heads, head_dim): the rows of each head's query, then of its gate."""
        n_head = self.key("attention.head_count")
        return super().linear(x, name).reshape(len(x), n_head, 2, -1).swapaxes(1, 2)

    def moe(self, x: Array, p: str) -> Array:
        """Return what routed experts give, and the shared one behind a gate (Qwen2-MoE)."""
        routed = super().moe(x, p)
        if f"{p}ffn_gate_inp_shexp.weight" not in self.t:
            return routed
        gate, up, down = (self.t[f"{p}ffn_{name}_shexp.weight"] for name in ("gate", "up", "down"))
        shared = silu(x @ gate.T) * (x @ up.T) @ down.T
        weight = self.t[f"{p}ffn_gate_inp_shexp.weight"].reshape(-1)
        return routed + shared / (1 + np.exp(-(x @ weight)))[:, None]
