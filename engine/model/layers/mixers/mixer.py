"""Base class of mixers, and short convolutions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar

from engine.model.forward.operands import NO_SLICE, Activation
from engine.model.forward.state import RecurrentState
from engine.model.layers.linear import Linear
from engine.model.layers.module import Module, Slot, TensorSource
from engine.model.layers.norm import Rope
from engine.model.sharding.placement import Shard
from engine.model.sharding.shares import Ranges
from engine.model.sharding.split import COLUMN_UNIT, BlockDims, BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context
    from engine.model.layers.hparams import HParams


class Mixer(Module, ABC):
    """Base of attention, linear attention, state-space models and short convolutions.

    Args:
        rope: RoPE of this layer; None if it has none.

    Attributes:
        n_reduce: number of all-reduces inside it, excluding its output's.
    """

    is_nameless = True
    n_reduce = 0

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        self.hp = hp
        self.split = split
        self.layer = layer
        self._rope = (rope,)  # in a tuple, because it is the model's child

    @property
    def rope(self) -> Rope | None:
        """RoPE of this layer; None if it has none."""
        return self._rope[0]

    @classmethod
    @abstractmethod
    def dims(cls, hp: HParams, layer: int) -> BlockDims:
        """Return the sizes by which the mixer is split."""

    @abstractmethod
    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        """Map x (T, n_embd) to this rank's partial sum (T, n_embd); None if it has no slice."""

    @property
    def bias(self) -> Tensor | None:
        """Bias to add once, after the all-reduce."""
        return None


def split_last(x: Tensor, *widths: int) -> list[Tensor]:
    """Split the last dimension into adjacent parts of the given widths."""
    ends = accumulate(widths)
    return [x[..., end - width : end] for end, width in zip(ends, widths, strict=True)]


class CausalConv(Module):
    """Depthwise causal convolution over the latest `n_taps` tokens, split by channels.

    Args:
        n_taps: number of tokens per filter, including the current one.
        segments: each rank's channels, in one or several segments.

    Attributes:
        memory: argument of `RecurrentState` that declares the previous inputs.
        weight: filters, (this rank's channels, n_taps), or None.
        bias: bias of each channel, (this rank's channels,), or None.
    """

    weight: Tensor | None = None
    bias: Tensor | None = None

    def __init__(self, n_channels: int, n_taps: int, *segments: Ranges) -> None:
        self.shape = (n_channels, n_taps)
        self.placement = Shard(0, segments)
        self.memory = (segments, (n_taps - 1,))

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        n_channels, n_taps = self.shape
        torch_shape = (n_channels, 1, n_taps)  # with one input channel per filter
        weight = source.get(f"{name}.weight", self.shape, torch_shape)
        slots = [Slot(self, "weight", weight, self.placement, is_matrix=False)]
        if f"{name}.bias" in source:
            bias = source.get(f"{name}.bias", self.shape[:1])
            slots.append(Slot(self, "bias", bias, self.placement, is_matrix=False))
        return slots

    def __call__(
        self, x: Tensor, ctx: Context, state: RecurrentState, name: str,
        act: Activation | None = None, gates: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Convolve x (T, this rank's channels), continuing from each sequence's previous inputs.

        Args:
            state: declaration of the layer's state.
            name: name of the previous inputs in `state`, which are updated.
            act: activation of the result, or None.
            gates: factors on x and on the activated result, both shaped like x.
        """
        assert self.weight is not None, NO_SLICE
        states = ctx.states(state, name)
        return ctx.ops.causal_conv(x, states, self.weight, self.bias, act, gates)


class ShortConv(Mixer):
    """Gated convolution `out(c * conv(b * x))`, split by channels (arXiv 2511.23404).

    A single projection produces b, c and x. Channels are independent, so the only all-reduce is the
    output's.
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
