"""Kimi Linear: three layers of linear attention to one of latent attention, none with positions."""

from __future__ import annotations

from typing import ClassVar

from engine.model.architectures.base import HybridLM
from engine.model.architectures.registry import register
from engine.model.layers.block import TransformerBlock
from engine.model.layers.hparams import Traits
from engine.model.layers.mixers.kda import KimiDeltaAttention
from engine.model.layers.mixers.mixer import Mixer
from engine.model.layers.mixers.mla import LatentAttention


class KimiBlock(TransformerBlock):
    """A block of latent attention, with experts gated like DeepSeek V3's."""

    mixer_type: ClassVar[type[Mixer]] = LatentAttention
    gating = "sigmoid"


class KimiLinearBlock(KimiBlock):
    """Kimi's block with linear attention (KDA) in place of latent attention."""

    mixer_type = KimiDeltaAttention


@register("kimi-linear")
class KimiLinear(HybridLM):
    """Kimi Linear (arXiv 2510.26692)."""

    traits = Traits(rope_style=None, is_hybrid=True)
    block_type = KimiBlock
    recurrent_type = KimiLinearBlock
