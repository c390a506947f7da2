"""OLMo 1 to 3 and OLMoE, the models of the Allen Institute."""

from __future__ import annotations

from engine.model.architectures.base import CausalLM, SwaRopeLM
from engine.model.architectures.registry import register
from engine.model.layers.block import PostNormBlock, TransformerBlock
from engine.model.layers.hparams import Traits
from engine.model.layers.mixers.attention import ClampedAttention, RowNormAttention
from engine.model.layers.norm import LayerNorm
from engine.model.sharding.placement import Placement


class BareLayerNorm(LayerNorm):
    """LayerNorm without weight and bias."""

    def __init__(self, n: int, eps: float, placement: Placement) -> None:
        super().__init__(n, eps, placement, affine=False)


class OlmoBlock(TransformerBlock):
    """A block with norms without weights, and optionally clamped queries, keys and values."""

    norm_type = BareLayerNorm
    mixer_type = ClampedAttention


@register("olmo")
class Olmo(CausalLM):
    """OLMo 1 (arXiv 2402.00838); the converter permuted q and k for adjacent rotation pairs."""

    traits = Traits(norm_eps="layer")
    block_type = OlmoBlock


class Olmo2Block(PostNormBlock):
    """A block with norms after attention and FFN, and of whole rows of queries and keys."""

    mixer_type = RowNormAttention


@register("olmo2")
class Olmo2(SwaRopeLM):
    """OLMo 2 (arXiv 2501.00656) and 3."""

    traits = Traits(rope_style="neox", swa_period=4)
    block_type = Olmo2Block
    has_swa_base = False


class OlmoeBlock(TransformerBlock):
    """Llama's block with norms of whole query and key rows; expert weights are not normalised."""

    mixer_type = RowNormAttention
    normalises_experts = False


@register("olmoe")
class Olmoe(CausalLM):
    """OLMoE (arXiv 2409.02060)."""

    traits = Traits(rope_style="neox")
    block_type = OlmoeBlock
