"""GPT-NeoX and Pythia: attention and FFN side by side, or one after the other."""

from __future__ import annotations

from engine.model.architectures.base import CausalLM
from engine.model.architectures.gpt2 import GPT2Block
from engine.model.architectures.registry import register
from engine.model.layers.block import Block, TwoNormParallelBlock
from engine.model.layers.hparams import HParams, Traits


class GPTNeoXParallelBlock(TwoNormParallelBlock, GPT2Block):
    """A block whose attention and FFN read the same input, each through its own norm."""


@register("gptneox")
class GPTNeoX(CausalLM):
    """GPT-NeoX (arXiv 2204.06745); the file states the kind of its blocks."""

    traits = Traits(rope_style="neox", norm_eps="layer")
    block_type = GPT2Block

    @classmethod
    def block_for(cls, hp: HParams, layer: int) -> type[Block]:
        is_parallel = hp.keys.flag("use_parallel_residual", True)
        return GPTNeoXParallelBlock if is_parallel else cls.block_type
