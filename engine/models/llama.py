"""Llama and what shares its blocks: Llama 1-3, Mistral, Mixtral (routed experts)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from engine.layers.ffn import MoE, SwiGLU
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.rope import Rope, RopeStyle
from engine.models.base import Block, CausalLM
from engine.models.hparams import HParams
from engine.models.registry import register
from engine.parallel.placement import Replicate, Shard
from engine.parallel.split import BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.context import Context


class LlamaBlock(Block):
    """Pre-norm attention and FFN; one all_reduce after each."""

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope) -> None:
        super().__init__(hp, split, layer, rope)
        n_q = hp.n_head[layer] * hp.head_dim_k
        n_k = hp.n_head_kv[layer] * hp.head_dim_k
        n_v = hp.n_head_kv[layer] * hp.head_dim_v
        n_out = hp.n_head[layer] * hp.head_dim_v
        self.attn_norm = RMSNorm(hp.n_embd, hp.norm_eps, Replicate(split.group))
        self.attn_q = Linear(hp.n_embd, n_q, Shard(0, split.heads))
        self.attn_k = Linear(hp.n_embd, n_k, Shard(0, split.kv_heads))
        self.attn_v = Linear(hp.n_embd, n_v, Shard(0, split.kv_heads))
        self.attn_output = Linear(n_out, hp.n_embd, Shard(1, split.heads), split.group)
        self.ffn_norm = RMSNorm(hp.n_embd, hp.norm_eps, Replicate(split.group))
        self.ffn = self.make_ffn(hp, split, layer)

    def make_ffn(self, hp: HParams, split: BlockSplit, layer: int) -> SwiGLU | MoE:
        """Routed experts where the file has them, else one gated FFN."""
        if hp.n_expert:
            used = hp.n_expert_used
            return MoE(hp.n_embd, hp.n_ff_exp, hp.n_expert, used, split.experts, split.group)
        return SwiGLU(hp.n_embd, hp.n_ff[layer], split.ffn, split.group)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Map the residual stream x (T, n_embd) to the next block's."""
        heads = self.attention(self.attn_norm(x, ctx), ctx)
        partial = None if heads is None else self.attn_output(heads)
        x = x + ctx.all_reduce(partial, self.attn_output.bias)
        partial = self.ffn(self.ffn_norm(x, ctx), ctx)
        return x + ctx.all_reduce(partial, self.ffn.bias)

    def attention(self, x: Tensor, ctx: Context) -> Tensor | None:
        """The outputs of this rank's heads, (T, heads × head_dim_v); None if it has no heads."""
        if not ctx.owns(self.split.heads):
            return None
        q, k, v = self.project(x, ctx)
        q, k = ctx.rope(q, self.rope), ctx.rope(k, self.rope)
        return ctx.attention(self.layer, q, k, v, self.hp.head_dim_k**-0.5).flatten(-2)

    def project(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (T, heads of this rank, head_dim)."""
        n_tokens = x.shape[0]
        q = self.attn_q(x).view(n_tokens, -1, self.hp.head_dim_k)
        k = self.attn_k(x).view(n_tokens, -1, self.hp.head_dim_k)
        v = self.attn_v(x).view(n_tokens, -1, self.hp.head_dim_v)
        return q, k, v


@register("llama")
class Llama(CausalLM):
    """arXiv 2302.13971; the converter has permuted q and k for neighbouring rotation pairs."""

    rope_style: ClassVar[RopeStyle] = "norm"
    block_type = LlamaBlock
