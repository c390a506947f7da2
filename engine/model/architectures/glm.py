"""GLM 4, dense, and GLM 4.5 to 4.7 with routed experts."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from engine.model.architectures.base import CausalLM
from engine.model.architectures.deepseek_moe import SigmoidRoutedBlock
from engine.model.architectures.registry import register
from engine.model.layers.block import SandwichBlock
from engine.model.layers.hparams import HParams, Traits


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
