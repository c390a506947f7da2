"""StarCoder 2: GPT-2's block with rotated positions."""

from __future__ import annotations

from engine.layers.hparams import Traits
from engine.models.base import CausalLM
from engine.models.gpt2 import GPT2Block
from engine.models.registry import register


@register("starcoder2")
class StarCoder2(CausalLM):
    """arXiv 2402.19173; llama.cpp looks past its sliding window, and so does this."""

    traits = Traits(rope_style="neox", norm_eps="layer")
    block_type = GPT2Block
