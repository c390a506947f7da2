"""The short convolution over time that recurrent layers have in front of their state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.layers.module import Module, Slot, TensorSource
from engine.sharding.placement import Shard
from engine.sharding.ranges import Ranges

if TYPE_CHECKING:
    from torch import Tensor

    from engine.forward.context import Context
    from engine.forward.operands import Activation


class CausalConv(Module):
    """Each channel's own filter over the latest `n_taps` tokens, cut by channels.

    Args:
        segments: the channels of each rank; their factor to real channels is the same for all.

    Attributes:
        memory: what a `RecurrentState` declares for the inputs before the current ones.
        weight: (channels of this rank, n_taps), or None.
        bias: (channels of this rank,), or None; not all files have one.
    """

    weight: Tensor | None = None
    bias: Tensor | None = None

    def __init__(self, n_channels: int, n_taps: int, *segments: Ranges) -> None:
        self.shape = (n_channels, n_taps)
        self.placement = Shard(0, segments)
        self.memory = (segments, (n_taps - 1,))

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        n_channels, n_taps = self.shape
        with_inputs = (n_channels, 1, n_taps)  # as torch has it: of one input channel each
        weight = source.get(f"{name}.weight", self.shape, with_inputs)
        slots = [Slot(self, "weight", weight, self.placement, is_matrix=False)]
        if f"{name}.bias" in source:
            bias = source.get(f"{name}.bias", self.shape[:1])
            slots.append(Slot(self, "bias", bias, self.placement, is_matrix=False))
        return slots

    def __call__(
        self, x: Tensor, memory: Tensor, ctx: Context, act: Activation | None = None,
        gates: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Convolve x (T, channels of this rank), after the inputs in `memory`, which is updated.

        Args:
            act: follows, if anything.
            gates: factors on what goes in, and on what comes out, both like x.
        """
        assert self.weight is not None, "a rank without a slice must not compute it"
        return ctx.ops.causal_conv(x, memory, self.weight, self.bias, act, gates)
