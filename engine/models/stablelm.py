"""StableLM 1 to 2: Llama's FFN after LayerNorms; the 12B in parallel blocks."""

from __future__ import annotations

from engine.layers.block import Block, ParallelBlock, TransformerBlock
from engine.layers.hparams import HParams, Traits
from engine.layers.mixers.attention import HeadNormAttention
from engine.layers.norm import LayerNorm
from engine.models.base import CausalLM
from engine.models.registry import register


class StableLMBlock(TransformerBlock):
    """Norms of query and key heads only in the 12B."""

    norm_type = LayerNorm
    mixer_type = HeadNormAttention


class StableLMParallelBlock(ParallelBlock, StableLMBlock):
    """One norm for both parts."""


@register("stablelm")
class StableLM(CausalLM):
    """arXiv 2402.17834; a block without `ffn_norm` is a parallel one."""

    traits = Traits(rope_style="neox", norm_eps="layer")
    block_type = StableLMBlock

    @classmethod
    def block_for(cls, hp: HParams, layer: int) -> type[Block]:
        is_parallel = not hp.has(layer, "ffn_norm.weight")
        return StableLMParallelBlock if is_parallel else cls.block_type
