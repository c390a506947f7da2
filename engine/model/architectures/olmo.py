"""OLMo 1 to 3, OLMoE, and EXAONE 4, which has post-norms like OLMo 2."""

from __future__ import annotations

from dataclasses import replace

from engine.model.architectures.base import CausalLM, SwaOnlyRopeLM, SwaRopeLM
from engine.model.architectures.deepseek import SigmoidRoutedBlock
from engine.model.architectures.registry import register
from engine.model.layers.block import PostNormBlock, TransformerBlock
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.mixers.attention import ClampedAttention, QKNormAttention, RowNormAttention
from engine.model.layers.norm import LayerNorm, Rope
from engine.model.sharding.placement import Placement


class BareLayerNorm(LayerNorm):
    """LayerNorm without weight or bias."""

    def __init__(self, n: int, eps: float, placement: Placement) -> None:
        super().__init__(n, eps, placement, affine=False)


class OlmoBlock(TransformerBlock):
    """A block with weightless norms, and optionally clamped queries, keys and values."""

    norm_type = BareLayerNorm
    mixer_type = ClampedAttention


@register("olmo")
class Olmo(CausalLM):
    """OLMo 1 (arXiv 2402.00838); the converter permuted q and k for adjacent rotation pairs."""

    traits = Traits(norm_eps="layer")
    block_type = OlmoBlock


class Olmo2Block(PostNormBlock):
    """A block with post-norms, and norms over whole query and key rows."""

    mixer_type = RowNormAttention


@register("olmo2")
class Olmo2(SwaRopeLM):
    """OLMo 2 (arXiv 2501.00656) and 3."""

    traits = Traits(rope_style="neox", swa_period=4)
    block_type = Olmo2Block
    has_swa_base = False


class OlmoeBlock(TransformerBlock):
    """Llama's block with norms over whole query and key rows; expert weights are not normalised."""

    mixer_type = RowNormAttention
    normalises_experts = False


@register("olmoe")
class Olmoe(CausalLM):
    """OLMoE (arXiv 2409.02060)."""

    traits = Traits(rope_style="neox")
    block_type = OlmoeBlock


N_LAYER_WITH_WINDOWS = 64
"""Layer count that, as in llama.cpp, identifies the 32B model, the only one with windows."""


class Exaone4Block(PostNormBlock):
    """A block with post-norms, and query and key norms."""

    mixer_type = QKNormAttention


@register("exaone4")
class Exaone4(SwaOnlyRopeLM):
    """EXAONE 4 (arXiv 2507.11407); in the 32B, only sliding-window layers have RoPE."""

    traits = Traits(rope_style="neox", swa_period=4, n_swa=4096)
    block_type = Exaone4Block

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Remove windows from other sizes, which have none even if their files say so."""
        if hp.n_layer == N_LAYER_WITH_WINDOWS:
            return super().refine(hp)
        return replace(hp, n_swa=0, swa=(False,) * hp.n_layer)

    def rope_of(self, layer: int) -> Rope | None:
        return super().rope_of(layer) if self.hp.n_swa else self.rope_freqs


@register("exaone-moe")
class ExaoneMoE(SwaOnlyRopeLM):
    """K-EXAONE, with routed experts."""

    traits = Traits(rope_style="neox", swa_period=4)
    block_type = SigmoidRoutedBlock
