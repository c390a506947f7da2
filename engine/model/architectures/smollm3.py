"""SmolLM 3: Llama's block; some layers rotate no positions."""

from __future__ import annotations

from engine.model.architectures.base import EachFourthNoPELM
from engine.model.architectures.registry import register
from engine.model.layers.block import TransformerBlock


@register("smollm3")
class SmolLM3(EachFourthNoPELM):
    """SmolLM 3; the converter permuted q and k for adjacent rotation pairs."""

    block_type = TransformerBlock
