"""GLM 4, dense, and GLM 4.5 to 4.7 with routed experts."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from engine.model.architectures.base import CausalLM, SwaOnlyRopeLM
from engine.model.architectures.deepseek import SigmoidRoutedBlock
from engine.model.architectures.registry import register
from engine.model.layers.block import PostNormBlock, SandwichBlock
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.mixers.attention import QKNormAttention
from engine.model.layers.norm import Rope


@register("glm4")
class Glm4(CausalLM):
    """GLM 4 (arXiv 2406.12793); biases load where a file has them."""

    block_type = SandwichBlock

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Use NeoX-style RoPE for the vision models, whose files store q and k as M-RoPE needs."""
        sections = hp.keys.integers("rope.dimension_sections", 2, (0, 0))
        return replace(hp, rope=replace(hp.rope, style="neox")) if all(sections) else hp


class Glm4MoEBlock(SigmoidRoutedBlock):
    """A block with routed experts, in GLM 4.5 Air and Solar Open without norms of heads."""

    tensor_names: ClassVar = {"ffn_norm": "post_attention_norm"}


@register("glm4moe")
class Glm4MoE(CausalLM):
    """GLM 4.5 to 4.7 (arXiv 2508.06471); also Solar Open."""

    traits = Traits(rope_style="neox", mtp_hidden="normed")
    block_type = Glm4MoEBlock


N_LAYER_WITH_WINDOWS = 64
"""Number of layers of the 32B model, the only one with windows; no key says so, as in llama.cpp."""


class Exaone4Block(PostNormBlock):
    """A block with norms after its parts, and normalised query and key heads."""

    mixer_type = QKNormAttention


@register("exaone4")
class Exaone4(SwaOnlyRopeLM):
    """EXAONE 4 (arXiv 2507.11407); in the 32B model, only layers with a window rotate positions."""

    traits = Traits(rope_style="neox", swa_period=4, n_swa=4096)
    block_type = Exaone4Block

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Drop the windows of the other sizes, which have none, whatever their files say."""
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
