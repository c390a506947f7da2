"""What models with recurrent layers share: blocks of one part, and a choice of block per layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from engine.layers.hparams import HParams
from engine.layers.mixer import Mixer
from engine.layers.rope import Rope
from engine.models.base import Block, CausalLM
from engine.parallel.split import BlockDims, BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.context import Context


class MixerBlock(Block):
    """`x + mixer(norm(x))` and nothing else.

    Attributes:
        mixer_type: what lets tokens see each other.
    """

    mixer_type: ClassVar[type[Mixer]]

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.attn_norm = self.norm()
        self.mixer = self.mixer_type(hp, split, layer, rope)

    @classmethod
    def dims(cls, hp: HParams, layer: int) -> BlockDims:
        return cls.mixer_type.dims(hp, layer)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return x + ctx.all_reduce(self.mixer(self.attn_norm(x, ctx), ctx), self.mixer.bias)


class HybridLM(CausalLM):
    """Some layers have a recurrent state in place of attention.

    Attributes:
        block_type: of the layers with attention.
        recurrent_type: of the others.
    """

    recurrent_type: ClassVar[type[Block]]

    @classmethod
    def block_for(cls, hp: HParams, layer: int) -> type[Block]:
        return cls.recurrent_type if hp.recurrent[layer] else cls.block_type
