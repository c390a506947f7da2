"""OLMo 1 to 3 and OLMoE, the models of the Allen Institute."""

from __future__ import annotations

from engine.layers.block import PostNormBlock, TransformerBlock
from engine.layers.hparams import Traits
from engine.layers.mixers.attention import ClampedAttention, RowNormAttention
from engine.layers.norm import LayerNorm
from engine.models.base import CausalLM, SwaRopeLM
from engine.models.registry import register
from engine.sharding.placement import Placement


class BareLayerNorm(LayerNorm):
    """LayerNorm without weight and bias."""

    def __init__(self, n: int, eps: float, placement: Placement) -> None:
        super().__init__(n, eps, placement, affine=False)


class OlmoBlock(TransformerBlock):
    """Norms without weights; queries, keys and values may be limited."""

    norm_type = BareLayerNorm
    mixer_type = ClampedAttention


@register("olmo")
class Olmo(CausalLM):
    """arXiv 2402.00838; the converter has permuted q and k for neighbouring rotation pairs."""

    traits = Traits(norm_eps="layer")
    block_type = OlmoBlock


class Olmo2Block(PostNormBlock):
    """Norms behind attention and FFN; queries and keys normalised as whole rows."""

    mixer_type = RowNormAttention


@register("olmo2")
class Olmo2(SwaRopeLM):
    """OLMo 2 (arXiv 2501.00656) and 3."""

    traits = Traits(rope_style="neox", swa_period=4)
    block_type = Olmo2Block
    has_swa_base = False


class OlmoeBlock(TransformerBlock):
    """The weights of the chosen experts are not brought to a sum of 1."""

    mixer_type = RowNormAttention
    normalises_experts = False


@register("olmoe")
class Olmoe(CausalLM):
    """arXiv 2409.02060."""

    traits = Traits(rope_style="neox")
    block_type = OlmoeBlock
