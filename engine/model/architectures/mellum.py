"""Mellum 2: Qwen 3's blocks with experts; RoPE is scaled where there is no window."""

from __future__ import annotations

from engine.model.architectures.base import SwaRopeLM
from engine.model.architectures.qwen import Qwen3Block
from engine.model.architectures.registry import register
from engine.model.layers.hparams import Traits


@register("mellum")
class Mellum(SwaRopeLM):
    """JetBrains' Mellum 2."""

    traits = Traits(rope_style="neox", swa_period=4)
    block_type = Qwen3Block
    has_swa_base = False
