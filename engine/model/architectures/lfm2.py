"""LFM2, dense and with routed experts: short convolutions with attention in some layers."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from engine.model.architectures.base import CausalLM, HybridLM, SwaRopeLM
from engine.model.architectures.registry import register
from engine.model.layers.block import PostNormBlock, TransformerBlock
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.mixers.attention import ClampedAttention, QKNormAttention, RowNormAttention
from engine.model.layers.mixers.conv import ShortConv
from engine.model.layers.norm import LayerNorm
from engine.model.sharding.placement import Placement


class LFM2Block(TransformerBlock):
    """Llama's block with normalised query and key heads."""

    mixer_type = QKNormAttention


class LFM2ConvBlock(TransformerBlock):
    """Llama's block with a short convolution in place of attention."""

    mixer_type = ShortConv


@register("lfm2", "lfm2moe")
class LFM2(HybridLM):
    """LFM2 (arXiv 2511.23404)."""

    traits = Traits(rope_style="neox", is_hybrid=True)
    block_type = LFM2Block
    recurrent_type = LFM2ConvBlock
    tensor_names: ClassVar = {"output_norm": "token_embd_norm"}

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Apply a window, which few files have, to every layer with attention."""
        n_swa = hp.keys.integer("attention.sliding_window", 0)
        swa = tuple(bool(n_swa) and not is_recurrent for is_recurrent in hp.recurrent)
        return replace(hp, n_swa=n_swa, swa=swa)


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
