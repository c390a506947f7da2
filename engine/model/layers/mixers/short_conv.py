"""Gated short convolution in place of attention (LFM2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from engine.model.forward.state import RecurrentState
from engine.model.layers.linear import Linear
from engine.model.layers.mixers.conv import CausalConv
from engine.model.layers.mixers.mixer import Mixer
from engine.model.sharding.placement import Shard
from engine.model.sharding.split import COLUMN_UNIT, BlockDims, BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context
    from engine.model.layers.hparams import HParams
    from engine.model.layers.rope import Rope


class ShortConv(Mixer):
    """Gated convolution `out(c * conv(b * x))`, cut by channels (arXiv 2511.23404).

    b, c and x come from one projection. No channel sees another one, so the only all-reduce is that
    of the output.

    Attributes:
        state: declaration of the convolution's inputs.
    """

    tensor_names: ClassVar = {
        "in_proj": "shortconv.in_proj",
        "conv": "shortconv.conv",
        "out_proj": "shortconv.out_proj",
    }

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        n, channels = hp.n_embd, split.state_heads
        self.in_proj = Linear(n, 3 * n, Shard(0, (channels, channels, channels)))
        self.conv = CausalConv(n, hp.keys.integer("shortconv.l_cache"), channels)
        self.out_proj = Linear(n, n, Shard(1, channels), split.group)
        self.state = RecurrentState(conv=self.conv.memory)

    @classmethod
    def dims(cls, hp: HParams, layer: int) -> BlockDims:
        return BlockDims(
            n_state_head=hp.n_embd, n_state_group=hp.n_embd, state_unit=COLUMN_UNIT
        )  # fmt: skip

    @property
    def bias(self) -> Tensor | None:
        return self.out_proj.bias

    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        if not ctx.owns(self.split.state_heads):
            return None
        b, c, values = self.in_proj(x).chunk(3, dim=-1)
        return self.out_proj(self.conv(values, ctx, self.state, "conv", gates=(b, c)))
