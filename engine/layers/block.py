"""Layers of a model: a mixer, an FFN or experts, or both, in the arrangements that occur."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from engine.forward.operands import SILU, Activation, Gating, Routing
from engine.forward.ops import Addend
from engine.layers.ffn import FFN
from engine.layers.mixers.attention import Attention
from engine.layers.mixers.mixer import Mixer
from engine.layers.module import Module
from engine.layers.moe import MoE, add_parts, read_routing
from engine.layers.norm import Norm, RMSNorm
from engine.sharding.placement import Replicate
from engine.sharding.split import BlockDims, BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.forward.context import Context
    from engine.layers.hparams import HParams
    from engine.layers.rope import Rope


class Block(Module, ABC):
    """One layer of a model.

    Attributes:
        norm_type: of the norms in front of its parts.
        layer: its index.
        split: how its parts are cut; ranks outside `split.group` never see it.
    """

    norm_type: ClassVar[type[Norm]] = RMSNorm

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        self.hp = hp
        self.split = split
        self.layer = layer
        self._next_norm: tuple[Norm | None] = (None,)  # wrapped: it belongs to another block

    @classmethod
    def dims(cls, hp: HParams, layer: int) -> BlockDims:
        """The sizes by which block `layer` is cut; without any, no rank sees it."""
        return BlockDims()

    def reduces(self) -> tuple[int, ...]:
        """How often the ranks of its group meet, for each thing that it adds to the stream."""
        return ()

    @abstractmethod
    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Map the residual stream x (T, n_embd) to the next block's."""

    def norm(self) -> Norm:
        """A norm of the residual stream, on all ranks of the block."""
        return self.norm_type(self.hp.n_embd, self.hp.norm_eps, Replicate(self.split.group))

    @property
    def first_norm(self) -> Norm | None:
        """What reads the residual stream first, if that is a norm."""
        return None

    @property
    def next_norm(self) -> Norm | None:
        """What reads the residual stream behind the block first, as far as is known."""
        return self._next_norm[0]

    def precede(self, following: Block) -> None:
        """Learn which block comes next; its first norm may be computed with what this one adds."""
        if following.split.group == self.split.group:
            self._next_norm = (following.first_norm,)


class MixerBlock(Block):
    """`x + mixer(norm(x))`.

    Attributes:
        mixer_type: what lets tokens see each other.
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
        """What the mixer adds to the residual stream."""
        return Addend(self.mixer(self.attn_norm(x, ctx), ctx), self.mixer.bias)


class FFNBlock(Block):
    """`x + ffn(norm(x))`, or experts in place of the FFN.

    Attributes:
        act: between the matrices of FFN and experts.
        is_gated: FFN and experts have a gate.
        gating: how the router's logits become scores, unless the file says.
        normalises_experts: the weights of the chosen experts are divided by their sum, unless the
            file says.
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
        """Routed experts where the layer has them, else one FFN."""
        return self.make_experts() if self.hp.n_ff_exp[self.layer] else self.make_dense()

    def make_dense(self) -> FFN:
        """The FFN of a layer without experts."""
        hp, split, n_ff = self.hp, self.split, self.hp.n_ff[self.layer]
        return FFN(hp.n_embd, n_ff, split.ffn, split.group, self.act, is_gated=self.is_gated)

    def make_experts(self) -> MoE:
        """Routed experts, and the shared one if there is one."""
        hp, split, layer, routing = self.hp, self.split, self.layer, self.routing()
        return MoE(hp, split, layer, routing, self.act, is_gated=self.is_gated)

    def routing(self) -> Routing:
        """How tokens find their experts."""
        return read_routing(self.hp, self.gating, normalise=self.normalises_experts)

    @property
    def first_norm(self) -> Norm | None:
        return self.ffn_norm

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return ctx.all_reduce_add(x, self.feed(x, ctx), self.next_norm)

    def feed(self, x: Tensor, ctx: Context) -> Addend:
        """What the FFN adds to the residual stream."""
        return Addend(self.ffn(self.ffn_norm(x, ctx), ctx), self.ffn.bias)


class TransformerBlock(FFNBlock, MixerBlock):
    """`x + mixer(norm(x))`, then `x + ffn(norm(x))`; one all_reduce each.

    A variant names another mixer or activation, or overrides `mix`, `feed` or what makes the FFN.
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
    """`x + mixer(norm(x)) + ffn(norm(x))`: both read the same stream, so one all_reduce does.

    There is one norm for both; a variant with two overrides `ffn_input`.
    """

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        del self.ffn_norm

    def reduces(self) -> tuple[int, ...]:
        return (1 + self.mixer.n_reduce + self.ffn.n_reduce,)

    def ffn_input(self, x: Tensor, normed: Tensor, ctx: Context) -> Tensor:
        """What the FFN reads, of the stream x and what the mixer reads."""
        return normed

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        normed = self.attn_norm(x, ctx)
        mixed = self.mixer(normed, ctx)
        fed = self.ffn(self.ffn_input(x, normed, ctx), ctx)
        addend = Addend(add_parts(mixed, fed), self.mixer.bias)
        if self.ffn.bias is None:
            return ctx.all_reduce_add(x, addend, self.next_norm)
        return ctx.all_reduce_add(x, addend) + self.ffn.bias


class TwoNormParallelBlock(ParallelBlock):
    """`x + mixer(norm(x)) + ffn(norm'(x))`."""

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.ffn_norm = self.norm()

    def ffn_input(self, x: Tensor, normed: Tensor, ctx: Context) -> Tensor:
        return self.ffn_norm(x, ctx)


class PostNormBlock(TransformerBlock):
    """`x + norm(mixer(x))`, then `x + norm(ffn(x))`: what is added is normalised (OLMo 2)."""

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
    """`x + norm'(mixer(norm(x)))`, then the same with the FFN (CogView, arXiv 2105.13290)."""

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.post_attention_norm = self.norm()
        self.post_ffw_norm = self.norm()

    def mix(self, x: Tensor, ctx: Context) -> Addend:
        return super().mix(x, ctx)._replace(norm=self.post_attention_norm)

    def feed(self, x: Tensor, ctx: Context) -> Addend:
        return super().feed(x, ctx)._replace(norm=self.post_ffw_norm)
