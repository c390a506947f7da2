"""MiniCPM 3: MiniCPM's factors around latent attention."""

from __future__ import annotations

from dataclasses import replace

from engine.layers.hparams import HParams, Traits
from engine.layers.mixers.mla import LatentAttention
from engine.models.granite import MiniCPM, MiniCPMBlock
from engine.models.registry import register


class MiniCPM3Block(MiniCPMBlock):
    """Its files hold the maps from latents to keys and values in one matrix."""

    mixer_type = LatentAttention


@register("minicpm3")
class MiniCPM3(MiniCPM):
    """Its factors are MiniCPM's; files have none."""

    traits = Traits(rope_style="neox")
    block_type = MiniCPM3Block

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Value heads divide the width evenly among them, unlike key heads."""
        value = hp.keys.integer("attention.value_length", hp.n_embd // hp.n_head[0])
        return replace(hp, head_dim_v=(value,) * hp.n_layer)
