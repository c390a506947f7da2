"""What every language model has: an embedding, blocks, a last norm and an output head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from engine.layers.attention import Attention
from engine.layers.ffn import FFN, SILU, Activation, GatedFFN
from engine.layers.hparams import HParams, Traits
from engine.layers.linear import Embedding, Linear, TiedHead
from engine.layers.mixer import Mixer
from engine.layers.module import Module, TensorSource
from engine.layers.moe import MoE, Routing, add_parts
from engine.layers.norm import Norm, RMSNorm
from engine.layers.rope import Rope
from engine.models.fused import separate_gate_up, separate_qkv
from engine.models.longrope import choose_rope_factors
from engine.parallel.placement import Replicate, Shard
from engine.parallel.split import BlockDims, BlockSplit, ModelSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.context import Context


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

    @classmethod
    @abstractmethod
    def dims(cls, hp: HParams, layer: int) -> BlockDims:
        """The sizes by which block `layer` is cut."""

    @abstractmethod
    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Map the residual stream x (T, n_embd) to the next block's."""

    def norm(self) -> Norm:
        """A norm of the residual stream, on all ranks of the block."""
        return self.norm_type(self.hp.n_embd, self.hp.norm_eps, Replicate(self.split.group))


class TransformerBlock(Block):
    """`x + mixer(norm(x))`, then `x + ffn(norm(x))`; one all_reduce each.

    A variant names another mixer or activation, or overrides `make_ffn`, `mix` or `feed`.

    Attributes:
        mixer_type: what lets tokens see each other.
        act: between the matrices of FFN and experts.
        is_gated: FFN and experts have a gate.
    """

    mixer_type: ClassVar[type[Mixer]] = Attention
    act: ClassVar[Activation] = SILU
    is_gated: ClassVar[bool] = True

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.attn_norm = self.norm()
        self.mixer = self.mixer_type(hp, split, layer, rope)
        self.ffn_norm = self.norm()
        self.ffn = self.make_ffn()

    @classmethod
    def dims(cls, hp: HParams, layer: int) -> BlockDims:
        return replace(
            cls.mixer_type.dims(hp, layer),
            n_ff=hp.n_ff[layer],
            n_ff_exp=hp.n_ff_exp[layer],
            n_ff_shexp=hp.n_ff_shexp[layer],
        )

    def make_ffn(self) -> GatedFFN | FFN | MoE:
        """Routed experts where the layer has them, else one FFN."""
        hp, split, layer = self.hp, self.split, self.layer
        if hp.n_ff_exp[layer]:
            return MoE(hp, split, layer, self.routing(), self.act, is_gated=self.is_gated)
        ffn_type = GatedFFN if self.is_gated else FFN
        return ffn_type(hp.n_embd, hp.n_ff[layer], split.ffn, split.group, self.act)

    def routing(self) -> Routing:
        """How tokens find their experts."""
        return Routing.read(self.hp)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        x = x + self.mix(x, ctx)
        return x + self.feed(x, ctx)

    def mix(self, x: Tensor, ctx: Context) -> Tensor:
        """What the mixer adds to the residual stream."""
        return ctx.all_reduce(self.mixer(self.attn_norm(x, ctx), ctx), self.mixer.bias)

    def feed(self, x: Tensor, ctx: Context) -> Tensor:
        """What the FFN adds to the residual stream."""
        return ctx.all_reduce(self.ffn(self.ffn_norm(x, ctx), ctx), self.ffn.bias)


class ParallelBlock(TransformerBlock):
    """`x + mixer(norm(x)) + ffn(norm(x))`: both read the same stream, so one all_reduce does.

    There is one norm for both; a variant with two overrides `ffn_input`.
    """

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        del self.ffn_norm

    def ffn_input(self, x: Tensor, normed: Tensor, ctx: Context) -> Tensor:
        """What the FFN reads, of the stream x and what the mixer reads."""
        return normed

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        normed = self.attn_norm(x, ctx)
        mixed = self.mixer(normed, ctx)
        fed = self.ffn(self.ffn_input(x, normed, ctx), ctx)
        x = x + ctx.all_reduce(add_parts(mixed, fed), self.mixer.bias)
        return x if self.ffn.bias is None else x + self.ffn.bias


class TwoNormParallelBlock(ParallelBlock):
    """`x + mixer(norm(x)) + ffn(norm'(x))`."""

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.ffn_norm = self.norm()

    def ffn_input(self, x: Tensor, normed: Tensor, ctx: Context) -> Tensor:
        return self.ffn_norm(x, ctx)


class PostNormBlock(TransformerBlock):
    """`x + norm(mixer(x))`, then `x + norm(ffn(x))`: what is added is normalised (OLMo 2)."""

    tensor_names = {  # noqa: RUF012
        "attn_norm": "post_attention_norm",
        "ffn_norm": "post_ffw_norm",
    }

    def mix(self, x: Tensor, ctx: Context) -> Tensor:
        return self.attn_norm(ctx.all_reduce(self.mixer(x, ctx), self.mixer.bias), ctx)

    def feed(self, x: Tensor, ctx: Context) -> Tensor:
        return self.ffn_norm(ctx.all_reduce(self.ffn(x, ctx), self.ffn.bias), ctx)


class CausalLM(Module):
    """A decoder-only language model.

    Attributes:
        traits: what files of this architecture do not say.
        block_type: the class of its blocks.
    """

    traits: ClassVar[Traits] = Traits()
    block_type: ClassVar[type[Block]]

    def __init__(self, hp: HParams, split: ModelSplit) -> None:
        self.hp = hp
        self.split = split
        self.rope_freqs = Rope(hp.rope, split.used)
        self.make_ropes()
        self.token_embd = Embedding(hp.n_vocab, hp.n_embd, Shard(0, split.embedding))
        self.blk = [
            self.block_for(hp, layer)(hp, block, layer, self.rope_of(layer))
            for layer, block in enumerate(split.blocks)
        ]
        self.output_norm = self.blk[-1].norm_type(
            hp.n_embd, hp.norm_eps, Replicate(split.last_group)
        )
        self.output: Linear | TiedHead = (
            TiedHead(self.token_embd)
            if hp.tied
            else Linear(hp.n_embd, hp.n_vocab, Shard(0, split.output))
        )

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Correct what files of this architecture leave out or mean differently."""
        return hp

    @classmethod
    def block_for(cls, hp: HParams, layer: int) -> type[Block]:
        """The class of block `layer`, where not all are alike."""
        return cls.block_type

    def make_ropes(self) -> None:
        """Declare further rotations than `rope_freqs`."""

    def rope_of(self, layer: int) -> Rope | None:
        """The rotation of block `layer`; None where positions are not rotated."""
        return self.rope_freqs if self.traits.rope_style else None

    def forward(self, ids: Tensor, ctx: Context) -> Tensor | None:
        """Run ids (T,) after the tokens that are in the caches already.

        Returns:
            Logits (rows, n_vocab) of the rows from `ctx.first_logit` on; only on the first rank
            of the output head, None on the others.
        """
        x = self.embed(ids, ctx)
        for block in self.blk:
            if not block.split.group:  # it has no part that anyone could hold
                continue
            x = ctx.enter(x, block.split.group)
            if x is not None:
                x = ctx.steer(block.forward(x, ctx), block.layer)
        x = ctx.enter(x, self.split.last_group)
        if x is None:
            return None
        return ctx.gather(self.head(self.output_norm(x[ctx.first_logit :], ctx)))

    def embed(self, ids: Tensor, ctx: Context) -> Tensor | None:
        """The residual stream (T, n_embd) of ids (T,), on the ranks that hold the embedding."""
        return self.token_embd(ids, ctx)

    def head(self, x: Tensor) -> Tensor:
        """This rank's logits of x (rows, n_embd), which has passed the last norm."""
        return self.output(x)

    @classmethod
    def adapt(cls, source: TensorSource, hp: HParams) -> None:
        """Show the tensors of `source` under the names that this class declares."""
        choose_rope_factors(source, hp)
        for layer in range(hp.n_layer):
            separate_qkv(source, hp, layer)
            separate_gate_up(source, hp, layer)
