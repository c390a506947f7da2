"""Base classes of language models: an embedding, blocks, a final norm and an output head.

`MTP` holds the blocks of a model that only guess. After `CausalLM` come variants that several
families share: recurrent layers, RoPE that differs by layer, and scaled embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from engine.model.forward.operands import RopeParams
from engine.model.layers.block import Block, MixerBlock
from engine.model.layers.ffn import separate_gate_up, separate_qkv
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.keys import DEFAULT_BASE
from engine.model.layers.linear import CopiedHead, Embedding, Linear, TiedHead
from engine.model.layers.module import Module, TensorSource
from engine.model.layers.mtp import MTPHead
from engine.model.layers.norm import Rope, choose_rope_factors
from engine.model.sharding.placement import Replicate, Shard
from engine.model.sharding.split import ModelSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context
    from engine.model.layers.mtp import MTPInput
    from engine.model.layers.norm import Norm


class MTP(Module):
    """The MTP blocks of a model, which guess from the hidden states of the blocks before them.

    A block sees pairs of a token and the hidden state of the token before. Such a pair lies in
    its KV cache at the position of the token, so that what is cached depends on no later token;
    there is none at position 0. A prompt's pass computes the pairs of its tokens. Single tokens
    only leave their hidden states behind: a guess computes the pairs of all tokens since the
    last guess, and goes on from them.

    A block that is alone guesses any number of tokens: its own output stands for the trunk's
    hidden state of a guess. Of several, each guesses one token, and reads the outputs of the
    one before in place of the trunk's hidden states (DeepSeek-V3, arXiv 2412.19437, section
    2.2), so that its pairs begin one position later.

    Args:
        blocks: the blocks, which belong to the model; one at least.
        reads_normed: whether they read hidden states behind the final norm.

    Attributes:
        heads: embedding, norm and output head of each block.
    """

    is_nameless = True

    def __init__(
        self, hp: HParams, split: ModelSplit, blocks: Sequence[Block], *, reads_normed: bool
    ) -> None:
        self._parts: tuple[tuple[MixerBlock, MTPInput], ...] = ()  # found as children elsewhere
        for block in blocks:
            if not isinstance(block, MixerBlock) or block.nextn is None:
                raise hp.keys.invalid("its MTP block has no attention")
            self._parts += ((block, block.nextn),)
        self.heads = [MTPHead(hp, split, block.layer, block.norm_type) for block in blocks]
        self._reads_normed, self._n_embd = reads_normed, hp.n_embd

    def remember(
        self, trunk: CausalLM, ids: Tensor, embedded: Tensor | None, x: Tensor | None, ctx: Context
    ) -> None:
        """Write the keys and values of a prompt's tokens, or keep hidden states of single ones.

        The group of ranks that `ctx` is at stays the same.

        Args:
            ids: tokens of the pass, (T,).
            embedded: their embeddings on the ranks that hold the trunk's; None on the others.
            x: the residual stream behind the trunk's last block, (T, n_embd), on its ranks.
        """
        here = ctx.group
        hidden = self._handed(trunk, x, trunk.output_norm, 0, ctx)
        if ctx.batch.is_of_few_singles:
            if hidden is not None:
                ctx.hidden_states.keep(hidden)
            ctx.join(here)
            return
        for number, (_, joint) in enumerate(self._parts):
            mine = self._embedded(trunk, ids, embedded, number, ctx)
            x = None
            if hidden is not None and mine is not None:
                x = joint(mine, ctx.hidden_states.exchanged(hidden, number), ctx)
            hidden = self._passed(trunk, x, number, ctx)
        ctx.join(here)

    def read(self, trunk: CausalLM, ids: Tensor, ctx: Context, number: int) -> None:
        """Write the keys and values of single tokens whose hidden states were kept.

        Args:
            ids: tokens of the pass, (T,).
            number: index of the block that reads them.
        """
        hidden = self._passed(trunk, self._joined(trunk, ids, number, ctx), number, ctx)
        if hidden is not None:
            ctx.hidden_states.keep(hidden, number + 1)

    def guess(self, trunk: CausalLM, ids: Tensor, ctx: Context, number: int) -> Tensor | None:
        """Return logits of what follows tokens that the trunk has not seen yet.

        The output of a block that is alone stands for the trunk's hidden state of these tokens
        until then. Else it is kept for the next block.

        Args:
            ids: tokens, (T,). First those that the blocks before have computed and the block has
                not read; from the batch's first wanted row on each is the next one of its sequence,
                or behind a guess.
            number: index of the block.

        Returns:
            Logits (rows, n_vocab) of the latter, or of the tokens that are guessed from, as
            `CausalLM.forward` returns them.
        """
        block, _ = self._parts[number]
        x = self._joined(trunk, ids, number, ctx)
        x = None if x is None else block.forward(x, ctx)
        if not self._reads_normed:
            self._keep(x, number, ctx)
        x = ctx.enter(x, trunk.split.last_group, self._n_embd)
        if x is not None:
            x = self._norm(trunk, number)(x, ctx)
        if self._reads_normed:
            self._keep(x, number, ctx)
        if x is None:
            return None
        normed, own = x[ctx.batch.first_logit :], self.heads[number].output
        return ctx.gather(trunk.head(normed, ctx) if own is None else own(normed), normed)

    def _keep(self, x: Tensor | None, number: int, ctx: Context) -> None:
        """Keep the output of a block for that of the next guess; the group stays the same.

        Args:
            x: (T, n_embd), on the ranks that `ctx` is at.
        """
        here, next_one, first = ctx.group, number + 1, 0
        if len(self._parts) == 1:
            next_one, first = 0, ctx.batch.first_logit
        if next_one < len(self._parts):
            x = ctx.enter(x, self._parts[next_one][0].split.group, self._n_embd)
            if x is not None:
                ctx.hidden_states.keep(x, next_one, first)
            ctx.join(here)

    def _passed(
        self, trunk: CausalLM, x: Tensor | None, number: int, ctx: Context
    ) -> Tensor | None:
        """Compute a block of its input x (T, n_embd), and return what the next block reads.

        That is on the next block's ranks. Of the last one only keys and values are of use.
        """
        block, _ = self._parts[number]
        if number + 1 == len(self._parts):
            if x is not None:
                block.mix(x, ctx)
            return None
        x = None if x is None else block.forward(x, ctx)
        return self._handed(trunk, x, self._norm(trunk, number), number + 1, ctx)

    def _handed(
        self, trunk: CausalLM, x: Tensor | None, norm: Norm, number: int, ctx: Context
    ) -> Tensor | None:
        """Return hidden states x (T, n_embd) as a block reads them, on its ranks.

        Args:
            norm: the norm behind them, on the ranks of the output head.
            number: index of the block.
        """
        if self._reads_normed:
            x = ctx.enter(x, trunk.split.last_group, self._n_embd)
            x = None if x is None else norm(x, ctx)
        return ctx.enter(x, self._parts[number][0].split.group, self._n_embd)

    def _norm(self, trunk: CausalLM, number: int) -> Norm:
        return self.heads[number].shared_head_norm or trunk.output_norm

    def _joined(self, trunk: CausalLM, ids: Tensor, number: int, ctx: Context) -> Tensor | None:
        """Return a block's input (T, n_embd) on its ranks, from kept hidden states."""
        has_own = self.heads[number].embed_tokens is not None
        embedded = None if has_own else trunk.embed(ids, ctx)
        x = self._embedded(trunk, ids, embedded, number, ctx)
        if x is None:
            return None
        return self._parts[number][1](x, ctx.hidden_states.before(number), ctx)

    def _embedded(
        self, trunk: CausalLM, ids: Tensor, embedded: Tensor | None, number: int, ctx: Context
    ) -> Tensor | None:
        """Return the embeddings of ids (T,) on a block's ranks.

        Args:
            embedded: those of the trunk, on the ranks that hold them.
        """
        own = self.heads[number].embed_tokens
        if own is not None:
            embedded = ctx.with_pictures(own(ids, ctx))
        else:
            ctx.join(trunk.split.embedding.owners())
        return ctx.enter(embedded, self._parts[number][0].split.group, self._n_embd)


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
