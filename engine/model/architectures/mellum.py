"""Mellum 2: Qwen 3's blocks with experts; RoPE is scaled where there is no window."""

from __future__ import annotations

from engine.layers.hparams import Traits
from engine.models.base import SwaRopeLM
from engine.models.qwen import Qwen3Block
from engine.models.registry import register


@register("mellum")
class Mellum(SwaRopeLM):
    """JetBrains' Mellum 2."""

    traits = Traits(rope_style="neox", swa_period=4)
    block_type = Qwen3Block
    has_swa_base = False
