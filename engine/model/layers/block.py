"""Blocks: a mixer, an FFN or experts, or both, in the arrangements that models use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from engine.model.forward.operands import GELU, SILU, Activation, Addend, Gating, Routing
from engine.model.layers.ffn import FFN, MoE, add_parts, read_routing
from engine.model.layers.linear import Embedding, Linear
from engine.model.layers.mixers.attention import Attention
from engine.model.layers.mixers.mixer import Mixer
from engine.model.layers.module import Module
from engine.model.layers.mtp import MTPInput
from engine.model.layers.norm import Norm, RMSNorm, Rope
from engine.model.sharding.placement import Replicate, Shard
from engine.model.sharding.shares import Ranges
from engine.model.sharding.split import BlockDims, BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context
    from engine.model.layers.hparams import HParams


class Block(Module, ABC):
    """One layer of a model.

    Attributes:
        norm_type: class of its norms.
        split: split of its parts over ranks; ranks outside `split.group` skip the block.
        nextn: input of an MTP block, else None.
    """

    norm_type: ClassVar[type[Norm]] = RMSNorm

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        self.hp = hp
        self.split = split
        self.layer = layer
        self._next_norm: tuple[Norm | None] = (None,)  # in a tuple, as it belongs to another block
        is_mtp = layer >= hp.n_trunk
        self.nextn = MTPInput(hp, self.norm_type, split.group) if is_mtp else None

    @classmethod
    def dims(cls, hp: HParams, layer: int) -> BlockDims:
        """Return the sizes in block `layer` that can be split; no rank holds an empty block."""
        return BlockDims()

    def reduces(self) -> tuple[int, ...]:
        """Return the number of all-reduces for each addition to the residual stream."""
        return ()

    @abstractmethod
    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Map the residual stream x (T, n_embd) to the next block's."""

    def norm(self) -> Norm:
        """Return a new norm for the residual stream, replicated on all ranks of the block."""
        return self.norm_type(self.hp.n_embd, self.hp.norm_eps, Replicate(self.split.group))

    @property
    def first_norm(self) -> Norm | None:
        """First norm that reads the residual stream, if any."""
        return None

    @property
    def next_norm(self) -> Norm | None:
        """Norm that reads the residual stream right after this block, if known."""
        return self._next_norm[0]

    def precede(self, following: Block) -> None:
        """Set the next block; its first norm can be fused with this block's all-reduce."""
        if following.split.group == self.split.group:
            self._next_norm = (following.first_norm,)


class MixerBlock(Block):
    """Block with only a mixer: `x + mixer(norm(x))`."""

    mixer_type: ClassVar[type[Mixer]] = Attention

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.attn_norm = self.norm()
        self.mixer = self.mixer_type(hp, split, layer, rope)

    @classmethod
    def dims(cls, hp: HParams, layer: int) -> BlockDims:
        return cls.mixer_type.dims(hp, layer)

    def reduces(self) -> tuple[int, ...]:
        return (1 + self.mixer.n_reduce,)

    @property
    def first_norm(self) -> Norm | None:
        return self.attn_norm

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return ctx.all_reduce_add(x, self.mix(x, ctx), self.next_norm)

    def mix(self, x: Tensor, ctx: Context) -> Addend:
        """Return the mixer's addition to the residual stream."""
        return Addend(self.mixer(self.attn_norm(x, ctx), ctx), self.mixer.bias)


class FFNBlock(Block):
    """Block with only an FFN, `x + ffn(norm(x))`, or with experts instead.

    Attributes:
        gating: function from router logits to scores, unless the file specifies one.
        normalises_experts: whether the weights of the selected experts are divided by their sum,
            unless the file specifies this.
    """

    act: ClassVar[Activation] = SILU
    is_gated: ClassVar[bool] = True
    gating: ClassVar[Gating] = "softmax"
    normalises_experts: ClassVar[bool] = True

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.ffn_norm = self.norm()
        self.ffn = self.make_ffn()

    @classmethod
    def dims(cls, hp: HParams, layer: int) -> BlockDims:
        return replace(
            super().dims(hp, layer),
            n_ff=hp.n_ff[layer],
            n_ff_exp=hp.n_ff_exp[layer],
            n_ff_shexp=hp.n_ff_shexp[layer],
        )

    def reduces(self) -> tuple[int, ...]:
        return (1 + self.ffn.n_reduce,)

    def make_ffn(self) -> FFN | MoE:
        """Return routed experts if the layer has them, else a dense FFN."""
        return self.make_experts() if self.hp.n_ff_exp[self.layer] else self.make_dense()

    def make_dense(self) -> FFN:
        """Return a dense FFN."""
        hp, split, n_ff = self.hp, self.split, self.hp.n_ff[self.layer]
        return FFN(hp.n_embd, n_ff, split.ffn, split.group, self.act, is_gated=self.is_gated)

    def make_experts(self) -> MoE:
        """Return the routed experts, including a shared one if present."""
        hp, split, layer, routing = self.hp, self.split, self.layer, self.routing()
        return MoE(hp, split, layer, routing, self.act, is_gated=self.is_gated)

    def routing(self) -> Routing:
        """Return the router's rule."""
        return read_routing(self.hp, self.gating, normalise=self.normalises_experts)

    @property
    def first_norm(self) -> Norm | None:
        return self.ffn_norm

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return ctx.all_reduce_add(x, self.feed(x, ctx), self.next_norm)

    def feed(self, x: Tensor, ctx: Context) -> Addend:
        """Return the FFN's addition to the residual stream."""
        return Addend(self.ffn(self.ffn_norm(x, ctx), ctx), self.ffn.bias)


class TransformerBlock(FFNBlock, MixerBlock):
    """Standard block: `x + mixer(norm(x))`, then `x + ffn(norm(x))`; one all-reduce each.

    A variant sets another mixer or activation, or overrides `mix`, `feed` or `make_ffn`.
    """

    def reduces(self) -> tuple[int, ...]:
        return (*MixerBlock.reduces(self), *FFNBlock.reduces(self))

    @property
    def first_norm(self) -> Norm | None:
        return self.attn_norm

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        x = ctx.all_reduce_add(x, self.mix(x, ctx), self.ffn_norm)
        return ctx.all_reduce_add(x, self.feed(x, ctx), self.next_norm)


class ParallelBlock(TransformerBlock):
    """Parallel block, `x + mixer(norm(x)) + ffn(norm(x))`: one norm, one all-reduce for both."""

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        del self.ffn_norm

    def reduces(self) -> tuple[int, ...]:
        return (1 + self.mixer.n_reduce + self.ffn.n_reduce,)

    def ffn_input(self, x: Tensor, normed: Tensor, ctx: Context) -> Tensor:
        """Return the FFN's input, given the residual stream x and the mixer's input, both (T,
        n_embd)."""
        return normed

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        normed = self.attn_norm(x, ctx)
        mixed = self.mixer(normed, ctx)
        ctx.drop_rows()
        x, normed, mixed = ctx.kept(x), ctx.kept(normed), ctx.kept(mixed)
        fed = self.ffn(self.ffn_input(x, normed, ctx), ctx)
        addend = Addend(add_parts(mixed, fed), self.mixer.bias)
        if self.ffn.bias is None:
            return ctx.all_reduce_add(x, addend, self.next_norm)
        return ctx.all_reduce_add(x, addend) + self.ffn.bias


class TwoNormParallelBlock(ParallelBlock):
    """Parallel block with two norms: `x + mixer(norm(x)) + ffn(norm'(x))`."""

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.ffn_norm = self.norm()

    def ffn_input(self, x: Tensor, normed: Tensor, ctx: Context) -> Tensor:
        return self.ffn_norm(x, ctx)


class PostNormBlock(TransformerBlock):
    """Block with post-norms: `x + norm(mixer(x))`, then `x + norm(ffn(x))` (OLMo 2)."""

    tensor_names: ClassVar = {"attn_norm": "post_attention_norm", "ffn_norm": "post_ffw_norm"}

    @property
    def first_norm(self) -> Norm | None:
        return None

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        x = ctx.all_reduce_add(x, self.mix(x, ctx))
        return ctx.all_reduce_add(x, self.feed(x, ctx))

    def mix(self, x: Tensor, ctx: Context) -> Addend:
        return Addend(self.mixer(x, ctx), self.mixer.bias, self.attn_norm)

    def feed(self, x: Tensor, ctx: Context) -> Addend:
        return Addend(self.ffn(x, ctx), self.ffn.bias, self.ffn_norm)


class SandwichBlock(TransformerBlock):
    """Block with pre- and post-norms (CogView, arXiv 2105.13290).

    `x + norm'(mixer(norm(x)))`, then `x + norm'(ffn(norm(x)))`, each norm with its own weight.
    """

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.post_attention_norm = self.norm()
        self.post_ffw_norm = self.norm()

    def mix(self, x: Tensor, ctx: Context) -> Addend:
        return super().mix(x, ctx)._replace(norm=self.post_attention_norm)

    def feed(self, x: Tensor, ctx: Context) -> Addend:
        return super().feed(x, ctx)._replace(norm=self.post_ffw_norm)


SIDE = "per_layer"
"""Key in `Context.side` of the per-layer inputs, (T, n_layer × n), which all ranks have."""


def per_layer_width(hp: HParams) -> int:
    """Return the size of a per-layer input; 0 for models without them."""
    return hp.keys.integer("embedding_length_per_layer_input", 0)


class PerLayerEmbedding(Module):
    """Per-layer inputs for all layers: a lookup by token plus a projection of the embedding.

    `(table[id] sqrt(n) + norm(proj(x) / sqrt(n_embd))) / sqrt(2)` for inputs of n elements. `rows`
    is the embedding's split.
    """

    is_nameless = True

    def __init__(self, hp: HParams, rows: Ranges) -> None:
        self.n = per_layer_width(hp)
        n_all, owners = self.n * hp.n_layer, Replicate(rows.owners())
        self.per_layer_token_embd = Embedding(hp.n_vocab, n_all, Shard(0, rows), is_lookup=True)
        self.per_layer_model_proj = Linear(hp.n_embd, n_all, owners)
        self.per_layer_proj_norm = RMSNorm(self.n, hp.norm_eps, owners)

    def __call__(self, ids: Tensor, x: Tensor | None, ctx: Context) -> Tensor | None:
        """Map ids (T,) and their embeddings x (T, n_embd) to (T, n_layer × n).

        Collective: ranks without rows of the embedding pass None and get None.
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
    """A layer's last addition, `norm(proj(gelu(gate(x)) * input))`; replicated on its ranks."""

    is_nameless = True

    def __init__(self, hp: HParams, split: BlockSplit, layer: int) -> None:
        n, everyone = per_layer_width(hp), Replicate(split.group)
        self.columns = slice(layer * n, (layer + 1) * n)
        self.inp_gate = Linear(hp.n_embd, n, everyone)
        self.proj = Linear(n, hp.n_embd, everyone)
        self.post_norm = RMSNorm(hp.n_embd, hp.norm_eps, everyone)

    def __call__(self, x: Tensor, ctx: Context) -> Addend:
        """Return the addition to the residual stream x (T, n_embd)."""
        inputs = ctx.kept(ctx.side[SIDE])[:, self.columns]
        inner = ctx.ops.gated(GELU, self.inp_gate(x), inputs)
        return Addend(self.proj(inner), norm=self.post_norm, is_whole=True)
