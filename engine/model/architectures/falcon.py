"""Falcon 1: attention and FFN side by side, after one norm (7B) or two (40B, 180B)."""

from __future__ import annotations

from typing import ClassVar

from engine.model.architectures.base import CausalLM
from engine.model.architectures.gpt2 import GPT2Block
from engine.model.architectures.registry import register
from engine.model.layers.block import Block, ParallelBlock, TwoNormParallelBlock
from engine.model.layers.hparams import HParams, Traits


class FalconBlock(ParallelBlock, GPT2Block):
    """A parallel block with one norm for both parts."""


class FalconTwoNormBlock(TwoNormParallelBlock, GPT2Block):
    """A parallel block with two norms; files call the FFN's `attn_norm`."""

    tensor_names: ClassVar = {"attn_norm": "attn_norm_2", "ffn_norm": "attn_norm"}


@register("falcon")
class Falcon(CausalLM):
    """Falcon 1 (arXiv 2311.16867)."""

    traits = Traits(rope_style="neox", norm_eps="layer")
    block_type = FalconBlock

    @classmethod
    def block_for(cls, hp: HParams, layer: int) -> type[Block]:
        has_two = hp.has(layer, "attn_norm_2.weight")
        return FalconTwoNormBlock if has_two else cls.block_type
