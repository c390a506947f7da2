"""Ministral 3: Llama's block for long contexts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.model.architectures.base import CausalLM
from engine.model.architectures.registry import register
from engine.model.layers.block import TransformerBlock
from engine.model.layers.hparams import HParams
from engine.model.layers.mixers.attention import Attention, Temperature
from engine.model.layers.norm import Rope
from engine.model.sharding.split import BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context


class Mistral3Attention(Attention):
    """Attention whose queries grow with their position where the file says so."""

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.temperature = Temperature.read(hp)

    def rotate(self, q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        q, k = super().rotate(q, k, ctx)
        return (q if self.temperature is None else self.temperature.apply(q, ctx)), k


class Mistral3Block(TransformerBlock):
    """Llama's block, dense or with routed experts."""

    mixer_type = Mistral3Attention


@register("mistral3")
class Mistral3(CausalLM):
    """Ministral 3; its files state YaRN's bounds, and `mscale_all_dim` undivided."""

    block_type = Mistral3Block

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        keys, rope = hp.keys, hp.rope
        mscale = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
        rope = rope.balanced(1.0, mscale) if mscale else rope
        rope = replace(
            rope,
            beta_fast=keys.number("rope.scaling.yarn_beta_fast", rope.beta_fast),
            beta_slow=keys.number("rope.scaling.yarn_beta_slow", rope.beta_slow),
        )
        return replace(hp, rope=rope)
