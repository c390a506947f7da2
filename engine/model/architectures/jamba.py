"""Jamba: Mamba 1 with attention in some layers and routed experts in others."""

from __future__ import annotations

from engine.model.architectures.base import HybridLM
from engine.model.architectures.registry import register
from engine.model.layers.block import TransformerBlock
from engine.model.layers.hparams import Traits
from engine.model.layers.mixers.mamba import NormedMamba


class JambaBlock(TransformerBlock):
    """Llama's block; the weights of the chosen experts are not normalised."""

    normalises_experts = False


class JambaMambaBlock(JambaBlock):
    """Jamba's block with Mamba 1 in place of attention."""

    mixer_type = NormedMamba


@register("jamba")
class Jamba(HybridLM):
    """Jamba (arXiv 2403.19887); positions are not rotated."""

    traits = Traits(rope_style=None, is_hybrid=True)
    block_type = JambaBlock
    recurrent_type = JambaMambaBlock
