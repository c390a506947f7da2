"""StableLM 1 and 2: Llama's block with LayerNorms; parallel blocks in the 12B."""

from __future__ import annotations

from engine.model.architectures.base import CausalLM
from engine.model.architectures.registry import register
from engine.model.layers.block import Block, ParallelBlock, TransformerBlock
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.mixers.attention import HeadNormAttention
from engine.model.layers.norm import LayerNorm


class StableLMBlock(TransformerBlock):
    """Llama's block with LayerNorms; query and key heads have norms in the 12B alone."""

    norm_type = LayerNorm
    mixer_type = HeadNormAttention


class StableLMParallelBlock(ParallelBlock, StableLMBlock):
    """A parallel block with one norm for both parts."""


@register("stablelm")
class StableLM(CausalLM):
    """StableLM (arXiv 2402.17834); a block without `ffn_norm` is parallel."""

    traits = Traits(rope_style="neox", norm_eps="layer")
    block_type = StableLMBlock

    @classmethod
    def block_for(cls, hp: HParams, layer: int) -> type[Block]:
        is_parallel = not hp.has(layer, "ffn_norm.weight")
        return StableLMParallelBlock if is_parallel else cls.block_type
