"""ERNIE 4.5, dense and with routed experts."""

from __future__ import annotations

from engine.layers.block import TransformerBlock
from engine.models.base import CausalLM
from engine.models.registry import register


@register("ernie4_5", "ernie4_5-moe")
class Ernie45(CausalLM):
    """ERNIE 4.5: Llama's blocks; experts gated by softmax, with an optional bias on the choice."""

    block_type = TransformerBlock
