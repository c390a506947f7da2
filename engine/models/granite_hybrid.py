"""Granite 4: Granite with Mamba 2 in most layers."""

from __future__ import annotations

from engine.layers.hparams import Traits
from engine.layers.mamba2 import Mamba2
from engine.models.granite import Granite, GraniteBlock
from engine.models.hybrid import HybridLM
from engine.models.registry import register


class GraniteMambaBlock(GraniteBlock):
    """With a recurrent layer in place of attention."""

    mixer_type = Mamba2


@register("granitehybrid")
class GraniteHybrid(Granite, HybridLM):
    """Files of most sizes say that positions are not rotated."""

    traits = Traits(is_hybrid=True)
    recurrent_type = GraniteMambaBlock
