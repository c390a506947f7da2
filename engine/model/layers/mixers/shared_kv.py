"""Attention that can reuse the keys and values of an earlier layer (Gemma 3n and 4)."""

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
    """Return the layer that provides the keys and values of `layer`.

    The last layers of a model read from the last earlier layer with keys and values of the same
    kind, with or without a window; other layers read their own. If there is no source, the result
    is -1, and `check_kv_sources` refuses the file.
    """
    n_own = hp.n_layer - hp.keys.integer("attention.shared_kv_layers", 0)
    if layer < n_own:
        return layer
    return max((i for i in range(n_own) if hp.swa[i] == hp.swa[layer]), default=-1)


def check_kv_sources(hp: HParams) -> None:
    """Check that each layer without keys and values can read another layer's.

    Raises:
        InvalidGGUF: a layer has no source, or one with different heads.
    """
    sizes = list(zip(hp.n_head, hp.n_head_kv, hp.head_dim_k, hp.head_dim_v, strict=True))
    for layer in range(hp.n_layer):
        source = kv_source(hp, layer)
        if source < 0 or sizes[source] != sizes[layer]:
            raise hp.keys.invalid(
                "block {n} has no keys, and no earlier block has keys that fit its queries", n=layer
            )


class NormedQueries(Attention):
    """Attention with query norms and unscaled scores."""

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.attn_q_norm = self.head_norm()

    def head_norm(self, *, affine: bool = True) -> RMSNorm:
        """Return a new norm for heads, on all ranks with heads."""
        owners = Replicate(self.split.heads.owners())
        return RMSNorm(self.head_dim_k, self.hp.norm_eps, owners, affine=affine)

    def make_scores(self) -> Scores:
        return replace(super().make_scores(), scale=1.0)

    def queries(self, x: Tensor, ctx: Context) -> Tensor:
        """Map x (T, n_embd) to queries before RoPE, (T, heads of this rank, head_dim)."""
        return self.attn_q_norm(split_heads(self.attn_q(x), self.head_dim_k), ctx)


class NormedAttention(NormedQueries):
    """Attention with norms on queries, keys and values; the value norm has no weight.

    A layer without a value projection uses the projected keys as values. All layers with a window
    are alike in this, and so are all layers without one.
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
    """Attention that computes only queries and uses another layer's keys and values.

    Attributes:
        source: declaration of the other layer's keys and values, set by `share_caches`.
    """

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        del self.attn_k, self.attn_v, self.cache
        self.source: tuple[KVState, ...] = ()  # in a tuple, so that it is not allocated here

    @classmethod
    def dims(cls, hp: HParams, layer: int) -> BlockDims:
        return replace(super().dims(hp, layer), kv_of=kv_source(hp, layer))

    def attended(self) -> KVState:
        """Return a declaration equal to the other layer's, with its sizes, split and window."""
        return self.declared_cache()

    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        if not ctx.owns(self.split.heads):
            return None
        q = self.queries(x, ctx)
        q = q if self.rope is None else ctx.rope(q, self.rope)
        heads = ctx.attention(self.source[0], q, None, None, self.scores)
        return self.finish(heads, x, ctx)


def share_caches(hp: HParams, mixers: Sequence[Mixer]) -> None:
    """Set the source of each layer without keys and values, given all mixers of a model."""
    for mixer in mixers:
        if isinstance(mixer, SharedKVAttention):
            source = mixers[kv_source(hp, mixer.layer)]
            assert isinstance(source, Attention), "check_kv_sources refuses other files"
            assert mixer.scores.attention_window == source.cache.window
            mixer.source = (source.cache,)
