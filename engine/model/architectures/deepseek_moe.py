"""Models with DeepSeek's experts (arXiv 2401.06066) after attention with key-value heads."""

from __future__ import annotations

from engine.model.architectures.base import CausalLM
from engine.model.architectures.registry import register
from engine.model.layers.block import TransformerBlock
from engine.model.layers.hparams import Traits
from engine.model.layers.mixers.attention import QKNormAttention


class SigmoidRoutedBlock(TransformerBlock):
    """A block with normalised query and key heads, and experts gated by sigmoid by default."""

    mixer_type = QKNormAttention
    gating = "sigmoid"
    normalises_experts = False


@register("dots1", "hy_v3")
class SigmoidRoutedMoE(CausalLM):
    """dots.llm1 (arXiv 2506.05767), Hunyuan 3."""

    traits = Traits(rope_style="neox")
    block_type = SigmoidRoutedBlock


@register("bailingmoe2")
class BailingMoE2(SigmoidRoutedMoE):
    """Ling and Ring 2.0 (arXiv 2510.22115)."""

    traits = Traits(rope_style="neox", mtp_hidden="normed")
