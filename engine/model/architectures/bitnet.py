"""BitNet b1.58: Llama's block with a norm before each row-parallel matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.model.architectures.base import CausalLM
from engine.model.architectures.registry import register
from engine.model.layers.block import TransformerBlock
from engine.model.layers.ffn import FFN
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.mixers.attention import Attention
from engine.model.layers.norm import RMSNorm, Rope
from engine.model.sharding.placement import Shard
from engine.model.sharding.split import BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context


class BitNetAttention(Attention):
    """Attention that normalises the outputs of all heads together, over all ranks."""

    n_reduce = 1

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        n_out = self.attn_output.shape[1]
        self.attn_sub_norm = RMSNorm(n_out, hp.norm_eps, Shard(0, split.heads))

    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        heads = None
        if ctx.owns(self.split.heads):
            q, k, v = self.project(x, ctx)
            heads = self.attend(*self.rotate(q, k, ctx), v, ctx).flatten(-2)
        ctx.drop_rows()  # on ranks without heads, too: the norm's sum has no other rows
        heads = self.attn_sub_norm.sharded(heads, ctx)
        return None if heads is None else self.attn_output(heads)


class BitNetFFN(FFN):
    """An FFN that normalises the gated activations."""

    n_reduce = 1

    def __init__(self, hp: HParams, split: BlockSplit, layer: int) -> None:
        super().__init__(hp.n_embd, hp.n_ff[layer], split.ffn, split.group)
        self.ffn_sub_norm = RMSNorm(hp.n_ff[layer], hp.norm_eps, Shard(0, split.ffn))

    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        inner = self.inner(x, ctx) if ctx.owns(self.columns) else None
        inner = self.ffn_sub_norm.sharded(inner, ctx)
        return None if inner is None else self.ffn_down(inner)


class BitNetBlock(TransformerBlock):
    """Llama's block with sub-norms, each with an all-reduce of one number per token."""

    mixer_type = BitNetAttention

    def make_ffn(self) -> BitNetFFN:
        return BitNetFFN(self.hp, self.split, self.layer)


@register("bitnet")
class BitNet(CausalLM):
    """BitNet b1.58 (arXiv 2402.17764)."""

    traits = Traits(rope_style="neox")
    block_type = BitNetBlock

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        hp.refuse_experts()
        return hp
