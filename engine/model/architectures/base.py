"""Base classes of language models: embedding, blocks, final norm and output head."""

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
from engine.model.layers.mtp import MTPHead, MTPInput
from engine.model.layers.norm import Norm, Rope, choose_rope_factors
from engine.model.sharding.placement import Replicate, Shard
from engine.model.sharding.split import ModelSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context


class MTP(Module):
    """The MTP blocks of a model (multi-token prediction), which draft tokens from hidden states.

    A block reads pairs, each consisting of a token and the previous token's hidden state. A pair is
    cached at the token's position, so cached values never depend on later tokens; position 0 has no
    pair. A prompt pass computes the pairs of all its tokens. Single-token passes only store their
    hidden states; the next draft computes the missing pairs and continues from them.

    A single block can draft any number of tokens, using its own output as the hidden state for each
    draft token. Of several blocks, each drafts one token, and each except the first reads the
    previous block's outputs instead of the trunk's hidden states (DeepSeek-V3, arXiv 2412.19437,
    section 2.2), so its pairs begin one position later.

    Args:
        blocks: the MTP blocks, at least one; they are children of the model.
        reads_normed: whether they read hidden states after the final norm.

    Attributes:
        heads: embedding, norm and output head of each block.
    """

    is_nameless = True

    def __init__(
        self, hp: HParams, split: ModelSplit, blocks: Sequence[Block], *, reads_normed: bool
    ) -> None:
        self._parts: tuple[tuple[MixerBlock, MTPInput], ...] = ()  # in a tuple, so not children
        for block in blocks:
            if not isinstance(block, MixerBlock) or block.nextn is None:
                raise hp.keys.invalid("its MTP block has no attention")
            self._parts += ((block, block.nextn),)
        self.heads = [MTPHead(hp, split, block.layer, block.norm_type) for block in blocks]
        self._reads_normed, self._n_embd = reads_normed, hp.n_embd

    def consume(
        self, trunk: CausalLM, ids: Tensor, embedded: Tensor | None, x: Tensor | None, ctx: Context
    ) -> None:
        """Cache the keys and values of a prompt's tokens, or store the hidden states of single
        tokens.

        The current group of `ctx` is restored afterwards.

        Args:
            ids: tokens in the pass, (T,).
            embedded: their embeddings on the ranks that hold the trunk's embedding, else None.
            x: residual stream after the trunk's last block, (T, n_embd), on its ranks.
        """
        here = ctx.group
        hidden = self._hidden_for(trunk, x, trunk.output_norm, 0, ctx)
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
            hidden = self._run(trunk, x, number, ctx)
        ctx.join(here)

    def read(self, trunk: CausalLM, ids: Tensor, ctx: Context, number: int) -> None:
        """Cache the keys and values of single tokens ids (T,) in block `number`, using stored
        hidden states."""
        hidden = self._run(trunk, self._input(trunk, ids, number, ctx), number, ctx)
        if hidden is not None:
            ctx.hidden_states.keep(hidden, number + 1)

    def guess(self, trunk: CausalLM, ids: Tensor, ctx: Context, number: int) -> Tensor | None:
        """Return draft logits for tokens that the trunk has not processed yet.

        The output of a single block serves as the hidden state of these tokens until the trunk
        computes it; with several blocks it is stored for the next one.

        Args:
            ids: tokens, (T,): first the tokens that earlier blocks have processed and this one has
                not; from the batch's first wanted row on, the newest token or draft token of each
                sequence.
            number: index of the block.

        Returns:
            Logits of the wanted rows, (rows, n_vocab or size of the reduced draft vocabulary), on
            the ranks on which `CausalLM.forward` returns logits.
        """
        block, _ = self._parts[number]
        x = self._input(trunk, ids, number, ctx)
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
        """Store a block's output for the next draft step; the current group stays the same."""
        here, next_one, first = ctx.group, number + 1, 0
        if len(self._parts) == 1:
            next_one, first = 0, ctx.batch.first_logit
        if next_one < len(self._parts):
            x = ctx.enter(x, self._parts[next_one][0].split.group, self._n_embd)
            if x is not None:
                ctx.hidden_states.keep(x, next_one, first)
            ctx.join(here)

    def _run(self, trunk: CausalLM, x: Tensor | None, number: int, ctx: Context) -> Tensor | None:
        """Run a block on x (T, n_embd); return the next block's hidden states on its ranks."""
        block, _ = self._parts[number]
        if number + 1 == len(self._parts):  # the last block only has to cache keys and values
            if x is not None:
                block.mix(x, ctx)
            return None
        x = None if x is None else block.forward(x, ctx)
        return self._hidden_for(trunk, x, self._norm(trunk, number), number + 1, ctx)

    def _hidden_for(
        self, trunk: CausalLM, x: Tensor | None, norm: Norm, number: int, ctx: Context
    ) -> Tensor | None:
        """Return hidden states x (T, n_embd) as block `number` reads them, on its ranks."""
        if self._reads_normed:
            x = ctx.enter(x, trunk.split.last_group, self._n_embd)
            x = None if x is None else norm(x, ctx)
        return ctx.enter(x, self._parts[number][0].split.group, self._n_embd)

    def _norm(self, trunk: CausalLM, number: int) -> Norm:
        return self.heads[number].shared_head_norm or trunk.output_norm

    def _input(self, trunk: CausalLM, ids: Tensor, number: int, ctx: Context) -> Tensor | None:
        """Return a block's input (T, n_embd) on its ranks, from stored hidden states."""
        has_own = self.heads[number].embed_tokens is not None
        embedded = None if has_own else trunk.embed(ids, ctx)
        x = self._embedded(trunk, ids, embedded, number, ctx)
        if x is None:
            return None
        return self._parts[number][1](x, ctx.hidden_states.before(number), ctx)

    def _embedded(
        self, trunk: CausalLM, ids: Tensor, embedded: Tensor | None, number: int, ctx: Context
    ) -> Tensor | None:
        own = self.heads[number].embed_tokens
        if own is not None:
            embedded = ctx.with_images(own(ids, ctx))
        else:
            ctx.join(trunk.split.embedding.owners())
        return ctx.enter(embedded, self._parts[number][0].split.group, self._n_embd)


class CausalLM(Module):
    """A decoder-only language model.

    Attributes:
        traits: properties of the architecture that its files do not state.
        block_type: class of its blocks.
        last_full_layer: index of the last block that needs all rows of a prompt, because it has a
            cache or state; after its mixer, rows without wanted logits are dropped. If MTP blocks
            read all rows, the index is past the last block.
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
        stateful = [block.layer for block in self.trunk if block.states()]
        self.last_full_layer = max(stateful, default=-1) if self.mtp is None else len(self.blk)

    @property
    def trunk(self) -> Sequence[Block]:
        """Blocks that run for every token: all except MTP blocks."""
        return self.blk[: self.hp.n_trunk]

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Return `hp` with this architecture's corrections for missing or differently defined
        keys."""
        return hp

    @classmethod
    def block_for(cls, hp: HParams, layer: int) -> type[Block]:
        """Return the class of block `layer`."""
        return cls.block_type

    def make_ropes(self) -> None:
        """Declare RoPEs in addition to `rope_freqs`."""

    def rope_of(self, layer: int) -> Rope | None:
        """Return the RoPE of block `layer`, or None if it has none."""
        return self.rope_freqs if self.traits.rope_style else None

    def forward(self, ids: Tensor, ctx: Context) -> Tensor | None:
        """Run ids (T,) on top of the tokens that are already cached.

        Returns:
            Logits (rows, n_vocab) from the first wanted row on, or hidden states (rows, n_embd) if
            the batch wants those, on the first rank of the output head; None on other ranks and if
            no row is wanted.
        """
        n_wanted = ctx.batch.n_wanted
        x = ctx.with_images(self.embed(ids, ctx))
        embedded = x if self.mtp is not None else None  # otherwise freed after the first block
        for block in self.trunk:
            if not block.split.group:  # an empty block
                continue
            x = ctx.enter(x, block.split.group, self.hp.n_embd)
            if block.layer == self.last_full_layer and not ctx.deepens(self.hp.n_embd, block.layer):
                ctx.let_rows_drop()
            if x is not None:
                x = ctx.steer(ctx.deepen(block.forward(x, ctx), block.layer), block.layer)
            ctx.drop_rows()
        if self.mtp is not None:
            self.mtp.consume(self, ids, embedded, x, ctx)
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
        """Return draft logits after ids (T,); see `MTP.guess`. Requires an MTP block."""
        assert self.mtp is not None, "drafting needs an MTP block"
        return self.mtp.guess(self, ids, ctx, block)

    def read(self, ids: Tensor, ctx: Context, block: int) -> None:
        """Cache computed tokens ids (T,) in an MTP block; see `MTP.read`. Requires an MTP block."""
        assert self.mtp is not None, "drafting needs an MTP block"
        self.mtp.read(self, ids, ctx, block)

    def embed(self, ids: Tensor, ctx: Context) -> Tensor | None:
        """Return the embeddings (T, n_embd) of ids (T,) on the ranks that hold the embedding
        matrix."""
        return self.token_embd(ids, ctx)

    def head(self, x: Tensor, ctx: Context) -> Tensor:
        """Return this rank's logits for x (rows, n_embd), the output of the final norm."""
        return self.output(x)

    @classmethod
    def adapt(cls, source: TensorSource, hp: HParams) -> None:
        """Rename and split tensors of `source` to match the names that this class declares."""
        choose_rope_factors(source, hp)
        for layer in range(hp.n_layer):
            separate_qkv(source, hp, layer)
            separate_gate_up(source, hp, layer)


class HybridLM(CausalLM):
    """A model with both recurrent layers (`recurrent_type`) and attention layers (`block_type`)."""

    recurrent_type: ClassVar[type[Block]]

    @classmethod
    def block_for(cls, hp: HParams, layer: int) -> type[Block]:
        return cls.recurrent_type if hp.recurrent[layer] else cls.block_type


class SwaRopeLM(CausalLM):
    """A model with a separate, unscaled RoPE in sliding-window layers; a key may set its base."""

    has_swa_base: ClassVar[bool] = True

    @classmethod
    def swa_rope(cls, hp: HParams) -> RopeParams:
        """Return the RoPE of the sliding-window layers."""
        base = hp.rope.base
        if cls.has_swa_base:
            base = hp.keys.number("rope.freq_base_swa", DEFAULT_BASE)
        rope = hp.rope.unscaled(base)
        return replace(rope, n_rot=hp.keys.integer("rope.dimension_count_swa", rope.n_rot))

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Check that both RoPEs fit their layers' heads.

        Raises:
            InvalidGGUF: a RoPE rotates more elements than a head has.
        """
        n_rot = {True: cls.swa_rope(hp).n_rot, False: hp.rope.n_rot}
        for is_swa, head_dim in zip(hp.swa, hp.head_dim_k, strict=True):
            if n_rot[is_swa] % 2 or n_rot[is_swa] > head_dim:
                raise hp.keys.invalid(
                    "its RoPE rotates {n} of {total} elements per head",
                    n=n_rot[is_swa], total=head_dim,
                )  # fmt: skip
        return hp

    def make_ropes(self) -> None:
        self.rope_swa = Rope(self.swa_rope(self.hp), self.split.used)

    def rope_of(self, layer: int) -> Rope:
        return self.rope_swa if self.hp.swa[layer] else self.rope_freqs


class SwaOnlyRopeLM(CausalLM):
    """A model with RoPE in sliding-window layers only (RNoPE, arXiv 2501.18795)."""

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Check that there are sliding windows, since otherwise no layer would encode positions.

        Raises:
            InvalidGGUF: the window length is missing.
        """
        hp.require_windows()
        return hp

    def rope_of(self, layer: int) -> Rope | None:
        return self.rope_freqs if self.hp.swa[layer] else None


class EachFourthNoPELM(CausalLM):
    """A model without RoPE in every fourth layer (RNoPE, arXiv 2501.18795); files have no key for
    this."""

    def rope_of(self, layer: int) -> Rope | None:
        return None if layer % 4 == 3 else super().rope_of(layer)


class ScaledLM(CausalLM):
    """A model that scales the embedding and the logits."""

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
