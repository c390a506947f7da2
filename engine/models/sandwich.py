"""Blocks with a norm before and after each part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.layers.hparams import HParams
from engine.layers.rope import Rope
from engine.models.base import TransformerBlock
from engine.parallel.split import BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.context import Context


class SandwichBlock(TransformerBlock):
    """`x + norm'(mixer(norm(x)))`, then the same with the FFN (CogView, arXiv 2105.13290)."""

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.post_attention_norm = self.norm()
        self.post_ffw_norm = self.norm()

    def mix(self, x: Tensor, ctx: Context) -> Tensor:
        return self.post_attention_norm(super().mix(x, ctx), ctx)

    def feed(self, x: Tensor, ctx: Context) -> Tensor:
        return self.post_ffw_norm(super().feed(x, ctx), ctx)
