"""Dense feed-forward networks, cut by columns of the inner dimension."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.model.forward.operands import SILU
from engine.model.layers.linear import Linear
from engine.model.layers.module import Module
from engine.model.sharding.placement import Shard
from engine.model.sharding.ranges import Ranges

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context
    from engine.model.forward.operands import Activation

Group = tuple[int, ...]


class FFN(Module):
    """FFN `down(act(gate(x)) * up(x))` (Shazeer 2020), or `down(act(up(x)))` without a gate.

    Args:
        n_ff: number of columns of the inner dimension.
        columns: those columns of each rank.

    Attributes:
        n_reduce: number of all-reduces inside it, before the one of its output.
    """

    is_nameless = True
    n_reduce = 0

    def __init__(
        self, n_embd: int, n_ff: int, columns: Ranges, group: Group, act: Activation = SILU,
        *, is_gated: bool = True,
    ) -> None:  # fmt: skip
        self.columns = columns
        self.act = act
        self.ffn_up = Linear(n_embd, n_ff, Shard(0, columns))
        self.ffn_gate = Linear(n_embd, n_ff, Shard(0, columns)) if is_gated else None
        self.ffn_down = Linear(n_ff, n_embd, Shard(1, columns), group)

    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        """Map x (T, n_embd) to this rank's partial sum (T, n_embd); None if it has no columns."""
        if not ctx.owns(self.columns):
            return None
        return self.ffn_down(self.inner(x, ctx))

    def inner(self, x: Tensor, ctx: Context) -> Tensor:
        """Return the inner activations (T, columns of this rank)."""
        if self.ffn_gate is None:
            return ctx.ops.activate(self.act, self.ffn_up(x))
        return ctx.ops.gated_linears(self.act, x, self.ffn_gate, self.ffn_up)

    @property
    def bias(self) -> Tensor | None:
        """Bias that is added once, after the all-reduce."""
        return self.ffn_down.bias
