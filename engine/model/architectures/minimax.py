"""MiniMax M2: routed experts in every layer; queries and keys normalised as whole rows."""

from __future__ import annotations

from engine.model.architectures.base import CausalLM
from engine.model.architectures.registry import register
from engine.model.layers.block import TransformerBlock
from engine.model.layers.hparams import Traits
from engine.model.layers.mixers.attention import RowNormAttention


class MiniMaxM2Block(TransformerBlock):
    """A block with experts gated by sigmoid, with a bias on their choice alone."""

    mixer_type = RowNormAttention
    gating = "sigmoid"


@register("minimax-m2")
class MiniMaxM2(CausalLM):
    """MiniMax M2 (2025); half of each head is rotated."""

    traits = Traits(rope_style="neox")
    block_type = MiniMaxM2Block
