"""ERNIE 4.5, dense and with routed experts."""

from __future__ import annotations

from engine.model.architectures.base import CausalLM
from engine.model.architectures.registry import register
from engine.model.layers.block import TransformerBlock


@register("ernie4_5", "ernie4_5-moe")
class Ernie45(CausalLM):
    """ERNIE 4.5: Llama's blocks; experts gated by softmax, with an optional bias on the choice."""

    block_type = TransformerBlock
