"""Phi 1 to 4: parallel blocks with one norm up to Phi 2, Llama's blocks from Phi 3 on."""

from __future__ import annotations

from engine.model.architectures.base import CausalLM
from engine.model.architectures.gpt2 import GPT2Block
from engine.model.architectures.registry import register
from engine.model.layers.block import ParallelBlock, TransformerBlock
from engine.model.layers.hparams import Traits


class Phi2Block(ParallelBlock, GPT2Block):
    """A parallel block with one norm for both parts."""


@register("phi2")
class Phi2(CausalLM):
    """Phi 1, 1.5 and 2 (arXiv 2309.05463)."""

    traits = Traits(rope_style="neox", norm_eps="layer")
    block_type = Phi2Block


@register("phi3", "phimoe")
class Phi3(CausalLM):
    """Phi 3 to 4 (arXiv 2404.14219), dense and with routed experts.

    Sliding windows are left out as in llama.cpp, because files do not state which layers have one.
    In place of Phi 3.5 MoE's LayerNorm stands, as in llama.cpp, an RMSNorm with bias.
    """

    traits = Traits(rope_style="neox")
    block_type = TransformerBlock
