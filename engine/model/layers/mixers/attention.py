"""Softmax attention with grouped key-value heads, and its common variants."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.model.forward.operands import NO_SLICE, SIGMOID, Scores
from engine.model.forward.state import KVState
from engine.model.layers.linear import Linear, Vector
from engine.model.layers.mixers.mixer import Mixer
from engine.model.layers.module import Module, Slot, TensorSource
from engine.model.layers.norm import LayerNorm, RMSNorm, Rope
from engine.model.sharding.placement import Replicate, Shard
from engine.model.sharding.shares import Ranges
from engine.model.sharding.split import BlockDims, BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context
    from engine.model.layers.hparams import HParams


class Attention(Mixer):
    """Grouped-query attention (arXiv 2305.13245), split by heads; biases are optional.

    A variant overrides `project`, `rotate`, `attend` or `finish`.

    Attributes:
        scores: scale and mask of the scores.
        cache: declaration of this layer's keys and values.
    """

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.head_dim_k, self.head_dim_v = hp.head_dim_k[layer], hp.head_dim_v[layer]
        n_head, n_head_kv = hp.n_head[layer], hp.n_head_kv[layer]
        self.scores = self.make_scores()
        if layer >= hp.n_trunk:  # MTP: see `engine.model.architectures.base.MTP`
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
        """Return a declaration of this layer's keys and values."""
        split = self.split
        return KVState(
            split.heads,
            split.kv_heads,
            self.head_dim_k,
            self.head_dim_v,
            self.scores.attention_window,
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
        if self.rope is not None:
            q, k = ctx.ropes(self.rope, q, k)
        return q, k

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """Return the weighted values, (T, heads of this rank, head_dim_v)."""
        return ctx.attention(self.cache, q, k, v, self.scores)

    def finish(self, heads: Tensor, x: Tensor, ctx: Context) -> Tensor:
        """Return this rank's partial sum of the output, (T, n_embd), from weighted values (T, heads
        of this rank, head_dim_v) and the layer's input x (T, n_embd)."""
        return self.attn_output(heads.flatten(-2))


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """Return x (T, n) as (T, n / head_dim, head_dim)."""
    return x.reshape(x.shape[0], -1, head_dim)


class QKNormAttention(Attention):
    """Attention with query and key norms before RoPE (Qwen 3, arXiv 2505.09388), if the file has
    them."""

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
    """Attention with per-head weights in its query and key norms (Command R+, StableLM 2 12B).

    Smaller models of these families have no such norms.
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
    """Attention with one norm over a token's query heads and one over its key heads (OLMo 2).

    The heads are split over ranks, so every rank of the group takes part in the norms.
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
    """Attention with q, k and v clamped to ±`clamp_kqv`, if the file sets it (OLMo, MPT)."""

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
    """Attention with linear biases (ALiBi, arXiv 2108.12409): a slope per head, no RoPE."""

    slopes: Tensor | None = None  # of this rank's heads, set by the first pass

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

    If n_head is not a power of two, n is the next lower one, and the remaining heads get the slopes
    for i = 0.5, 1.5, … (as in the paper's code).
    """
    n = 1 << (n_head.bit_length() - 1)
    exponents = [*range(1, n + 1), *(i + 0.5 for i in range(n_head - n))]
    return [2.0 ** (-max_bias * exponent / n) for exponent in exponents]


@dataclass(frozen=True, slots=True)
class HeadGroups:
    """Equal groups of adjacent heads: each rank's heads and their groups, which ranks may share."""

    heads: Ranges
    groups: Ranges

    @property
    def size(self) -> int:
        """Number of heads in a group."""
        return self.heads.total // self.groups.total

    @property
    def are_whole(self) -> bool:
        """Whether no group is split between ranks."""
        return all(start % self.size == stop % self.size == 0 for start, stop in self.heads.spans)

    def repeat_for_heads(self, x: Tensor, rank: int) -> Tensor:
        """Repeat the values of the rank's groups for its heads: (T, groups, …) to (T, heads, …)."""
        return x.repeat_interleave(self.size, dim=1)[:, self.own_heads(rank)]

    def group_of_each_head(self, rank: int) -> tuple[int, ...]:
        """Return the group of each head on a rank, numbered within the rank."""
        own = self.own_heads(rank)
        return tuple(i // self.size for i in range(own.start, own.stop))

    def sums(self, x: Tensor, rank: int) -> Tensor:
        """Sum x (T, the rank's heads) over each group's heads; return (T, n_group in the layer)."""
        start, stop = self.groups.spans[rank]
        padded = x.new_zeros(x.shape[0], (stop - start) * self.size)
        padded[:, self.own_heads(rank)] = x
        sums = x.new_zeros(x.shape[0], self.groups.total)
        sums[:, start:stop] = padded.view(x.shape[0], -1, self.size).sum(-1)
        return sums

    def own_heads(self, rank: int) -> slice:
        """Return the interval of the rank's heads among all heads in its groups."""
        start, stop = self.heads.spans[rank]
        begin = self.groups.spans[rank][0] * self.size
        return slice(start - begin, stop - begin)


class GroupedRMSNorm(Module):
    """RMS norm over each group of heads, split by heads.

    If a group is split between ranks, its sum of squares is all-reduced: one number per token and
    group. Files store the weight as (n_group, elements per group) or flat.

    Args:
        n: number of elements in all groups.
        optional: whether a file may omit it; vectors are then unchanged.

    Attributes:
        weight: this rank's part, (elements of this rank's heads,), or None.
    """

    weight: Tensor | None = None

    def __init__(self, n: int, groups: HeadGroups, eps: float, *, optional: bool = False) -> None:
        self.shape = (groups.groups.total, n // groups.groups.total)
        self.groups = groups
        self.eps = eps
        self.optional = optional
        self.is_absent = False

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        tensor, flat = f"{name}.weight", (self.shape[0] * self.shape[1],)
        self.is_absent = self.optional and tensor not in source
        if self.is_absent:
            return []
        weight = source.get(tensor, flat, self.shape)
        return [Slot(self, "weight", weight, Shard(0, self.groups.heads), is_matrix=False)]

    def __call__(self, x: Tensor | None, ctx: Context) -> Tensor | None:
        """Normalise x (T, elements of this rank's heads).

        Collective over the block's group; a rank without heads passes None and gets None.
        """
        if self.is_absent:
            return x
        if self.groups.are_whole:
            return None if x is None else self._local(x, ctx)
        n_head = self.groups.heads.size(ctx.rank)
        heads = None if x is None else x.reshape(x.shape[0], n_head, -1)
        sums = None if heads is None else self.groups.sums(heads.square().sum(-1), ctx.rank)
        mean = ctx.all_reduce(sums, n=self.groups.groups.total) / self.shape[1]
        if heads is None:
            return None
        start, stop = self.groups.groups.spans[ctx.rank]
        factors = self.groups.repeat_for_heads((mean[:, start:stop] + self.eps).rsqrt(), ctx.rank)
        assert self.weight is not None, NO_SLICE
        return (heads * factors[..., None]).flatten(1) * self.weight

    def _local(self, x: Tensor, ctx: Context) -> Tensor:
        assert self.weight is not None, NO_SLICE
        grouped = x.reshape(x.shape[0], self.groups.groups.size(ctx.rank), -1)
        weight = self.weight.view(grouped.shape[1:])
        return ctx.ops.rms_norm(grouped, weight, None, self.eps).flatten(1)


@dataclass(frozen=True, slots=True)
class Temperature:
    """Query scale 1 + scale × ln(1 + floor((p + offset) / n_ctx)) at position p.

    Llama 4's formula, after arXiv 2501.19399; Mistral has another offset.
    """

    scale: float
    n_ctx: int
    offset: int = 0

    @classmethod
    def read(cls, hp: HParams) -> Temperature | None:
        """Read a file's keys; the default length is the context length before stretching.

        Returns:
            None if the file has no scale.

        Raises:
            InvalidGGUF: there is a scale, but no length.
        """
        scale = hp.keys.number("attention.temperature_scale", 0.0)
        n_ctx = hp.keys.integer("attention.temperature_length", 0) or hp.rope.n_ctx_orig
        if not scale:
            return None
        if not n_ctx:
            raise hp.keys.invalid("the length of its attention temperature is missing")
        return cls(scale, n_ctx)

    def apply(self, q: Tensor, ctx: Context) -> Tensor:
        """Scale queries (T, n_head, head_dim)."""
        periods = (ctx.positions + self.offset).div(self.n_ctx, rounding_mode="floor")
        # in F64, because torch's F32 logarithm of a number depends on the tensor's size
        factors = 1 + self.scale * periods.double().log1p()
        return q * factors.to(q.dtype)[:, None, None]


class HeadGate(Linear):
    """Projection to one gate per head or one per element of each head, depending on the file."""

    def __init__(self, n_embd: int, n_head: int, head_dim: int, placement: Shard) -> None:
        super().__init__(n_embd, n_head * head_dim, placement)
        self.per_head = (n_head, n_embd)

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        weight = source.tensors.get(f"{name}.weight")
        if weight is not None and weight.shape == self.per_head:
            self.shape = self.per_head
        return super().bind(source, name)


class GatedAttention(QKNormAttention):
    """Attention with sigmoid gates on the heads' outputs, before the output projection (arXiv
    2505.06708).

    Some layers have no gates.
    """

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.attn_gate: HeadGate | None = None
        if hp.has(layer, "attn_gate.weight"):
            placement = Shard(0, split.heads)
            self.attn_gate = HeadGate(hp.n_embd, hp.n_head[layer], self.head_dim_v, placement)

    def gate_factors(self, gate: Tensor, ctx: Context) -> Tensor:
        """Return the factors for gate logits of any shape."""
        return ctx.ops.activate(SIGMOID, gate)

    def finish(self, heads: Tensor, x: Tensor, ctx: Context) -> Tensor:
        if self.attn_gate is not None:
            gates = self.gate_factors(self.attn_gate(ctx.kept(x)), ctx)
            heads = heads * split_heads(gates, gates.shape[-1] // heads.shape[1])
        return super().finish(heads, x, ctx)


class SoftplusGatedAttention(GatedAttention):
    """Attention with softplus gates, which can also amplify."""

    def gate_factors(self, gate: Tensor, ctx: Context) -> Tensor:
        return ctx.ops.softplus(gate)
