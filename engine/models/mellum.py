"""Mellum 2: Qwen 3's blocks with experts; positions are stretched where there is no window."""

from __future__ import annotations

from engine.layers.hparams import HParams, Traits
from engine.layers.rope import RopeParams
from engine.models.qwen import Qwen3Block
from engine.models.registry import register
from engine.models.swa_rope import SwaRopeLM


@register("mellum")
class Mellum(SwaRopeLM):
    """A base of the windowed layers' own is not read."""

    traits = Traits(rope_style="neox", swa_period=4)
    block_type = Qwen3Block

    @classmethod
    def swa_rope(cls, hp: HParams) -> RopeParams:
        return hp.rope.unscaled(hp.rope.base)
