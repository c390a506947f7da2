"""Dense feed-forward parts, cut by columns of the inner dimension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from engine.layers.linear import Linear
from engine.layers.module import Module
from engine.sharding.placement import Shard
from engine.sharding.ranges import Ranges

if TYPE_CHECKING:
    from torch import Tensor

    from engine.forward.context import Context

Group = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Activation:
    """What happens between the matrices.

    Attributes:
        kind: "silu"; "gelu" (tanh approximation); "relu"; "relu2" (ReLU squared); "oai": gpt-oss's
            SiLU of 1.702 × gate times (up + 1); "sigmoid".
        limit: the gate is kept below this and the factor within ±limit; 0 for no limits.
    """

    kind: Literal["silu", "gelu", "relu", "relu2", "oai", "sigmoid"] = "silu"
    limit: float = 0.0


OAI_ALPHA = 1.702
"""Factor on the gate inside the sigmoid of "oai"."""

SILU, GELU, RELU2 = Activation("silu"), Activation("gelu"), Activation("relu2")
SIGMOID = Activation("sigmoid")


class FFN(Module):
    """`down(act(gate(x)) * up(x))` (Shazeer 2020), or `down(act(up(x)))` without a gate.

    Attributes:
        n_reduce: how often the ranks meet inside it.
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
        """Map x (T, n_embd) to this rank's summand of (T, n_embd)."""
        if not ctx.owns(self.columns):
            return None
        return self.ffn_down(self.inner(x, ctx))

    def inner(self, x: Tensor, ctx: Context) -> Tensor:
        """The activations (T, columns of this rank)."""
        if self.ffn_gate is None:
            return ctx.ops.activate(self.act, self.ffn_up(x))
        return ctx.ops.gated_linears(self.act, x, self.ffn_gate, self.ffn_up)

    @property
    def bias(self) -> Tensor | None:
        """What is added once after the reduce."""
        return self.ffn_down.bias
