"""Falcon-H1: attention and Mamba 2 side by side in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.model.architectures.base import CausalLM
from engine.model.architectures.registry import register
from engine.model.layers.block import TransformerBlock
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.mixers.attention import Attention
from engine.model.layers.mixers.mamba2 import Mamba2
from engine.model.layers.mixers.mixer import Mixer
from engine.model.layers.moe import add_parts
from engine.model.layers.rope import Rope
from engine.model.sharding.split import BlockDims, BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context


class FalconH1Mamba(Mamba2):
    """Mamba 2 whose norm some sizes lack; they only gate."""

    norm_is_optional = True


class ParallelMixer(Mixer):
    """The mixer `attention(x) + mamba(x)`: both read the same x, so one all-reduce is enough.

    In files, the paper's multipliers are already part of the weights.
    """

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.attention = Attention(hp, split, layer, rope)
        self.mamba = FalconH1Mamba(hp, split, layer, rope)

    @classmethod
    def dims(cls, hp: HParams, layer: int) -> BlockDims:
        state = FalconH1Mamba.dims(hp, layer)
        return replace(state, n_head=hp.n_head[layer], n_head_kv=hp.n_head_kv[layer])

    @property
    def bias(self) -> Tensor | None:
        return add_parts(self.attention.bias, self.mamba.bias)

    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        mamba = self.mamba(x, ctx)  # first: attention may drop rows that it has to see
        attention = self.attention(x, ctx)
        return add_parts(attention, ctx.kept(mamba))


class FalconH1Block(TransformerBlock):
    """Llama's block with attention and Mamba 2 side by side."""

    mixer_type = ParallelMixer


@register("falcon-h1")
class FalconH1(CausalLM):
    """Falcon-H1 (arXiv 2507.22448)."""

    traits = Traits(rope_style="neox")
    block_type = FalconH1Block
