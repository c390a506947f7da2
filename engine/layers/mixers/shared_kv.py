"""Attention that may read the keys and values of an earlier layer (Gemma 3n and 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.forward.operands import Scores
from engine.forward.state import KVState
from engine.layers.mixers.attention import Attention, split_heads
from engine.layers.mixers.mixer import Mixer
from engine.layers.norm import RMSNorm
from engine.layers.rope import Rope
from engine.sharding.placement import Replicate
from engine.sharding.split import BlockDims, BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.forward.context import Context
    from engine.layers.hparams import HParams


def kv_source(hp: HParams, layer: int) -> int:
    """The layer whose keys and values `layer` reads: itself, but for the last ones of a model.

    Those read from the last one of their kind, with or without a window, that has some. A file
    without such a one fails `check_kv_sources`.
    """
    n_own = hp.n_layer - hp.keys.integer("attention.shared_kv_layers", 0)
    if layer < n_own:
        return layer
    return max((i for i in range(n_own) if hp.swa[i] == hp.swa[layer]), default=-1)


def check_kv_sources(hp: HParams) -> None:
    """Make sure that layers which share can.

    Raises:
        InvalidGGUF: names one that has no layer to share with, or one with other heads.
    """
    sizes = list(zip(hp.n_head, hp.n_head_kv, hp.head_dim_k, hp.head_dim_v, strict=True))
    for layer in range(hp.n_layer):
        source = kv_source(hp, layer)
        if source < 0 or sizes[source] != sizes[layer]:
            raise hp.keys.invalid(
                f"block {layer} has no keys, and no block before it has any that fit its queries"
            )


class NormedQueries(Attention):
    """Normalises each query head and does not scale the scores."""

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.attn_q_norm = self.head_norm()

    def head_norm(self, *, affine: bool = True) -> RMSNorm:
        """A norm of heads, on all ranks that have some."""
        owners = Replicate(self.split.heads.owners())
        return RMSNorm(self.head_dim_k, self.hp.norm_eps, owners, affine=affine)

    def make_scores(self) -> Scores:
        return replace(super().make_scores(), scale=1.0)

    def queries(self, x: Tensor, ctx: Context) -> Tensor:
        """Map x (T, n_embd) to queries (T, heads of this rank, head_dim), not rotated yet."""
        return self.attn_q_norm(split_heads(self.attn_q(x), self.head_dim_k), ctx)


class NormedAttention(NormedQueries):
    """Normalises keys and values too, values without a weight.

    A layer without a matrix for its values takes its keys for them, as they come out of theirs. So
    do all layers with a window, or all without, or none.
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
    """Has only queries; `share_caches` says whose keys and values they meet."""

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        del self.attn_k, self.attn_v, self.cache
        self.source: tuple[KVState, ...] = ()  # wrapped: it is the other layer's to allocate

    @classmethod
    def dims(cls, hp: HParams, layer: int) -> BlockDims:
        return replace(super().dims(hp, layer), kv_of=kv_source(hp, layer))

    def attended(self) -> KVState:
        """Those of the other layer, which are of the same size and cut alike."""
        split = self.split
        return KVState(split.heads, split.kv_heads, self.head_dim_k, self.head_dim_v)

    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        if not ctx.owns(self.split.heads):
            return None
        q = self.queries(x, ctx)
        q = q if self.rope is None else ctx.rope(q, self.rope)
        heads = ctx.attention(self.source[0], q, None, None, self.scores)
        return self.finish(heads, x, ctx)


def share_caches(hp: HParams, mixers: Sequence[Mixer]) -> None:
    """Show each layer without keys and values, of all layers of a model, where to read them."""
    for mixer in mixers:
        if isinstance(mixer, SharedKVAttention):
            source = mixers[kv_source(hp, mixer.layer)]
            assert isinstance(source, Attention), "check_kv_sources has seen to it"
            mixer.source = (source.cache,)
