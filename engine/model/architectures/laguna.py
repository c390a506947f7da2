"""Poolside's Laguna: attention gated by softplus, many experts."""

from __future__ import annotations

from engine.layers.hparams import Traits
from engine.layers.mixers.gated_attention import SoftplusGatedAttention
from engine.models.base import SwaRopeLM
from engine.models.deepseek_moe import SigmoidRoutedBlock
from engine.models.registry import register


class LagunaBlock(SigmoidRoutedBlock):
    """A block whose attention has a gate per head (XS) or per element (M)."""

    mixer_type = SoftplusGatedAttention


@register("laguna")
class Laguna(SwaRopeLM):
    """Laguna; layers with a window may have more heads than others; M has no windows."""

    traits = Traits(rope_style="neox", swa_period=4, swa_first_full=True)
    block_type = LagunaBlock
