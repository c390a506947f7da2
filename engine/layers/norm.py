"""Root-mean-square norms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.layers.module import Module, Slot, TensorSource
from engine.parallel.placement import Placement, Shard

if TYPE_CHECKING:
    from torch import Tensor

    from engine.context import Context


class RMSNorm(Module):
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension (Zhang & Sennrich 2019).

    The vector may be whole on a rank (`Replicate`) or cut (`Shard`): then the mean runs over all
    ranks, which costs one all_reduce of a number per token.
    """

    weight: Tensor | None = None

    def __init__(self, n: int, eps: float, placement: Placement) -> None:
        self.n = n
        self.eps = eps
        self.placement = placement

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        weight = source.get(f"{name}.weight", (self.n,))
        return [Slot(self, "weight", weight, self.placement, is_matrix=False)]

    def __call__(self, x: Tensor, ctx: Context) -> Tensor:
        """Normalise x (..., n); whole vectors only."""
        assert self.weight is not None, "a rank outside the group must not compute it"
        return ctx.ops.rms_norm(x, self.weight, self.eps)

    def sharded(self, x: Tensor | None, ctx: Context) -> Tensor | None:
        """Normalise vectors that are cut over the group; a rank without a slice passes None."""
        assert isinstance(self.placement, Shard)
        squares = None if x is None else x.square().sum(-1, keepdim=True)
        mean = ctx.all_reduce(squares) / self.n
        if x is None or self.weight is None:
            return None
        scaled: Tensor = x * (mean + self.eps).rsqrt() * self.weight
        return scaled
