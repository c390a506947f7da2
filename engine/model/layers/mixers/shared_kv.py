"""Attention that can share the keys and values of an earlier layer (Gemma 3n and 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.model.forward.operands import Scores
from engine.model.forward.state import KVState
from engine.model.layers.mixers.attention import Attention, split_heads
from engine.model.layers.mixers.mixer import Mixer
from engine.model.layers.norm import RMSNorm, Rope
from engine.model.sharding.placement import Replicate
from engine.model.sharding.split import BlockDims, BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context
    from engine.model.layers.hparams import HParams


def kv_source(hp: HParams, layer: int) -> int:
    """Return the layer whose keys and values `layer` reads.

    That is the layer itself, except for the last layers of a model: they read from the last layer
    before them that has keys and is of their kind, with or without a window. Without such a layer
    the result is -1, and `check_kv_sources` refuses the file.
    """
    n_own = hp.n_layer - hp.keys.integer("attention.shared_kv_layers", 0)
    if layer < n_own:
        return layer
    return max((i for i in range(n_own) if hp.swa[i] == hp.swa[layer]), default=-1)


def check_kv_sources(hp: HParams) -> None:
    """Check that each layer without keys and values can read another one's.

    Raises:
        InvalidGGUF: a layer has no layer to share with, or one with other heads; it names that.
    """
    sizes = list(zip(hp.n_head, hp.n_head_kv, hp.head_dim_k, hp.head_dim_v, strict=True))
    for layer in range(hp.n_layer):
        source = kv_source(hp, layer)
        if source < 0 or sizes[source] != sizes[layer]:
            raise hp.keys.invalid(
                f"block {layer} has no keys, and no block before it has any that fit its queries"
            )


class NormedQueries(Attention):
    """Attention with a norm of each query head and unscaled scores."""

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.attn_q_norm = self.head_norm()

    def head_norm(self, *, affine: bool = True) -> RMSNorm:
        """Return a new norm of heads, on all ranks that have some."""
        owners = Replicate(self.split.heads.owners())
        return RMSNorm(self.head_dim_k, self.hp.norm_eps, owners, affine=affine)

    def make_scores(self) -> Scores:
        return replace(super().make_scores(), scale=1.0)

    def queries(self, x: Tensor, ctx: Context) -> Tensor:
        """Map x (T, n_embd) to queries (T, heads of this rank, head_dim), not rotated yet."""
        return self.attn_q_norm(split_heads(self.attn_q(x), self.head_dim_k), ctx)


class NormedAttention(NormedQueries):
    """Attention with norms of queries, keys and values; that of the values has no weight.

    A layer without a matrix for its values uses the projected keys for them. The layers with a
    window either all do so or none; the same holds for the layers without.
    """

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.attn_k_norm = self.head_norm()
        self.value_norm = self.head_norm(affine=False)
        self.has_values = any(
            hp.has(other, f"{name}.weight")
            for other in range(hp.n_layer)
            if hp.swa[other] == hp.swa[layer] and kv_source(hp, other) == other
            for name in ("attn_v", "attn_qkv")
        )
        if not self.has_values:
            del self.attn_v

    def project(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        k = split_heads(self.attn_k(x), self.head_dim_k)
        v = split_heads(self.attn_v(x), self.head_dim_v) if self.has_values else k
        return self.queries(x, ctx), self.attn_k_norm(k, ctx), self.value_norm(v, ctx)


class SharedKVAttention(NormedQueries):
    """Attention with queries only, over the keys and values of another layer.

    Attributes:
        source: declaration of the other layer's keys and values, set by `share_caches`.
    """

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        del self.attn_k, self.attn_v, self.cache
        self.source: tuple[KVState, ...] = ()  # wrapped: it is allocated for the other layer

    @classmethod
    def dims(cls, hp: HParams, layer: int) -> BlockDims:
        return replace(super().dims(hp, layer), kv_of=kv_source(hp, layer))

    def attended(self) -> KVState:
        """Return a declaration equal to the other layer's: sizes, cuts and window are the same."""
        return self.declared_cache()

    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        if not ctx.owns(self.split.heads):
            return None
        q = self.queries(x, ctx)
        q = q if self.rope is None else ctx.rope(q, self.rope)
        heads = ctx.attention(self.source[0], q, None, None, self.scores)
        return self.finish(heads, x, ctx)


def share_caches(hp: HParams, mixers: Sequence[Mixer]) -> None:
    """Set the source of each layer without keys and values, among all layers of a model."""
    for mixer in mixers:
        if isinstance(mixer, SharedKVAttention):
            source = mixers[kv_source(hp, mixer.layer)]
            assert isinstance(source, Attention), "check_kv_sources refuses other files"
            assert mixer.scores.attention_window == source.cache.window, (
                "both have a window, or none has"
            )
            mixer.source = (source.cache,)
