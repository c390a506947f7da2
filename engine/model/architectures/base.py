"""Base classes of language models: an embedding, blocks, a final norm and an output head.

After `CausalLM` come variants that several families share: recurrent layers, RoPE that differs by
layer, and scaled embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from engine.model.architectures.mtp import MTP
from engine.model.forward.operands import RopeParams
from engine.model.layers.block import Block
from engine.model.layers.ffn import separate_gate_up, separate_qkv
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.keys import DEFAULT_BASE
from engine.model.layers.linear import CopiedHead, Embedding, Linear, TiedHead
from engine.model.layers.module import Module, TensorSource
from engine.model.layers.norm import Rope, choose_rope_factors
from engine.model.sharding.placement import Replicate, Shard
from engine.model.sharding.split import ModelSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context


class CausalLM(Module):
    """A decoder-only language model.

    Attributes:
        traits: facts of the architecture that its files do not state.
        block_type: class of its blocks.
        last_full_layer: last block that reads all rows of a prompt, as it remembers something of
            each; behind its mixer only rows go on whose logits are wanted. No block's number if
            MTP blocks read all rows.
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
        for block, following in pairwise(b for b in self.trunk if b.split.group):
            block.precede(following)
        self.output_norm = self.trunk[-1].norm_type(
            hp.n_embd, hp.norm_eps, Replicate(split.last_group)
        )
        self.output: Linear | TiedHead = (
            TiedHead(self.token_embd)
            if hp.tied
            else (CopiedHead if hp.copies_head else Linear)(
                hp.n_embd, hp.n_vocab, Shard(0, split.output)
            )
        )
        self.mtp: MTP | None = None
        if hp.n_mtp:
            reads_normed = self.traits.mtp_hidden == "normed"
            self.mtp = MTP(hp, split, self.blk[hp.n_trunk :], reads_normed=reads_normed)
        remembering = [block.layer for block in self.trunk if block.states()]
        self.last_full_layer = max(remembering, default=-1) if self.mtp is None else len(self.blk)

    @property
    def trunk(self) -> Sequence[Block]:
        """Blocks that every token goes through."""
        return self.blk[: self.hp.n_trunk]

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Return `hp` with what files of this architecture leave out or mean differently."""
        return hp

    @classmethod
    def block_for(cls, hp: HParams, layer: int) -> type[Block]:
        """Return the class of block `layer`, where not all are alike."""
        return cls.block_type

    def make_ropes(self) -> None:
        """Declare RoPEs other than `rope_freqs`."""

    def rope_of(self, layer: int) -> Rope | None:
        """Return the RoPE of block `layer`; None where positions are not rotated."""
        return self.rope_freqs if self.traits.rope_style else None

    def forward(self, ids: Tensor, ctx: Context) -> Tensor | None:
        """Run ids (T,) after the tokens that are already in the caches.

        Returns:
            Logits (rows, n_vocab) of the rows from the first wanted one on, or their hidden states
            (rows, n_embd) if the batch wants these, on the first rank of the output head; None on
            the others, and on all if there are no such rows.
        """
        n_wanted = ctx.batch.n_wanted
        x = ctx.with_pictures(self.embed(ids, ctx))
        embedded = x if self.mtp is not None else None  # else its memory is free after a block
        for block in self.trunk:
            if not block.split.group:  # it has no part that a rank could hold
                continue
            x = ctx.enter(x, block.split.group, self.hp.n_embd)
            if block.layer == self.last_full_layer and not ctx.deepens(self.hp.n_embd, block.layer):
                ctx.let_rows_drop()
            if x is not None:
                x = ctx.steer(ctx.deepen(block.forward(x, ctx), block.layer), block.layer)
            ctx.drop_rows()
        if self.mtp is not None:
            self.mtp.remember(self, ids, embedded, x, ctx)
        if not n_wanted:
            return None
        x = ctx.enter(x, self.split.last_group, self.hp.n_embd)
        if x is None:
            return None
        hidden = self.output_norm(x[-n_wanted:], ctx)
        if ctx.batch.wants_hidden:
            return hidden.float() if ctx.rank == self.split.last_group[0] else None
        return ctx.gather(self.head(hidden, ctx), x)

    def guess(self, ids: Tensor, ctx: Context, block: int) -> Tensor | None:
        """Return logits of what follows ids (T,), see `MTP.guess`; the model has such a block."""
        assert self.mtp is not None, "who guesses has asked for the block"
        return self.mtp.guess(self, ids, ctx, block)

    def read(self, ids: Tensor, ctx: Context, block: int) -> None:
        """Have an MTP block read tokens ids (T,) that were computed before, see `MTP.read`."""
        assert self.mtp is not None, "who guesses has asked for the block"
        self.mtp.read(self, ids, ctx, block)

    def embed(self, ids: Tensor, ctx: Context) -> Tensor | None:
        """Return the hidden state (T, n_embd) of ids (T,), on the ranks that hold the embedding."""
        return self.token_embd(ids, ctx)

    def head(self, x: Tensor, ctx: Context) -> Tensor:
        """Return this rank's logits of x (rows, n_embd), the output of the final norm."""
        return self.output(x)

    @classmethod
    def adapt(cls, source: TensorSource, hp: HParams) -> None:
        """Rename and split tensors of `source` to those that this class declares."""
        choose_rope_factors(source, hp)
        for layer in range(hp.n_layer):
            separate_qkv(source, hp, layer)
            separate_gate_up(source, hp, layer)


class HybridLM(CausalLM):
    """A model in which some layers have a recurrent state in place of attention.

    Attributes:
        block_type: class of the blocks with attention.
        recurrent_type: class of the other blocks.
    """

    recurrent_type: ClassVar[type[Block]]

    @classmethod
    def block_for(cls, hp: HParams, layer: int) -> type[Block]:
        return cls.recurrent_type if hp.recurrent[layer] else cls.block_type


class SwaRopeLM(CausalLM):
    """A model whose layers with a sliding window have a RoPE of their own, without scaling.

    Attributes:
        has_swa_base: whether that RoPE's base is a key of its own, or else the other layers' base.
    """

    has_swa_base: ClassVar[bool] = True

    @classmethod
    def swa_rope(cls, hp: HParams) -> RopeParams:
        """Return the RoPE of the layers with a window."""
        base = hp.rope.base
        if cls.has_swa_base:
            base = hp.keys.number("rope.freq_base_swa", DEFAULT_BASE)
        rope = hp.rope.unscaled(base)
        return replace(rope, n_rot=hp.keys.integer("rope.dimension_count_swa", rope.n_rot))

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Check that either RoPE fits the heads of its layers.

        Raises:
            InvalidGGUF: more elements are rotated than a head has.
        """
        n_rot = {True: cls.swa_rope(hp).n_rot, False: hp.rope.n_rot}
        for is_swa, head_dim in zip(hp.swa, hp.head_dim_k, strict=True):
            if n_rot[is_swa] % 2 or n_rot[is_swa] > head_dim:
                raise hp.keys.invalid(
                    f"it rotates {n_rot[is_swa]} of the {head_dim} elements of a head"
                )
        return hp

    def make_ropes(self) -> None:
        self.rope_swa = Rope(self.swa_rope(self.hp), self.split.used)

    def rope_of(self, layer: int) -> Rope:
        return self.rope_swa if self.hp.swa[layer] else self.rope_freqs


class SwaOnlyRopeLM(CausalLM):
    """A model whose layers without a window do not rotate positions (RNoPE, arXiv 2501.18795)."""

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Check that there are layers with a window, as only these know positions.

        Raises:
            InvalidGGUF: the file does not state the length of the windows.
        """
        hp.require_windows()
        return hp

    def rope_of(self, layer: int) -> Rope | None:
        return self.rope_freqs if self.hp.swa[layer] else None


class EachFourthNoPELM(CausalLM):
    """A model whose every fourth layer does not rotate positions (RNoPE, arXiv 2501.18795).

    No key of the file says so.
    """

    def rope_of(self, layer: int) -> Rope | None:
        return None if layer % 4 == 3 else super().rope_of(layer)


class ScaledLM(CausalLM):
    """A model that multiplies the embedding and the logits by a factor each."""

    def __init__(self, hp: HParams, split: ModelSplit) -> None:
        super().__init__(hp, split)
        self.embedding_scale = self.embedding_factor(hp)
        self.logit_scale = self.logit_factor(hp)

    @classmethod
    def embedding_factor(cls, hp: HParams) -> float:
        """Return the factor on the embedding."""
        return 1.0

    @classmethod
    def logit_factor(cls, hp: HParams) -> float:
        """Return the factor on the logits."""
        return 1.0

    def embed(self, ids: Tensor, ctx: Context) -> Tensor | None:
        x = super().embed(ids, ctx)
        return None if x is None else x * self.embedding_scale

    def head(self, x: Tensor, ctx: Context) -> Tensor:
        logits = super().head(x, ctx)
        return logits if self.logit_scale == 1 else logits * self.logit_scale


class SqrtScaledLM(ScaledLM):
    """A model that multiplies the embedding by sqrt(n_embd) (arXiv 1706.03762)."""

    @classmethod
    def embedding_factor(cls, hp: HParams) -> float:
        return float(hp.n_embd**0.5)
