"""What every language model has: an embedding, blocks, a last norm and an output head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from engine.errors import InvalidGGUF
from engine.layers.linear import Embedding, Linear, TiedHead
from engine.layers.module import Module, TensorSource
from engine.layers.norm import RMSNorm
from engine.layers.rope import Rope, RopeStyle
from engine.models.hparams import HParams
from engine.parallel.placement import Replicate, Shard
from engine.parallel.split import BlockSplit, ModelSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.context import Context


class Block(Module, ABC):
    """One layer of a model.

    Attributes:
        layer: its index.
        split: how its parts are cut; ranks outside `split.group` never see it.
    """

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope) -> None:
        self.hp = hp
        self.split = split
        self.layer = layer
        self._rope = (rope,)  # wrapped: it belongs to the model, not to the block

    @property
    def rope(self) -> Rope:
        return self._rope[0]

    @abstractmethod
    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Map the residual stream x (T, n_embd) to the next block's."""


class CausalLM(Module):
    """A decoder-only language model.

    Attributes:
        rope_style: how this architecture pairs the elements it rotates; files do not say.
        block_type: the class of its blocks.
    """

    rope_style: ClassVar[RopeStyle] = "norm"
    block_type: ClassVar[type[Block]]

    def __init__(self, hp: HParams, split: ModelSplit) -> None:
        self.hp = hp
        self.split = split
        everyone = tuple(range(split.n_ranks))
        used = tuple(r for r in everyone if any(r in b.group for b in split.blocks))
        self.rope_freqs = Rope(hp.rope, used)
        self.token_embd = Embedding(hp.n_vocab, hp.n_embd, Shard(0, split.embedding))
        self.blk = [
            self.block_type(hp, block, layer, self.rope_freqs)
            for layer, block in enumerate(split.blocks)
        ]
        self.output_norm = RMSNorm(hp.n_embd, hp.norm_eps, Replicate(split.last_group))
        self.output: Linear | TiedHead = (
            TiedHead(self.token_embd)
            if hp.tied
            else Linear(hp.n_embd, hp.n_vocab, Shard(0, split.output))
        )

    def forward(self, ids: Tensor, ctx: Context) -> Tensor | None:
        """Run ids (T,) after the tokens that are in the KV cache already.

        Returns:
            Logits (rows, n_vocab) of the rows from `ctx.first_logit` on; only on the first rank
            of the output head, None on the others.
        """
        x = self.token_embd(ids, ctx)
        for block in self.blk:
            x = ctx.enter(x, block.split.group)
            if x is not None:
                x = block.forward(x, ctx)
        x = ctx.enter(x, self.split.last_group)
        if x is None:
            return None
        return ctx.gather(self.output(self.output_norm(x[ctx.first_logit :], ctx)))

    @classmethod
    def adapt(cls, source: TensorSource, hp: HParams) -> None:
        """Show the tensors of `source` under the names that this class declares."""
        for layer in range(hp.n_layer):
            separate_qkv(source, hp, layer)


def separate_qkv(source: TensorSource, hp: HParams, layer: int) -> None:
    """Show a fused `attn_qkv` (rows q, then k, then v) as three tensors.

    Rows can be cut anywhere, so this moves offsets, not bytes.

    Raises:
        InvalidGGUF: the fused tensor is misshapen, or a bias whose parts end inside its blocks.
    """
    n_q = hp.n_head[layer] * hp.head_dim_k
    n_k = hp.n_head_kv[layer] * hp.head_dim_k
    n_v = hp.n_head_kv[layer] * hp.head_dim_v
    for kind, columns in (("weight", (hp.n_embd,)), ("bias", ())):
        name = f"blk.{layer}.attn_qkv.{kind}"
        if name not in source:
            continue
        fused = source.get(name, (n_q + n_k + n_v, *columns))
        start = 0
        for part, n_rows in (("attn_q", n_q), ("attn_k", n_k), ("attn_v", n_v)):
            try:
                view = fused.rows(start, start + n_rows, f"blk.{layer}.{part}.{kind}")
            except ValueError as error:
                raise InvalidGGUF(source.path, f"{name} cannot be taken apart ({error})") from None
            source.tensors[view.name] = view
            start += n_rows
