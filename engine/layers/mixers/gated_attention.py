"""Attention whose heads are opened and closed by gates from what the layer reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.layers.linear import Linear
from engine.layers.mixers.attention import QKNormAttention, split_heads
from engine.layers.module import Slot, TensorSource
from engine.sharding.placement import Shard
from engine.sharding.split import BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.forward.context import Context
    from engine.layers.hparams import HParams
    from engine.layers.rope import Rope


class HeadGate(Linear):
    """One gate per head, or one per element of each head: as many as the file has."""

    def __init__(self, n_embd: int, n_head: int, head_dim: int, placement: Shard) -> None:
        super().__init__(n_embd, n_head * head_dim, placement)
        self.per_head = (n_head, n_embd)

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        found = source.tensors.get(f"{name}.weight")
        if found is not None and found.shape == self.per_head:
            self.shape = self.per_head
        return super().bind(source, name)


class GatedAttention(QKNormAttention):
    """Multiplies the heads' outputs by sigmoid gates before they are mixed (arXiv 2505.06708).

    Some layers have no gates; then outputs stay as they are.
    """

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.attn_gate: HeadGate | None = None
        if hp.has(layer, "attn_gate.weight"):
            placement = Shard(0, split.heads)
            self.attn_gate = HeadGate(hp.n_embd, hp.n_head[layer], self.head_dim_v, placement)

    def opened(self, gate: Tensor, ctx: Context) -> Tensor:
        """The factors that gates, of any shape, stand for."""
        return gate.sigmoid()

    def finish(self, heads: Tensor, x: Tensor, ctx: Context) -> Tensor:
        if self.attn_gate is not None:
            gates = self.opened(self.attn_gate(x), ctx)
            heads = heads * split_heads(gates, gates.shape[-1] // heads.shape[1])
        return super().finish(heads, x, ctx)


class SoftplusGatedAttention(GatedAttention):
    """Its gates only grow with their logits: they may also amplify."""

    def opened(self, gate: Tensor, ctx: Context) -> Tensor:
        return ctx.ops.softplus(gate)
