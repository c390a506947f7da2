"""Poolside's Laguna: attention gated by softplus, many experts."""

from __future__ import annotations

from engine.model.architectures.base import SwaRopeLM
from engine.model.architectures.deepseek_moe import SigmoidRoutedBlock
from engine.model.architectures.registry import register
from engine.model.layers.hparams import Traits
from engine.model.layers.mixers.gated_attention import SoftplusGatedAttention


class LagunaBlock(SigmoidRoutedBlock):
    """A block whose attention has a gate per head (XS) or per element (M)."""

    mixer_type = SoftplusGatedAttention


@register("laguna")
class Laguna(SwaRopeLM):
    """Laguna; layers with a window may have more heads than others; M has no windows."""

    traits = Traits(rope_style="neox", swa_period=4, swa_first_full=True)
    block_type = LagunaBlock
