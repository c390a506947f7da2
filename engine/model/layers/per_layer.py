"""Per-layer embeddings (Gemma 3n and 4): each token also has a small vector for every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.model.forward.operands import GELU
from engine.model.forward.ops import Addend
from engine.model.layers.linear import Embedding, Linear
from engine.model.layers.module import Module
from engine.model.layers.norm import RMSNorm
from engine.model.sharding.placement import Replicate, Shard
from engine.model.sharding.ranges import Ranges
from engine.model.sharding.split import BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context
    from engine.model.layers.hparams import HParams

SIDE = "per_layer"
"""Key of `Context.side` under which all ranks hold the per-layer inputs, (T, n_layer × n)."""


def per_layer_width(hp: HParams) -> int:
    """Return the number of elements of a layer's input; 0 for a model without such inputs."""
    return hp.keys.integer("embedding_length_per_layer_input", 0)


class PerLayerEmbedding(Module):
    """Per-layer inputs of all layers: a table by token, plus a projection of the embedding.

    `(table[id] sqrt(n) + norm(proj(x) / sqrt(n_embd))) / sqrt(2)` for inputs of n elements.

    Args:
        rows: rows of the vocabulary on each rank, cut like those of the embedding.
    """

    is_nameless = True

    def __init__(self, hp: HParams, rows: Ranges) -> None:
        self.n = per_layer_width(hp)
        n_all, owners = self.n * hp.n_layer, Replicate(rows.owners())
        self.per_layer_token_embd = Embedding(hp.n_vocab, n_all, Shard(0, rows), is_lookup=True)
        self.per_layer_model_proj = Linear(hp.n_embd, n_all, owners)
        self.per_layer_proj_norm = RMSNorm(self.n, hp.norm_eps, owners)

    def __call__(self, ids: Tensor, x: Tensor | None, ctx: Context) -> Tensor | None:
        """Map ids (T,) and their embedding x (T, n_embd) to (T, n_layer × n).

        Every rank calls it; ranks without rows of the embedding pass None and get None.
        """
        tokens = self.per_layer_token_embd(ids, ctx)
        if tokens is None or x is None:
            return None
        projected = self.per_layer_model_proj(x) * x.shape[-1] ** -0.5
        projected = projected.reshape(x.shape[0], -1, self.n)
        projected = self.per_layer_proj_norm(projected, ctx).flatten(1)
        joined: Tensor = (tokens * self.n**0.5 + projected) * 0.5**0.5
        return joined


class PerLayerGate(Module):
    """Last addition of a layer, `norm(proj(gelu(gate(x)) * input))`; the same on all its ranks."""

    is_nameless = True

    def __init__(self, hp: HParams, split: BlockSplit, layer: int) -> None:
        n, everyone = per_layer_width(hp), Replicate(split.group)
        self.columns = slice(layer * n, (layer + 1) * n)
        self.inp_gate = Linear(hp.n_embd, n, everyone)
        self.proj = Linear(n, hp.n_embd, everyone)
        self.post_norm = RMSNorm(hp.n_embd, hp.norm_eps, everyone)

    def __call__(self, x: Tensor, ctx: Context) -> Addend:
        """Return what it adds to the residual stream x (T, n_embd)."""
        inputs = ctx.kept(ctx.side[SIDE])[:, self.columns]
        inner = ctx.ops.gated(GELU, self.inp_gate(x), inputs)
        return Addend(self.proj(inner), norm=self.post_norm, is_whole=True)
