"""Qwen 3: Llama's block with a norm over each query and key head."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from engine.layers.norm import RMSNorm
from engine.layers.rope import Rope, RopeStyle
from engine.models.hparams import HParams
from engine.models.llama import Llama, LlamaBlock
from engine.models.registry import register
from engine.parallel.placement import Replicate
from engine.parallel.split import BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.context import Context


class Qwen3Block(LlamaBlock):
    """Normalises q and k per head before they are rotated."""

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope) -> None:
        super().__init__(hp, split, layer, rope)
        owners = Replicate(split.heads.owners())
        self.attn_q_norm = RMSNorm(hp.head_dim_k, hp.norm_eps, owners)
        self.attn_k_norm = RMSNorm(hp.head_dim_k, hp.norm_eps, owners)

    def project(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x, ctx)
        return self.attn_q_norm(q, ctx), self.attn_k_norm(k, ctx), v


@register("qwen3")
class Qwen3(Llama):
    """arXiv 2505.09388."""

    rope_style: ClassVar[RopeStyle] = "neox"
    block_type = Qwen3Block
