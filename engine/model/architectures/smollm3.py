"""SmolLM 3: Llama's block; some layers rotate no positions."""

from __future__ import annotations

from engine.layers.block import TransformerBlock
from engine.models.base import EachFourthNoPELM
from engine.models.registry import register


@register("smollm3")
class SmolLM3(EachFourthNoPELM):
    """SmolLM 3; the converter permuted q and k for adjacent rotation pairs."""

    block_type = TransformerBlock
