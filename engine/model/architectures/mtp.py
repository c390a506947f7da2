"""Guesses of a model by its MTP blocks, which read the hidden states of the blocks before them.

A block sees pairs of a token and the hidden state of the token before. Such a pair lies in its KV
cache at the position of the token, so that what is cached depends on no later token; there is none
at position 0. A prompt's pass computes the pairs of its tokens. Single tokens only leave their
hidden states behind: a guess computes the pairs of all tokens since the last guess, and goes on
from them.

A block that is alone guesses any number of tokens: its own output stands for the trunk's hidden
state of a guess. Of several, each guesses one token, and reads the outputs of the one before in
place of the trunk's hidden states (DeepSeek-V3, arXiv 2412.19437, section 2.2), so that its pairs
begin one position later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from engine.errors import InvalidGGUF
from engine.model.layers.block import MixerBlock
from engine.model.layers.module import Module
from engine.model.layers.mtp import MTPHead

if TYPE_CHECKING:
    from torch import Tensor

    from engine.formats.gguf.reader import GGUFFile
    from engine.formats.gguf.tensors import TensorInfo
    from engine.model.forward.context import Context
    from engine.model.layers.block import Block
    from engine.model.layers.hparams import HParams
    from engine.model.layers.mtp import MTPInput
    from engine.model.layers.norm import Norm
    from engine.model.sharding.split import ModelSplit


class Trunk(Protocol):
    """What MTP blocks share with the model before them; see `CausalLM`."""

    split: ModelSplit
    output_norm: Norm

    def embed(self, ids: Tensor, ctx: Context) -> Tensor | None:
        """Return the embeddings of ids (T,), on the ranks that hold them."""
        ...

    def head(self, x: Tensor, ctx: Context) -> Tensor:
        """Return this rank's logits of x (T, n_embd)."""
        ...


class MTP(Module):
    """The MTP blocks of a model, with what they have of their own or share with the trunk.

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
        self, trunk: Trunk, ids: Tensor, embedded: Tensor | None, x: Tensor | None, ctx: Context
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

    def read(self, trunk: Trunk, ids: Tensor, ctx: Context, number: int) -> None:
        """Write the keys and values of single tokens whose hidden states were kept.

        Args:
            ids: tokens of the pass, (T,).
            number: index of the block that reads them.
        """
        hidden = self._passed(trunk, self._joined(trunk, ids, number, ctx), number, ctx)
        if hidden is not None:
            ctx.hidden_states.keep(hidden, number + 1)

    def guess(self, trunk: Trunk, ids: Tensor, ctx: Context, number: int) -> Tensor | None:
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

    def _passed(self, trunk: Trunk, x: Tensor | None, number: int, ctx: Context) -> Tensor | None:
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
        self, trunk: Trunk, x: Tensor | None, norm: Norm, number: int, ctx: Context
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

    def _norm(self, trunk: Trunk, number: int) -> Norm:
        return self.heads[number].shared_head_norm or trunk.output_norm

    def _joined(self, trunk: Trunk, ids: Tensor, number: int, ctx: Context) -> Tensor | None:
        """Return a block's input (T, n_embd) on its ranks, from kept hidden states."""
        has_own = self.heads[number].embed_tokens is not None
        embedded = None if has_own else trunk.embed(ids, ctx)
        x = self._embedded(trunk, ids, embedded, number, ctx)
        if x is None:
            return None
        return self._parts[number][1](x, ctx.hidden_states.before(number), ctx)

    def _embedded(
        self, trunk: Trunk, ids: Tensor, embedded: Tensor | None, number: int, ctx: Context
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


MAP = "d2t"
"""Last part of the tensor's name, which some files follow by ".weight"."""


DTYPES = {"I32": "<i4", "I64": "<i8"}
"""numpy's names of the types that such a list may have."""


def draft_map(file: GGUFFile) -> TensorInfo | None:
    """Return the tensor of a file that maps rows of a shortened head to tokens; None without.

    Raises:
        InvalidGGUF: there are several.
    """
    found = [tensor for name, tensor in file.tensors.items() if is_named(name, MAP)]
    if len(found) > 1:
        raise InvalidGGUF(
            file.path, f"{found[0].name} and {found[1].name} both name the tokens of its MTP heads"
        )
    return found[0] if found else None


def is_named(name: str, last: str) -> bool:
    """Return whether the last part of a tensor's name is `last`, but for ".weight"."""
    return name.removesuffix(".weight").rpartition(".")[-1] == last


def draft_tokens(file: GGUFFile, n_vocab: int) -> Sequence[int]:
    """Return the token of each row of an MTP block's head; none where it has all of them in order.

    Raises:
        InvalidGGUF: the ids are no whole numbers, some are of no token, or there are several lists.
    """
    tensor = draft_map(file)
    if tensor is None:
        return ()
    dtype = DTYPES.get(tensor.type.name)
    if dtype is None or tensor.n_rows != 1:
        raise InvalidGGUF(file.path, f"the tensor {tensor.name} is no list of tokens")
    ids: list[int] = file.raw(tensor).read().view(np.dtype(dtype)).tolist()
    if not all(0 <= token < n_vocab for token in ids):
        raise InvalidGGUF(file.path, f"the tensor {tensor.name} names tokens that there are not")
    return ids
