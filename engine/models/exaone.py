"""EXAONE 4, with norms behind attention and FFN, and K-EXAONE with routed experts."""

from __future__ import annotations

from dataclasses import replace

from engine.layers.block import PostNormBlock
from engine.layers.hparams import HParams, Traits
from engine.layers.mixers.attention import QKNormAttention
from engine.layers.rope import Rope
from engine.models.base import SwaOnlyRopeLM
from engine.models.deepseek_moe import SigmoidRoutedBlock
from engine.models.registry import register

N_LAYER_WITH_WINDOWS = 64
"""Of the 32B model; no key says it, and llama.cpp, too, goes by the number of layers."""


class Exaone4Block(PostNormBlock):
    """Each query and key head is normalised."""

    mixer_type = QKNormAttention


@register("exaone4")
class Exaone4(SwaOnlyRopeLM):
    """arXiv 2507.11407; in the 32B model, only layers with a window know positions."""

    traits = Traits(rope_style="neox", swa_period=4, n_swa=4096)
    block_type = Exaone4Block

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Other sizes have no windows, whatever their files say."""
        if hp.n_layer == N_LAYER_WITH_WINDOWS:
            return super().refine(hp)
        return replace(hp, n_swa=0, swa=(False,) * hp.n_layer)

    def rope_of(self, layer: int) -> Rope | None:
        return super().rope_of(layer) if self.hp.n_swa else self.rope_freqs


@register("exaone-moe")
class ExaoneMoE(SwaOnlyRopeLM):
    """K-EXAONE."""

    traits = Traits(rope_style="neox", swa_period=4)
    block_type = SigmoidRoutedBlock
