"""Attention whose heads' outputs are multiplied by gates computed from the layer's input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.model.forward.operands import SIGMOID
from engine.model.layers.linear import Linear
from engine.model.layers.mixers.attention import QKNormAttention, split_heads
from engine.model.layers.module import Slot, TensorSource
from engine.model.sharding.placement import Shard
from engine.model.sharding.split import BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context
    from engine.model.layers.hparams import HParams
    from engine.model.layers.rope import Rope


class HeadGate(Linear):
    """Projection to one gate per head or one per element of each head, as in the file.

    Attributes:
        per_head: shape of the matrix with one gate per head.
    """

    def __init__(self, n_embd: int, n_head: int, head_dim: int, placement: Shard) -> None:
        super().__init__(n_embd, n_head * head_dim, placement)
        self.per_head = (n_head, n_embd)

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        found = source.tensors.get(f"{name}.weight")
        if found is not None and found.shape == self.per_head:
            self.shape = self.per_head
        return super().bind(source, name)


class GatedAttention(QKNormAttention):
    """Attention with sigmoid gates on the heads' outputs, before they are mixed (arXiv 2505.06708).

    Some layers have no gates; then outputs stay as they are.
    """

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.attn_gate: HeadGate | None = None
        if hp.has(layer, "attn_gate.weight"):
            placement = Shard(0, split.heads)
            self.attn_gate = HeadGate(hp.n_embd, hp.n_head[layer], self.head_dim_v, placement)

    def gate_factors(self, gate: Tensor, ctx: Context) -> Tensor:
        """Return the factors of gates, which may have any shape."""
        return ctx.ops.activate(SIGMOID, gate)

    def finish(self, heads: Tensor, x: Tensor, ctx: Context) -> Tensor:
        if self.attn_gate is not None:
            gates = self.gate_factors(self.attn_gate(ctx.kept(x)), ctx)
            heads = heads * split_heads(gates, gates.shape[-1] // heads.shape[1])
        return super().finish(heads, x, ctx)


class SoftplusGatedAttention(GatedAttention):
    """Attention with softplus gates, which may also amplify."""

    def gate_factors(self, gate: Tensor, ctx: Context) -> Tensor:
        return ctx.ops.softplus(gate)
