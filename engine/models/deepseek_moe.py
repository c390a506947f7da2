"""Models with DeepSeek's experts (arXiv 2401.06066) behind attention with key-value heads."""

from __future__ import annotations

from engine.layers.attention import QKNormAttention
from engine.layers.hparams import Traits
from engine.layers.moe import Routing
from engine.models.base import CausalLM, TransformerBlock
from engine.models.registry import register
from engine.models.swa_only_rope import SwaOnlyRopeLM


class SigmoidRoutedBlock(TransformerBlock):
    """Normalised query and key heads; each expert is scored by itself unless the file differs."""

    mixer_type = QKNormAttention

    def routing(self) -> Routing:
        return Routing.read(self.hp, "sigmoid", normalise=False)


@register("dots1", "bailingmoe2", "hy_v3")
class SigmoidRoutedMoE(CausalLM):
    """dots.llm1 (arXiv 2506.05767), Ling and Ring 2.0 (arXiv 2510.22115), Hunyuan 3."""

    traits = Traits(rope_style="neox")
    block_type = SigmoidRoutedBlock


@register("exaone-moe")
class ExaoneMoE(SwaOnlyRopeLM, SigmoidRoutedMoE):
    """K-EXAONE."""

    traits = Traits(rope_style="neox", swa_period=4)
