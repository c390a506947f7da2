"""Blocks of a model: a mixer, an FFN or experts, or both, in the arrangements that occur."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from engine.model.forward.operands import SILU, Activation, Gating, Routing
from engine.model.forward.ops import Addend
from engine.model.layers.ffn import FFN
from engine.model.layers.mixers.attention import Attention
from engine.model.layers.mixers.mixer import Mixer
from engine.model.layers.module import Module
from engine.model.layers.moe import MoE, add_parts, read_routing
from engine.model.layers.mtp import MTPInput
from engine.model.layers.norm import Norm, RMSNorm
from engine.model.sharding.placement import Replicate
from engine.model.sharding.split import BlockDims, BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context
    from engine.model.layers.hparams import HParams
    from engine.model.layers.rope import Rope


class Block(Module, ABC):
    """One layer of a model.

    Attributes:
        norm_type: class of the norms in front of its parts.
        layer: index of the layer.
        split: cuts of its parts over ranks; ranks outside `split.group` never compute it.
        nextn: input of the block, if it is one that only guesses.
    """

    norm_type: ClassVar[type[Norm]] = RMSNorm

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        self.hp = hp
        self.split = split
        self.layer = layer
        self._next_norm: tuple[Norm | None] = (None,)  # wrapped: it belongs to another block
        is_mtp = layer >= hp.n_trunk
        self.nextn = MTPInput(hp, self.norm_type, split.group) if is_mtp else None

    @classmethod
    def dims(cls, hp: HParams, layer: int) -> BlockDims:
        """Return the sizes by which block `layer` is cut; without any, no rank computes it."""
        return BlockDims()

    def reduces(self) -> tuple[int, ...]:
        """Return the number of all-reduces for each value added to the residual stream."""
        return ()

    @abstractmethod
    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Map the residual stream x (T, n_embd) to the next block's."""

    def norm(self) -> Norm:
        """Return a new norm of the residual stream, on all ranks of the block."""
        return self.norm_type(self.hp.n_embd, self.hp.norm_eps, Replicate(self.split.group))

    @property
    def first_norm(self) -> Norm | None:
        """First reader of the residual stream in the block, if that is a norm."""
        return None

    @property
    def next_norm(self) -> Norm | None:
        """Norm that reads the residual stream next after the block, if known."""
        return self._next_norm[0]

    def precede(self, following: Block) -> None:
        """Set the block that comes next; its first norm may be computed with this block's sum."""
        if following.split.group == self.split.group:
            self._next_norm = (following.first_norm,)


class MixerBlock(Block):
    """Block of a mixer alone: `x + mixer(norm(x))`.

    Attributes:
        mixer_type: class of the mixer.
    """

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
        """Return what the mixer adds to the residual stream."""
        return Addend(self.mixer(self.attn_norm(x, ctx), ctx), self.mixer.bias)


class FFNBlock(Block):
    """Block of an FFN alone, `x + ffn(norm(x))`, or of experts in its place.

    Attributes:
        act: activation between the matrices of FFN and experts.
        is_gated: whether FFN and experts have a gate.
        gating: function from the router's logits to scores, unless the file has one.
        normalises_experts: whether the weights of the chosen experts are divided by their sum,
            unless the file says.
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
        """Return routed experts if the layer has them, else one FFN."""
        return self.make_experts() if self.hp.n_ff_exp[self.layer] else self.make_dense()

    def make_dense(self) -> FFN:
        """Return the FFN of a layer without experts."""
        hp, split, n_ff = self.hp, self.split, self.hp.n_ff[self.layer]
        return FFN(hp.n_embd, n_ff, split.ffn, split.group, self.act, is_gated=self.is_gated)

    def make_experts(self) -> MoE:
        """Return the routed experts, with the shared one if there is one."""
        hp, split, layer, routing = self.hp, self.split, self.layer, self.routing()
        return MoE(hp, split, layer, routing, self.act, is_gated=self.is_gated)

    def routing(self) -> Routing:
        """Return the rule by which the router chooses experts."""
        return read_routing(self.hp, self.gating, normalise=self.normalises_experts)

    @property
    def first_norm(self) -> Norm | None:
        return self.ffn_norm

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return ctx.all_reduce_add(x, self.feed(x, ctx), self.next_norm)

    def feed(self, x: Tensor, ctx: Context) -> Addend:
        """Return what the FFN adds to the residual stream."""
        return Addend(self.ffn(self.ffn_norm(x, ctx), ctx), self.ffn.bias)


class TransformerBlock(FFNBlock, MixerBlock):
    """Common block: `x + mixer(norm(x))`, then `x + ffn(norm(x))`; one all-reduce each.

    A variant names another mixer or activation, or overrides `mix`, `feed` or `make_ffn`.
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
    """Parallel block, `x + mixer(norm(x)) + ffn(norm(x))`: one all-reduce sums both.

    There is one norm for both; a variant with two overrides `ffn_input`.
    """

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        del self.ffn_norm

    def reduces(self) -> tuple[int, ...]:
        return (1 + self.mixer.n_reduce + self.ffn.n_reduce,)

    def ffn_input(self, x: Tensor, normed: Tensor, ctx: Context) -> Tensor:
        """Return the FFN's input.

        Args:
            x: the residual stream, (T, n_embd).
            normed: the mixer's input, (T, n_embd).
        """
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
    """Block with norms behind its parts: `x + norm(mixer(x))`, then `x + norm(ffn(x))` (OLMo 2)."""

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
    """Block with norms before and behind its parts (CogView, arXiv 2105.13290).

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
