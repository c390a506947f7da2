"""Guesses of a model by its MTP block, which reads the hidden states of the blocks before it.

The block sees pairs of a token and the hidden state of the token before. Such a pair lies in its KV
cache at the position of the token, so that what is cached depends on no later token; there is none
at position 0. A prompt's pass computes the pairs of its tokens. Single tokens only leave their
hidden states behind: a guess computes the pairs of all tokens since the last guess, and goes on
from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from engine.layers.block import MixerBlock
from engine.layers.module import Module
from engine.layers.mtp import MTPHead

if TYPE_CHECKING:
    from torch import Tensor

    from engine.forward.context import Context
    from engine.layers.block import Block
    from engine.layers.hparams import HParams
    from engine.layers.norm import Norm
    from engine.sharding.split import ModelSplit


class Trunk(Protocol):
    """What an MTP block shares with the model before it; see `CausalLM`."""

    hp: HParams
    split: ModelSplit
    output_norm: Norm

    def embed(self, ids: Tensor, ctx: Context) -> Tensor | None:
        """Return the embeddings of ids (T,), on the ranks that hold them."""
        ...

    def head(self, x: Tensor, ctx: Context) -> Tensor:
        """Return this rank's logits of x (T, n_embd)."""
        ...


class MTP(Module):
    """The MTP block of a model, with what it has of its own or shares with the trunk.

    Args:
        block: the block, which belongs to the model.
        reads_normed: whether it reads hidden states behind the final norm.
    """

    is_nameless = True

    def __init__(self, hp: HParams, split: ModelSplit, block: Block, *, reads_normed: bool) -> None:
        if not isinstance(block, MixerBlock) or block.nextn is None:
            raise hp.keys.invalid("its MTP block has no attention")
        self.head = MTPHead(hp, split, block.layer, block.norm_type)
        self._parts = block, block.nextn  # wrapped, so that they are not found as children twice
        self._reads_normed = reads_normed

    def remember(
        self, trunk: Trunk, ids: Tensor, embedded: Tensor | None, x: Tensor | None, ctx: Context
    ) -> None:
        """Write the keys and values of a prompt's tokens, or keep hidden states of single ones.

        The group of ranks that `ctx` is at stays the same.

        Args:
            ids: tokens of the pass, (T,).
            embedded: their embeddings on the ranks that hold the trunk's; None on the others.
            x: the residual stream behind the trunk's last block, (T, n_embd), on its ranks.
        """
        (block, joint), here, n = self._parts, ctx.group, trunk.hp.n_embd
        hidden = x
        if self._reads_normed:
            hidden = ctx.enter(x, trunk.split.last_group, n)
            hidden = None if hidden is None else trunk.output_norm(hidden, ctx)
        hidden = ctx.enter(hidden, block.split.group, n)
        if ctx.batch.is_of_few_singles:
            if hidden is not None:
                ctx.hidden_states.keep(hidden)
            ctx.join(here)
            return
        embedded = self._embedded(trunk, ids, embedded, ctx)
        if hidden is not None and embedded is not None:
            before = ctx.hidden_states.exchanged(hidden)
            block.mix(joint(embedded, before, ctx), ctx)  # what it would add is of no use
        ctx.join(here)

    def read(self, trunk: Trunk, ids: Tensor, ctx: Context) -> None:
        """Write the keys and values of single tokens whose hidden states were kept.

        Args:
            ids: tokens of the pass, (T,).
        """
        block, _ = self._parts
        x = self._joined(trunk, ids, ctx)
        if x is not None:
            block.mix(x, ctx)  # what it would add is of no use

    def guess(self, trunk: Trunk, ids: Tensor, ctx: Context) -> Tensor | None:
        """Return logits of what follows tokens that the trunk has not seen yet.

        The block's own output stands for the trunk's hidden state of these tokens until then.

        Args:
            ids: tokens, (T,). First those that the trunk has computed and the block has not read;
                from the batch's first wanted row on each is the next one of its sequence, or
                behind a guess.

        Returns:
            Logits (rows, n_vocab) of the latter, or of the tokens that are guessed from, as
            `CausalLM.forward` returns them.
        """
        (block, _), n, last = self._parts, trunk.hp.n_embd, trunk.split.last_group
        first = ctx.batch.first_logit
        x = self._joined(trunk, ids, ctx)
        if x is not None:
            x = block.forward(x, ctx)[first:]
            if not self._reads_normed:
                ctx.hidden_states.keep(x, first)
        normed = ctx.enter(x, last, n)
        if normed is not None:
            normed = (self.head.shared_head_norm or trunk.output_norm)(normed, ctx)
        if self._reads_normed:
            mine = ctx.enter(normed, block.split.group, n)
            if mine is not None:
                ctx.hidden_states.keep(mine, first)
            ctx.join(last)
        if normed is None:
            return None
        own = self.head.output
        return ctx.gather(trunk.head(normed, ctx) if own is None else own(normed), normed)

    def _joined(self, trunk: Trunk, ids: Tensor, ctx: Context) -> Tensor | None:
        """Return the block's input (T, n_embd) on its ranks, from kept hidden states."""
        embedded = trunk.embed(ids, ctx) if self.head.embed_tokens is None else None
        x = self._embedded(trunk, ids, embedded, ctx)
        return None if x is None else self._parts[1](x, ctx.hidden_states.before(), ctx)

    def _embedded(
        self, trunk: Trunk, ids: Tensor, embedded: Tensor | None, ctx: Context
    ) -> Tensor | None:
        """Return the embeddings of ids (T,) on the block's ranks.

        Args:
            embedded: those of the trunk, on the ranks that hold them.
        """
        if self.head.embed_tokens is not None:
            embedded = ctx.with_pictures(self.head.embed_tokens(ids, ctx))
        else:
            ctx.join(trunk.split.embedding.owners())
        return ctx.enter(embedded, self._parts[0].split.group, trunk.hp.n_embd)
