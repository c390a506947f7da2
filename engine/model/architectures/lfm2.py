"""LFM2, dense and with routed experts: short convolutions with attention in some layers."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from engine.model.architectures.base import HybridLM
from engine.model.architectures.registry import register
from engine.model.layers.block import TransformerBlock
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.mixers.attention import QKNormAttention
from engine.model.layers.mixers.short_conv import ShortConv


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
