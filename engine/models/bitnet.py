"""BitNet b1.58: Llama's block with a norm before each row-parallel matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from engine.errors import InvalidGGUF
from engine.layers.ffn import SwiGLU
from engine.layers.module import TensorSource
from engine.layers.norm import RMSNorm
from engine.layers.rope import Rope, RopeStyle
from engine.models.hparams import HParams
from engine.models.llama import Llama, LlamaBlock
from engine.models.registry import register
from engine.parallel.placement import Shard
from engine.parallel.split import BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.context import Context


class BitNetBlock(LlamaBlock):
    """The two sub-norms run over vectors that are cut, so their mean takes an all_reduce each."""

    ffn: SwiGLU

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope) -> None:
        super().__init__(hp, split, layer, rope)
        n_out = hp.n_head[layer] * hp.head_dim_v
        self.attn_sub_norm = RMSNorm(n_out, hp.norm_eps, Shard(0, split.heads))
        self.ffn_sub_norm = RMSNorm(hp.n_ff[layer], hp.norm_eps, Shard(0, split.ffn))

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        heads = self.attention(self.attn_norm(x, ctx), ctx)
        heads = self.attn_sub_norm.sharded(heads, ctx)
        partial = None if heads is None else self.attn_output(heads)
        x = x + ctx.all_reduce(partial, self.attn_output.bias)

        h = self.ffn_norm(x, ctx)
        inner = self.ffn.inner(h, ctx) if ctx.owns(self.split.ffn) else None
        inner = self.ffn_sub_norm.sharded(inner, ctx)
        partial = None if inner is None else self.ffn.ffn_down(inner)
        return x + ctx.all_reduce(partial, self.ffn.bias)


@register("bitnet")
class BitNet(Llama):
    """arXiv 2402.17764."""

    rope_style: ClassVar[RopeStyle] = "neox"
    block_type = BitNetBlock

    @classmethod
    def adapt(cls, source: TensorSource, hp: HParams) -> None:
        if hp.n_expert:
            raise InvalidGGUF(source.path, "bitnet models have no routed experts")
        super().adapt(source, hp)
