"""Hyperparameters of a model under llama.cpp's names, read from metadata and validated."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from engine.errors import InvalidGGUF
from engine.formats.gguf.tensors import split_name
from engine.model.forward.operands import RopeParams, RopeStyle
from engine.model.layers.keys import Keys, read_rope

if TYPE_CHECKING:
    from engine.formats.gguf.reader import GGUFFile

Flags = tuple[bool, ...]
Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of an architecture that its files do not state.

    Attributes:
        rope_style: pairing of the rotated elements; None if there is no RoPE.
        norm_eps: kind of norm whose key contains the epsilon for all norms.
        swa_period: period of full-attention layers among sliding-window layers, if the file has no
            pattern; 0 for no windows.
        swa_first_full: whether the full-attention layer is the first of each period, not the last.
        n_swa: length of a sliding window in tokens, if the file does not specify it.
        recurrent_period: period of attention layers (the last of each period) among recurrent ones,
            if the file does not specify it; 0 if layers without key-value heads are the recurrent
            ones.
        is_hybrid: whether some layers have no attention.
        mtp_hidden: hidden state that MTP blocks read: the last block's ("raw") or the one after the
            final norm ("normed"); None if MTP blocks are not supported.
    """

    rope_style: RopeStyle | None = "norm"
    norm_eps: Literal["rms", "layer"] = "rms"
    swa_period: int = 0
    swa_first_full: bool = False
    n_swa: int = 0
    recurrent_period: int = 0
    is_hybrid: bool = False
    mtp_hidden: Literal["raw", "normed"] | None = None


@dataclass(frozen=True, slots=True)
class HParams:
    """Sizes of one model; tuples have one entry per layer.

    Attributes:
        n_layer: number of loaded blocks.
        n_vocab: number of rows in the embedding.
        n_ctx_train: context length in training; 0 if unknown.
        n_ctx: context length for which the model is loaded.
        n_head, n_head_kv: numbers of query heads and of key-value heads.
        head_dim_k, head_dim_v: elements per query or key head, and per value head.
        n_ff: columns of the dense FFN; 0 in layers with experts only.
        n_expert_used: experts per token.
        n_ff_exp, n_ff_shexp: columns of one routed expert and of the shared expert; 0 if absent.
        norm_eps: epsilon of all norms.
        n_swa: length of a sliding window, including the current token; 0 for no windows.
        swa: whether a layer has a sliding window.
        recurrent: whether a layer has a recurrent state instead of attention.
        tied: whether the output head shares the embedding matrix.
        keys: the file's metadata, for keys that only some families have.
        tensors: names of all tensors in the file.
        n_mtp: number of MTP blocks, which are the last blocks.
        copies_head: whether the output head is a separate copy of the embedding.
        n_guessed: size of the draft vocabulary (its first tokens); 0 for all tokens.
        n_own_head: number of rows in MTP blocks' own heads, if reduced.
    """

    architecture: str
    n_layer: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    n_ctx: int
    n_head: Ints
    n_head_kv: Ints
    head_dim_k: Ints
    head_dim_v: Ints
    n_ff: Ints
    n_expert: int
    n_expert_used: Ints
    n_ff_exp: Ints
    n_ff_shexp: Ints
    norm_eps: float
    n_swa: int
    swa: Flags
    recurrent: Flags
    rope: RopeParams
    tied: bool
    keys: Keys
    tensors: frozenset[str]
    n_mtp: int = 0
    copies_head: bool = False
    n_guessed: int = 0
    n_own_head: int = 0

    @classmethod
    def read(cls, file: GGUFFile, traits: Traits, n_mtp: int = 0) -> HParams:
        """Read the sizes of a decoder-only model with `n_mtp` MTP blocks.

        Raises:
            InvalidGGUF: a key is missing, or sizes contradict each other.
        """
        keys = Keys(file.meta)
        keys.check_bounds()
        n_trunk = n_trunk_blocks(keys)
        n_layer = n_trunk + n_mtp
        n_embd = keys.integer("embedding_length")
        n_ctx_train = keys.integer("context_length", 0)
        n_head = _per_layer(keys, "attention.head_count", n_layer, traits)
        n_head_kv = _per_layer(keys, "attention.head_count_kv", n_layer, traits, n_head)
        recurrent = _recurrent(keys, n_head_kv[:n_trunk], traits) + (False,) * n_mtp
        n_expert = keys.integer("expert_count", 0)
        n_ff = _n_ff(keys, n_layer, n_expert, traits)
        n_swa = keys.integer("attention.sliding_window", traits.n_swa) if traits.swa_period else 0
        swa = _swa(keys, n_layer, traits) if n_swa else (False,) * n_layer
        head_dim = n_embd // max(next((n for n in n_head if n), 1), 1)
        dims_k = _head_dims(keys, "attention.key_length", head_dim, swa)
        dims_v = _head_dims(keys, "attention.value_length", dims_k[0], swa)
        layers = [_LayerTensors(file, layer) for layer in range(n_layer)]
        hp = cls(
            architecture=file.meta.architecture,
            n_layer=n_layer,
            n_embd=n_embd,
            n_vocab=_n_vocab(file),
            n_ctx_train=n_ctx_train,
            n_ctx=n_ctx_train,
            n_head=n_head,
            n_head_kv=n_head_kv,
            head_dim_k=dims_k,
            head_dim_v=dims_v,
            n_ff=tuple(0 if t.only_experts else n for n, t in zip(n_ff, layers, strict=True)),
            n_expert=n_expert,
            n_expert_used=keys.integers("expert_used_count", n_layer, (0,) * n_layer),
            n_ff_exp=_n_ff_exp(keys, n_ff, layers) if n_expert else (0,) * n_layer,
            n_ff_shexp=tuple(t.n_ff_shexp for t in layers),
            norm_eps=keys.norm_eps(traits.norm_eps),
            n_swa=n_swa,
            swa=swa,
            recurrent=recurrent,
            rope=read_rope(keys, max(dims_k), traits.rope_style or "norm"),
            tied="output.weight" not in file.tensors,
            keys=keys,
            tensors=frozenset(file.tensors),
            n_mtp=n_mtp,
        )
        _check_derived(file, hp, traits)
        return hp

    @property
    def n_trunk(self) -> int:
        """Number of blocks that run for every token: all except MTP blocks."""
        return self.n_layer - self.n_mtp

    def has(self, layer: int, name: str) -> bool:
        """Return whether the file has this tensor in block `layer`."""
        return f"blk.{layer}.{name}" in self.tensors

    def refuse_experts(self) -> None:
        """Raise InvalidGGUF if there are routed experts."""
        if self.n_expert:
            raise self.keys.invalid("{name} models have no routed experts", name=self.architecture)

    def require_windows(self) -> None:
        """Raise InvalidGGUF if there are no sliding windows."""
        if not self.n_swa:
            raise self.keys.invalid("its sliding-window length is missing")


def n_trunk_blocks(keys: Keys) -> int:
    """Return the number of blocks, excluding the MTP blocks at the end (tensors `nextn.…`).

    Raises:
        InvalidGGUF: none would be left.
    """
    n_block, n_draft = keys.integer("block_count"), keys.integer("nextn_predict_layers", 0)
    if n_draft >= n_block:
        raise keys.invalid("{n} of its {total} blocks are MTP blocks", n=n_draft, total=n_block)
    return n_block - n_draft


def _per_layer(
    keys: Keys, name: str, n_layer: int, traits: Traits, default: Ints | None = None
) -> Ints:
    """Read one number per layer, at least 1 except in hybrid models."""
    if traits.is_hybrid:
        return keys.integers(name, n_layer, default or (0,) * n_layer)
    values = keys.integers(name, n_layer, default)
    if min(values) < 1:
        raise keys.invalid(
            "'{key}' is {value}, but must be at least 1", key=keys.full_key(name), value=min(values)
        )
    return values


def _n_ff(keys: Keys, n_layer: int, n_expert: int, traits: Traits) -> Ints:
    if n_expert:
        return keys.integers("feed_forward_length", n_layer, (0,) * n_layer)
    return _per_layer(keys, "feed_forward_length", n_layer, traits)


def _n_ff_exp(keys: Keys, n_ff: Ints, layers: list[_LayerTensors]) -> Ints:
    """Read the columns per expert; 0 in layers without experts.

    Files without the key store the number under the dense FFN's key, sometimes multiplied by the
    number of experts per token, so the tensors' shapes take precedence.
    """
    sizes = keys.integers("expert_feed_forward_length", len(layers), n_ff)
    n_ff_exp = tuple(
        (n if "expert_feed_forward_length" in keys else t.n_ff_exp or n) if t.has_experts else 0
        for n, t in zip(sizes, layers, strict=True)
    )
    if any(t.has_experts and n < 1 for n, t in zip(n_ff_exp, layers, strict=True)):
        raise keys.invalid("its experts have no columns")
    return n_ff_exp


def _recurrent(keys: Keys, n_head_kv: Ints, traits: Traits) -> Flags:
    n_layer = len(n_head_kv)
    if not traits.is_hybrid:
        return (False,) * n_layer
    if traits.recurrent_period:
        period = keys.integer("full_attention_interval", traits.recurrent_period)
        default = tuple((i + 1) % period != 0 for i in range(n_layer))
        return keys.flags("attention.recurrent_layers", n_layer, default)
    return tuple(n == 0 for n in n_head_kv)


def _swa(keys: Keys, n_layer: int, traits: Traits) -> Flags:
    """Return which layers have a sliding window.

    A file has a list, or the period of full-attention layers (0 if there are none).
    """
    name = "attention.sliding_window_pattern"
    is_period = name in keys and keys.meta.array_length(keys.full_key(name)) is None
    period = keys.integer(name) if is_period else traits.swa_period
    full = 0 if traits.swa_first_full else period - 1
    default = tuple(period == 0 or i % period != full for i in range(n_layer))
    return keys.flags(name, n_layer, default)


def _head_dims(keys: Keys, name: str, default: int, swa: Flags) -> Ints:
    full = keys.integer(name, default)
    windowed = keys.integer(f"{name}_swa", full)
    return tuple(windowed if is_swa else full for is_swa in swa)


class _LayerTensors:
    """Kind of a layer's FFN, derived from its tensors because keys are not reliable."""

    def __init__(self, file: GGUFFile, layer: int) -> None:
        shapes = {
            kind: tensor.shape
            for kind in (
                f"ffn_{part}{suffix}"
                for part in ("gate", "up", "down", "gate_up", "gate_inp")
                for suffix in ("", "_exps", "_shexp")
            )
            if (tensor := file.tensors.get(f"blk.{layer}.{kind}.weight")) is not None
        }
        self.has_experts = (
            any(kind.endswith("_exps") for kind in shapes) or "ffn_gate_inp" in shapes
        )
        is_dense = any(kind in shapes for kind in ("ffn_gate", "ffn_up", "ffn_down"))
        self.only_experts = self.has_experts and not is_dense
        up, down = shapes.get("ffn_up_shexp", (0,))[0], shapes.get("ffn_down_shexp", (0,))[-1]
        self.n_ff_shexp = down or up
        self.n_ff_exp = shapes.get("ffn_down_exps", (0,))[-1]


def _n_vocab(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise InvalidGGUF(
            file.path,
            "it contains no model weights (token_embd.weight is missing)",
            "It may be a vocabulary or projector file; pick the model file instead.",
        )
    n_rows, n_tokens = embedding.shape[0], file.meta.array_length("tokenizer.ggml.tokens") or 0
    if n_tokens > n_rows:
        raise InvalidGGUF(
            file.path,
            "its vocabulary has {n} tokens, but token_embd.weight has {rows} rows",
            n=n_tokens, rows=n_rows,
        )  # fmt: skip
    return n_rows


_LONE_EXPERT = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight")
"""Name of a tensor with a single expert, as in files until early 2024."""


def _check_derived(file: GGUFFile, hp: HParams, traits: Traits) -> None:
    invalid, n_block = hp.keys.invalid, hp.keys.integer("block_count")
    if any((block := split_name(name)) and block[0] >= n_block for name in file.tensors):
        key = hp.keys.full_key("block_count")
        raise invalid("'{key}' is {n}, but the file has more blocks", key=key, n=n_block)
    if any(_LONE_EXPERT.fullmatch(name) for name in file.tensors):
        raise InvalidGGUF(
            file.path,
            "it stores each expert in a separate tensor, as files did until early 2024",
            "Pick a newer file of the same model.",
        )
    for q, kv, is_recurrent in zip(hp.n_head, hp.n_head_kv, hp.recurrent, strict=True):
        if not is_recurrent and (kv < 1 or q < 1 or q % kv):
            raise invalid(
                "{n} query heads cannot share {other} key-value heads evenly", n=q, other=kv
            )
    if min(hp.head_dim_k) < 1:
        n_head = max(hp.n_head)
        raise invalid(
            "{other} elements cannot be divided among {n} heads", n=n_head, other=hp.n_embd
        )
    if traits.rope_style:
        _check_rope(hp)
    if hp.n_expert > 1 and not any(hp.n_ff_exp):
        raise invalid("it should have {n} experts, but no block has any", n=hp.n_expert)
    for n_used, columns in zip(hp.n_expert_used, hp.n_ff_exp, strict=True):
        if columns and not 1 <= n_used <= hp.n_expert:
            raise invalid("it uses {n} of {total} experts per token", n=n_used, total=hp.n_expert)


def _check_rope(hp: HParams) -> None:
    rope, head_dim = hp.rope, max(hp.head_dim_k)
    if rope.n_rot % 2 or not 0 < rope.n_rot <= head_dim:
        raise hp.keys.invalid(
            "its RoPE rotates {n} of {total} elements per head", n=rope.n_rot, total=head_dim
        )
    if rope.yarn and rope.n_ctx_orig < 1:
        raise hp.keys.invalid("YaRN's original context length is missing")
