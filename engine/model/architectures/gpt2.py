"""GPT-2 and StarCoder: LayerNorms and an FFN without a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.model.architectures.base import CausalLM
from engine.model.architectures.registry import register
from engine.model.forward.operands import GELU
from engine.model.layers.block import TransformerBlock
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.linear import Vector
from engine.model.layers.norm import LayerNorm
from engine.model.sharding.placement import Replicate
from engine.model.sharding.split import ModelSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context


class GPT2Block(TransformerBlock):
    """GPT-2's block, which many models share; biases load where a file has them."""

    norm_type = LayerNorm
    act = GELU
    is_gated = False


@register("gpt2", "starcoder")
class GPT2(CausalLM):
    """GPT-2 (Radford et al. 2019) and StarCoder (arXiv 2305.06161), with a vector per position.

    StarCoder's heads share one key-value head.
    """

    traits = Traits(rope_style=None, norm_eps="layer")
    block_type = GPT2Block

    def __init__(self, hp: HParams, split: ModelSplit) -> None:
        super().__init__(hp, split)
        owners = Replicate(split.embedding.owners())
        self.position_embd = Vector((hp.n_ctx_train, hp.n_embd), owners)

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Limit the context to the positions that have a vector."""
        if not hp.n_ctx_train:
            raise hp.keys.invalid("it does not say how many positions it knows")
        return replace(hp, n_ctx=min(hp.n_ctx, hp.n_ctx_train))

    def embed(self, ids: Tensor, ctx: Context) -> Tensor | None:
        x = super().embed(ids, ctx)
        return None if x is None else x + self.position_embd()[ctx.positions]


@register("starcoder2")
class StarCoder2(CausalLM):
    """StarCoder 2 (arXiv 2402.19173), without its sliding window, as in llama.cpp."""

    traits = Traits(rope_style="neox", norm_eps="layer")
    block_type = GPT2Block
