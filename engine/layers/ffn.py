"""Feed-forward parts: the gated one of dense blocks and the routed experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.layers.linear import ExpertLinear, Linear
from engine.layers.module import Module
from engine.parallel.placement import Replicate, Shard
from engine.parallel.ranges import Ranges

if TYPE_CHECKING:
    from torch import Tensor

    from engine.context import Context

Group = tuple[int, ...]


class SwiGLU(Module):
    """`down(silu(gate(x)) * up(x))` (Shazeer 2020), cut by columns of the inner dimension."""

    is_nameless = True

    def __init__(self, n_embd: int, n_ff: int, columns: Ranges, group: Group) -> None:
        self.columns = columns
        self.ffn_gate = Linear(n_embd, n_ff, Shard(0, columns))
        self.ffn_up = Linear(n_embd, n_ff, Shard(0, columns))
        self.ffn_down = Linear(n_ff, n_embd, Shard(1, columns), group)

    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        """Map x (T, n_embd) to this rank's summand of (T, n_embd)."""
        if not ctx.owns(self.columns):
            return None
        return self.ffn_down(self.inner(x, ctx))

    def inner(self, x: Tensor, ctx: Context) -> Tensor:
        """The gated activations (T, columns of this rank)."""
        return ctx.ops.swiglu(self.ffn_gate(x), self.ffn_up(x))

    @property
    def bias(self) -> Tensor | None:
        """What is added once after the reduce."""
        return self.ffn_down.bias


class MoE(Module):
    """Routed experts: each token goes to the `n_used` experts that its router likes best.

    Every rank routes by itself, bit for bit alike on devices of one kind, and holds the same
    columns of every expert, so one all_reduce of the weighted sum suffices. The weights are the
    router's softmax over the chosen experts (Mixtral, arXiv 2401.04088).
    """

    is_nameless = True
    bias: Tensor | None = None

    def __init__(
        self, n_embd: int, n_ff: int, n_expert: int, n_used: int, columns: Ranges, group: Group
    ) -> None:
        self.columns = columns
        self.n_used = n_used
        self.ffn_gate_inp = Linear(n_embd, n_expert, Replicate(group))
        self.ffn_gate_exps = ExpertLinear(n_expert, n_embd, n_ff, Shard(1, columns))
        self.ffn_up_exps = ExpertLinear(n_expert, n_embd, n_ff, Shard(1, columns))
        self.ffn_down_exps = ExpertLinear(n_expert, n_ff, n_embd, Shard(2, columns))

    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        """Map x (T, n_embd) to this rank's summand of (T, n_embd)."""
        if not ctx.owns(self.columns):
            return None
        logits, chosen = self.ffn_gate_inp(x).topk(self.n_used)
        weights = logits.softmax(-1)
        total = x.new_zeros(x.shape)
        for expert in sorted(set(chosen.flatten().tolist())):
            token, rank_in_token = (chosen == expert).nonzero(as_tuple=True)
            y = self._expert(x[token], expert, ctx)
            total.index_add_(0, token, y * weights[token, rank_in_token, None])
        return total

    def _expert(self, x: Tensor, expert: int, ctx: Context) -> Tensor:
        gate, up = self.ffn_gate_exps(x, expert), self.ffn_up_exps(x, expert)
        return self.ffn_down_exps(ctx.ops.swiglu(gate, up), expert)
