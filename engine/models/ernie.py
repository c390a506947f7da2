"""ERNIE 4.5, dense and with routed experts."""

from __future__ import annotations

from engine.layers.block import TransformerBlock
from engine.models.base import CausalLM
from engine.models.registry import register


@register("ernie4_5", "ernie4_5-moe")
class Ernie45(CausalLM):
    """Llama's blocks; a bias may count in the choice of experts, which softmax weighs."""

    block_type = TransformerBlock
