"""Multi-head latent attention (MLA): keys and values are projections of one latent per token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.model.forward.operands import Scores
from engine.model.forward.state import KVState
from engine.model.layers.linear import HeadLinear, Linear
from engine.model.layers.mixers.attention import split_heads
from engine.model.layers.mixers.mixer import Mixer
from engine.model.layers.module import Slot, TensorSource
from engine.model.layers.norm import RMSNorm, Rope
from engine.model.sharding.placement import Replicate, Shard
from engine.model.sharding.split import BlockDims, BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context
    from engine.model.layers.hparams import HParams


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Vector sizes of one layer.

    Attributes:
        latent: size of the latent from which keys and values are computed.
        plain: elements without RoPE per query or key head.
        rotated: elements with RoPE per query or key head, after the plain ones; all key heads share
            these.
        value: elements per value head.
    """

    latent: int
    plain: int
    rotated: int
    value: int

    @classmethod
    def read(cls, hp: HParams, layer: int) -> LatentSizes:
        """Read the sizes of a layer; files from before 2025 store them under the usual keys.

        Raises:
            InvalidGGUF: a size is missing, or more elements are to be rotated than a head has.
        """
        keys, rotated = hp.keys, hp.rope.n_rot
        latent = keys.integer("attention.kv_lora_rank")
        head = keys.integer("attention.key_length_mla", hp.head_dim_k[layer])
        value = keys.integer("attention.value_length_mla", hp.head_dim_v[layer])
        if not latent:
            raise keys.invalid("the size of its latents is missing (attention.kv_lora_rank)")
        if rotated >= head:
            raise keys.invalid(
                "its RoPE rotates {n} of {total} elements per head", n=rotated, total=head
            )
        return cls(latent, head - rotated, rotated, value)

    @property
    def head(self) -> int:
        """Elements per query or key head."""
        return self.plain + self.rotated


class LatentAttention(Mixer):
    """DeepSeek V2's attention (arXiv 2405.04434), computed on the latents themselves.

    Keys are a linear map of the latents, so the map is applied to the queries instead, and the
    values' map to the weighted latents. The cache has one key-value head per layer: the latent and
    the rotated elements. Every rank with query heads stores it in full.

    A variant overrides `make_scores` or `adjust`. Queries have their own latent if the file has
    `attn_q_a`. Older files store the two maps as one matrix, `attn_kv_b`.

    Attributes:
        is_joint: whether the file has both maps in one matrix.
        cache: declaration of this layer's latents and rotated elements.
    """

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        n_head, sizes = hp.n_head[layer], LatentSizes.read(hp, layer)
        heads, owners = Shard(0, split.heads), Replicate(split.heads.owners())
        self.sizes = sizes
        self.scores = self.make_scores()
        if layer >= hp.n_trunk:  # MTP: see `engine.model.architectures.base.MTP`
            self.scores = replace(self.scores, first=layer - hp.n_trunk + 1)
        self.has_query_latent = hp.has(layer, "attn_q_a.weight") or (
            "attention.q_lora_rank" in hp.keys and not hp.has(layer, "attn_q.weight")
        )
        if self.has_query_latent:
            rank = hp.keys.integer("attention.q_lora_rank")
            self.attn_q_a = Linear(hp.n_embd, rank, owners)
            self.attn_q_a_norm = RMSNorm(rank, hp.norm_eps, owners)
            self.attn_q_b = Linear(rank, n_head * sizes.head, heads)
        else:
            self.attn_q = Linear(hp.n_embd, n_head * sizes.head, heads)
        self.attn_kv_a_mqa = Linear(hp.n_embd, sizes.latent + sizes.rotated, owners)
        self.attn_kv_a_norm = RMSNorm(sizes.latent, hp.norm_eps, owners)
        self.is_joint = not any(hp.has(layer, f"attn_{part}_b.weight") for part in "kv")
        if self.is_joint:
            n_out = sizes.plain + sizes.value
            self.attn_kv_b = HeadLinear(n_head, sizes.latent, n_out, heads)
        else:
            self.attn_k_b = HeadLinear(n_head, sizes.plain, sizes.latent, heads)
            self.attn_v_b = HeadLinear(n_head, sizes.latent, sizes.value, heads)
        self.attn_output = Linear(
            n_head * sizes.value, hp.n_embd, Shard(1, split.heads), split.group
        )
        self.cache = KVState(
            split.heads, split.kv_heads, sizes.latent + sizes.rotated, sizes.latent,
            self.scores.attention_window, v_in_k=True,
        )  # fmt: skip

    @classmethod
    def dims(cls, hp: HParams, layer: int) -> BlockDims:
        """Return the query heads and one key-value head (the latent), whatever the file's keys
        say."""
        return BlockDims(n_head=hp.n_head[layer], n_head_kv=1)

    def make_scores(self) -> Scores:
        """Return scores scaled for the size of query heads, although the compared latents are
        longer."""
        return Scores(float(self.sizes.head**-0.5))

    @property
    def bias(self) -> Tensor | None:
        return self.attn_output.bias

    def attended(self) -> KVState:
        """Return the declaration of the keys and values that the queries attend to."""
        return self.cache

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        """Locate the tensors; some files have the joint matrix in addition to its two parts."""
        joint, sizes = f"{name}.attn_kv_b.weight", self.sizes
        if not self.is_joint and joint in source:
            n_head, n_out = self.split.heads.total, sizes.plain + sizes.value
            source.get(joint, (n_head * n_out, sizes.latent), (n_head, n_out, sizes.latent))
        return super().bind(source, name)

    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        if not ctx.owns(self.split.heads):
            return None
        plain, rotated = self.queries(x, ctx)
        q = ctx.ops.concat(self.absorb(plain), rotated)
        heads = ctx.attention(self.cache, self.adjust(q, ctx), self.keys(x, ctx), None, self.scores)
        return self.attn_output(self.values(heads).flatten(-2))

    def queries(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Return the plain and the rotated elements of queries, (T, heads of this rank, …)."""
        if self.has_query_latent:
            q = self.attn_q_b(self.attn_q_a_norm(self.attn_q_a(x), ctx))
        else:
            q = self.attn_q(x)
        q = split_heads(q, self.sizes.head)
        return q[..., : self.sizes.plain], self.rotate(q[..., self.sizes.plain :], ctx)

    def keys(self, x: Tensor, ctx: Context) -> Tensor:
        """Return the keys to cache, (T, 1, latent + rotated); the latents are also the values."""
        projected = self.attn_kv_a_mqa(x)[:, None]
        latent = self.attn_kv_a_norm(projected[..., : self.sizes.latent], ctx)
        return ctx.ops.concat(latent, self.rotate(projected[..., self.sizes.latent :], ctx))

    def rotate(self, x: Tensor, ctx: Context) -> Tensor:
        """Apply RoPE to x, if the layer has it."""
        return x if self.rope is None else ctx.rope(x, self.rope)

    def adjust(self, q: Tensor, ctx: Context) -> Tensor:
        """Return the queries (T, heads of this rank, latent + rotated) with a variant's changes."""
        return q

    def absorb(self, q: Tensor) -> Tensor:
        """Map plain queries (T, heads, plain) to queries for latents, (T, heads, latent)."""
        if self.is_joint:
            return self.attn_kv_b(q, slice(0, self.sizes.plain), transposed=True)
        return self.attn_k_b(q)

    def values(self, latents: Tensor) -> Tensor:
        """Map weighted latents (T, heads, latent) to weighted values (T, heads, value)."""
        if self.is_joint:
            return self.attn_kv_b(latents, slice(self.sizes.plain, None))
        return self.attn_v_b(latents)
