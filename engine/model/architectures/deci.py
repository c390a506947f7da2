"""DeciLM and Nemotron 49B to 253B: Llama with parts left out or replaced by a search."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from engine.model.architectures.base import CausalLM
from engine.model.architectures.registry import register
from engine.model.layers.block import Block, FFNBlock, MixerBlock, TransformerBlock
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.linear import Linear
from engine.model.layers.mixers.mixer import Mixer
from engine.model.layers.norm import Rope
from engine.model.sharding.placement import Shard
from engine.model.sharding.split import BlockDims, BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context

MixerKind = Literal["attention", "linear", "none"]
"""Kind of the part of a block that stands in the place of attention."""


class LinearMixer(Mixer):
    """A matrix in place of attention, whose columns are cut as if they belonged to heads."""

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.width = hp.n_embd // hp.n_head[layer]
        self.attn_output = Linear(hp.n_embd, hp.n_embd, Shard(1, split.heads), split.group)

    @classmethod
    def dims(cls, hp: HParams, layer: int) -> BlockDims:
        return BlockDims(n_head=hp.n_head[layer], n_head_kv=hp.n_head[layer])

    @property
    def bias(self) -> Tensor | None:
        return self.attn_output.bias

    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        if not ctx.owns(self.split.heads):
            return None
        start, stop = self.split.heads.spans[ctx.rank]
        return self.attn_output(x[:, start * self.width : stop * self.width])


class LinearBlock(TransformerBlock):
    """A block of a matrix and an FFN."""

    mixer_type = LinearMixer


class LinearOnlyBlock(MixerBlock):
    """A block of a matrix without an FFN."""

    mixer_type = LinearMixer


class EmptyBlock(Block):
    """A block without any part."""

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return x


BLOCKS: dict[tuple[MixerKind, bool], type[Block]] = {
    ("attention", True): TransformerBlock,
    ("attention", False): MixerBlock,
    ("linear", True): LinearBlock,
    ("linear", False): LinearOnlyBlock,
    ("none", True): FFNBlock,
    ("none", False): EmptyBlock,
}
"""Classes of blocks by what is in place of attention, and whether there is an FFN."""


@register("deci")
class Deci(CausalLM):
    """DeciLM, by Puzzle (arXiv 2411.19146); the converter permuted q and k as for Llama."""

    traits = Traits(is_hybrid=True)
    block_type = TransformerBlock

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Mark no layer as recurrent: those without key-value heads are not.

        Raises:
            InvalidGGUF: there are experts, or a matrix cannot be cut into as many parts as heads.
        """
        hp.refuse_experts()
        for n_head in filter(None, hp.n_head):
            if hp.n_embd % n_head:
                raise hp.keys.invalid(f"{n_head} heads cannot share {hp.n_embd} elements")
        return replace(hp, recurrent=(False,) * hp.n_layer)

    @classmethod
    def block_for(cls, hp: HParams, layer: int) -> type[Block]:
        n_head, n_head_kv = hp.n_head[layer], hp.n_head_kv[layer]
        kind: MixerKind = "attention" if n_head_kv else "linear" if n_head else "none"
        return BLOCKS[kind, hp.n_ff[layer] > 0]
