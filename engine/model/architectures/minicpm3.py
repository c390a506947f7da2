"""MiniCPM 3: MiniCPM's factors around latent attention."""

from __future__ import annotations

from dataclasses import replace

from engine.model.architectures.granite import MiniCPM, MiniCPMBlock
from engine.model.architectures.registry import register
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.mixers.mla import LatentAttention


class MiniCPM3Block(MiniCPMBlock):
    """MiniCPM's block with latent attention; files fuse its maps to keys and values."""

    mixer_type = LatentAttention


@register("minicpm3")
class MiniCPM3(MiniCPM):
    """MiniCPM 3, with MiniCPM's factors, which its files lack."""

    traits = Traits(rope_style="neox")
    block_type = MiniCPM3Block

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Set the size of value heads, which unlike key heads share the width evenly."""
        value = hp.keys.integer("attention.value_length", hp.n_embd // hp.n_head[0])
        return replace(hp, head_dim_v=(value,) * hp.n_layer)
