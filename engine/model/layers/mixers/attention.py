"""Softmax attention with grouped key-value heads, and its common variants."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.model.forward.operands import Scores
from engine.model.forward.state import KVState
from engine.model.layers.linear import Linear, Vector
from engine.model.layers.mixers.mixer import Mixer
from engine.model.layers.norm import LayerNorm, RMSNorm
from engine.model.sharding.placement import Replicate, Shard
from engine.model.sharding.split import BlockDims, BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context
    from engine.model.layers.hparams import HParams
    from engine.model.layers.rope import Rope


class Attention(Mixer):
    """Grouped-query attention (arXiv 2305.13245), cut by heads, with biases where a file has them.

    A variant overrides the method that differs: `project`, `rotate`, `attend` or `finish`.

    Attributes:
        scores: scale and mask of the scores.
        cache: declaration of this layer's keys and values.
    """

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.head_dim_k, self.head_dim_v = hp.head_dim_k[layer], hp.head_dim_v[layer]
        n_head, n_head_kv = hp.n_head[layer], hp.n_head_kv[layer]
        self.scores = self.make_scores()
        if layer >= hp.n_trunk:  # MTP: see `engine.model.architectures.mtp`
            self.scores = replace(self.scores, first=layer - hp.n_trunk + 1)
        self.attn_q = Linear(hp.n_embd, n_head * self.head_dim_k, Shard(0, split.heads))
        self.attn_k = Linear(hp.n_embd, n_head_kv * self.head_dim_k, Shard(0, split.kv_heads))
        self.attn_v = Linear(hp.n_embd, n_head_kv * self.head_dim_v, Shard(0, split.kv_heads))
        self.attn_output = Linear(
            n_head * self.head_dim_v, hp.n_embd, Shard(1, split.heads), split.group
        )
        self.cache = self.declared_cache()

    @classmethod
    def dims(cls, hp: HParams, layer: int) -> BlockDims:
        return BlockDims(n_head=hp.n_head[layer], n_head_kv=hp.n_head_kv[layer])

    def make_scores(self) -> Scores:
        """Return scale and window of this layer's scores."""
        window = self.hp.n_swa if self.hp.swa[self.layer] else 0
        return Scores(self.head_dim_k**-0.5, window)

    def declared_cache(self) -> KVState:
        """Return a new declaration of keys and values with this layer's sizes and window."""
        split = self.split
        return KVState(
            split.heads, split.kv_heads, self.head_dim_k, self.head_dim_v, self.scores.sight
        )

    @property
    def bias(self) -> Tensor | None:
        return self.attn_output.bias

    def attended(self) -> KVState:
        """Return the declaration of the keys and values that the queries attend to."""
        return self.cache

    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        if not ctx.owns(self.split.heads):
            return None
        q, k, v = self.project(x, ctx)
        q, k = self.rotate(q, k, ctx)
        return self.finish(self.attend(q, k, v, ctx), x, ctx)

    def project(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each (T, heads of this rank, head_dim)."""
        q, k, v = ctx.ops.linears(x, self.attn_q, self.attn_k, self.attn_v)
        return (
            split_heads(q, self.head_dim_k),
            split_heads(k, self.head_dim_k),
            split_heads(v, self.head_dim_v),
        )

    def rotate(self, q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Apply RoPE to queries and keys, if the layer has it."""
        if self.rope is None:
            return q, k
        q, k = ctx.ropes(self.rope, q, k)
        return q, k

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """Return the weighted values, (T, heads of this rank, head_dim_v)."""
        return ctx.attention(self.cache, q, k, v, self.scores)

    def finish(self, heads: Tensor, x: Tensor, ctx: Context) -> Tensor:
        """Return this rank's partial sum of the output, (T, n_embd).

        Args:
            heads: weighted values, (T, heads of this rank, head_dim_v).
            x: input of the layer, (T, n_embd).
        """
        return self.attn_output(heads.flatten(-2))


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """Return x (T, n) as (T, n / head_dim, head_dim)."""
    return x.reshape(x.shape[0], -1, head_dim)


class QKNormAttention(Attention):
    """Attention with a norm of each query and key head before RoPE (Qwen 3, arXiv 2505.09388).

    Some files of such architectures have no norms; then heads stay as they are.
    """

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        owners = Replicate(split.heads.owners())
        self.attn_q_norm = RMSNorm(self.head_dim_k, hp.norm_eps, owners, optional=True)
        self.attn_k_norm = RMSNorm(self.head_dim_k, hp.norm_eps, owners, optional=True)

    def rotate(self, q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        norms = self.attn_q_norm, self.attn_k_norm
        if self.rope is None:
            return norms[0](q, ctx), norms[1](k, ctx)
        q, k = ctx.ropes(self.rope, q, k, norms=norms)
        return q, k


class HeadNormAttention(Attention):
    """Attention with a norm of its own weight for each head (Command R+, StableLM 2 12B).

    Smaller models of these families have no norms; then heads stay as they are.
    """

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        eps, q = hp.norm_eps, (hp.n_head[layer], self.head_dim_k)
        k = (hp.n_head_kv[layer], self.head_dim_k)
        self.attn_q_norm = LayerNorm(q, eps, Shard(0, split.heads), optional=True)
        self.attn_k_norm = LayerNorm(k, eps, Shard(0, split.kv_heads), optional=True)

    def project(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x, ctx)
        return self.attn_q_norm(q, ctx), self.attn_k_norm(k, ctx), v


class RowNormAttention(Attention):
    """Attention with one norm over all query heads of a token, and one over all key heads (OLMo 2).

    The heads are cut over the ranks, so every rank of the group takes part in the norms.
    """

    n_reduce = 2

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        n_q, n_k = self.attn_q.shape[0], self.attn_k.shape[0]
        self.attn_q_norm = RMSNorm(n_q, hp.norm_eps, Shard(0, split.heads))
        self.attn_k_norm = RMSNorm(n_k, hp.norm_eps, Shard(0, split.kv_heads))

    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        q = k = v = None
        if ctx.owns(self.split.heads):
            q, k, v = ctx.ops.linears(x, self.attn_q, self.attn_k, self.attn_v)
        q, k = self.attn_q_norm.sharded(q, ctx), self.attn_k_norm.sharded(k, ctx)
        if q is None or k is None or v is None:
            return None
        q, k = split_heads(q, self.head_dim_k), split_heads(k, self.head_dim_k)
        q, k = self.rotate(q, k, ctx)
        v = split_heads(v, self.head_dim_v)
        return self.finish(self.attend(q, k, v, ctx), x, ctx)


class SinkAttention(Attention):
    """Attention with a sink per head, a logit without a value (gpt-oss, arXiv 2309.17453)."""

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.attn_sinks = Vector((hp.n_head[layer],), Shard(0, split.heads))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        return ctx.attention(self.cache, q, k, v, self.scores, sinks=self.attn_sinks())


class ClampedAttention(Attention):
    """Attention with q, k and v clamped to ±`clamp_kqv`, where the file has it (OLMo, MPT)."""

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.limit = hp.keys.number("attention.clamp_kqv", 0.0)

    def project(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x, ctx)
        limit = self.limit
        if not limit:
            return q, k, v
        return q.clamp(-limit, limit), k.clamp(-limit, limit), v.clamp(-limit, limit)


class AlibiAttention(Attention):
    """Attention with linear biases (ALiBi, arXiv 2108.12409): a slope per head, no RoPE.

    Attributes:
        slopes: slopes of this rank's heads; None before the first pass.
    """

    slopes: Tensor | None = None

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.max_bias = hp.keys.number("attention.max_alibi_bias", 8.0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        if self.slopes is None:
            own = slice(*self.split.heads.spans[ctx.rank])
            self.slopes = q.new_tensor(alibi_slopes(self.split.heads.total, self.max_bias)[own])
        return ctx.attention(self.cache, q, k, v, self.scores, slopes=self.slopes)


def alibi_slopes(n_head: int, max_bias: float) -> list[float]:
    """Return the slope of each head: 2^(-max_bias × i / n) for i = 1 … n.

    Where n_head is no power of two, n is the one below, and the further heads have slopes between
    those of the first ones: i = 0.5, 1.5, … (as in the paper's code).
    """
    n = 1 << (n_head.bit_length() - 1)
    exponents = [*range(1, n + 1), *(i + 0.5 for i in range(n_head - n))]
    return [2.0 ** (-max_bias * exponent / n) for exponent in exponents]
