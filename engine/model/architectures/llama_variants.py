"""Families that replace a part of Llama's block: Apertus (xIELU), BitNet (a norm before each
row-parallel matrix), and DeciLM and Nemotron 49B to 253B, from which a search removed parts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, log1p
from typing import TYPE_CHECKING, Literal

from engine.model.architectures.base import CausalLM
from engine.model.architectures.registry import register
from engine.model.layers.block import Block, FFNBlock, MixerBlock, TransformerBlock
from engine.model.layers.ffn import FFN
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.linear import Linear
from engine.model.layers.mixers.attention import Attention, QKNormAttention
from engine.model.layers.mixers.mixer import Mixer
from engine.model.layers.norm import RMSNorm, Rope
from engine.model.sharding.placement import Shard
from engine.model.sharding.split import BlockDims, BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context


@dataclass(frozen=True, slots=True)
class Xielu:
    """The activation xIELU with its trained factors (arXiv 2411.13010).

    `positive × x² + beta × x` if x > 0, else `(e^min(x, eps) - 1 - x) × negative + beta × x`.
    """

    positive: float
    negative: float
    beta: float
    eps: float

    @classmethod
    def read(cls, hp: HParams, layer: int) -> Xielu:
        """Return one layer's factors; files store them before the softplus that makes them
        positive.

        Raises:
            InvalidGGUF: a factor is missing.
        """
        alpha_p, alpha_n, beta, eps = (
            hp.keys.numbers(f"xielu.{name}", hp.n_layer)[layer]
            for name in ("alpha_p", "alpha_n", "beta", "eps")
        )
        return cls(softplus(alpha_p), beta + softplus(alpha_n), beta, eps)


def softplus(x: float) -> float:
    """Return ln(1 + e^x)."""
    return max(x, 0.0) + log1p(exp(-abs(x)))


class XieluFFN(FFN):
    """The FFN `down(xielu(up(x)))`."""

    def __init__(self, hp: HParams, split: BlockSplit, layer: int) -> None:
        super().__init__(hp.n_embd, hp.n_ff[layer], split.ffn, split.group, is_gated=False)
        self.xielu = Xielu.read(hp, layer)

    def inner(self, x: Tensor, ctx: Context) -> Tensor:
        f = self.xielu
        return ctx.ops.xielu(self.ffn_up(x), f.positive, f.negative, f.beta, f.eps)


class ApertusBlock(TransformerBlock):
    """Llama's block with normalised query and key heads, and xIELU."""

    mixer_type = QKNormAttention

    def make_ffn(self) -> XieluFFN:
        return XieluFFN(self.hp, self.split, self.layer)


@register("apertus")
class Apertus(CausalLM):
    """Apertus (arXiv 2509.14233)."""

    traits = Traits(rope_style="neox")
    block_type = ApertusBlock


class BitNetAttention(Attention):
    """Attention with a norm over all heads' outputs, across ranks."""

    n_reduce = 1

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        n_out = self.attn_output.shape[1]
        self.attn_sub_norm = RMSNorm(n_out, hp.norm_eps, Shard(0, split.heads))

    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        heads = None
        if ctx.owns(self.split.heads):
            q, k, v = self.project(x, ctx)
            heads = self.attend(*self.rotate(q, k, ctx), v, ctx).flatten(-2)
        ctx.drop_rows()  # even without heads, because all ranks must sum the same rows in the norm
        heads = self.attn_sub_norm.sharded(heads, ctx)
        return None if heads is None else self.attn_output(heads)


class BitNetFFN(FFN):
    """An FFN with a norm over the gated activations."""

    n_reduce = 1

    def __init__(self, hp: HParams, split: BlockSplit, layer: int) -> None:
        super().__init__(hp.n_embd, hp.n_ff[layer], split.ffn, split.group)
        self.ffn_sub_norm = RMSNorm(hp.n_ff[layer], hp.norm_eps, Shard(0, split.ffn))

    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        inner = self.inner(x, ctx) if ctx.owns(self.columns) else None
        inner = self.ffn_sub_norm.sharded(inner, ctx)
        return None if inner is None else self.ffn_down(inner)


class BitNetBlock(TransformerBlock):
    """Llama's block with sub-norms, each with an all-reduce of one number per token."""

    mixer_type = BitNetAttention

    def make_ffn(self) -> BitNetFFN:
        return BitNetFFN(self.hp, self.split, self.layer)


@register("bitnet")
class BitNet(CausalLM):
    """BitNet b1.58 (arXiv 2402.17764)."""

    traits = Traits(rope_style="neox")
    block_type = BitNetBlock

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        hp.refuse_experts()
        return hp


MixerKind = Literal["attention", "linear", "none"]  # kind of a block's mixer


class LinearMixer(Mixer):
    """A matrix instead of attention; its columns are split as if they belonged to heads."""

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.width = hp.n_embd // hp.n_head[layer]
        self.attn_output = Linear(hp.n_embd, hp.n_embd, Shard(1, split.heads), split.group)

    @classmethod
    def dims(cls, hp: HParams, layer: int) -> BlockDims:
        return BlockDims(n_head=hp.n_head[layer], n_head_kv=hp.n_head[layer])

    @property
    def bias(self) -> Tensor | None:
        return self.attn_output.bias

    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        if not ctx.owns(self.split.heads):
            return None
        start, stop = self.split.heads.spans[ctx.rank]
        return self.attn_output(x[:, start * self.width : stop * self.width])


class LinearBlock(TransformerBlock):
    """A block with a matrix and an FFN."""

    mixer_type = LinearMixer


class LinearOnlyBlock(MixerBlock):
    """A block with a matrix and no FFN."""

    mixer_type = LinearMixer


class EmptyBlock(Block):
    """A block with no parts."""

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return x


BLOCKS: dict[tuple[MixerKind, bool], type[Block]] = {
    ("attention", True): TransformerBlock,
    ("attention", False): MixerBlock,
    ("linear", True): LinearBlock,
    ("linear", False): LinearOnlyBlock,
    ("none", True): FFNBlock,
    ("none", False): EmptyBlock,
}
"""Block classes by mixer kind and whether there is an FFN."""


@register("deci")
class Deci(CausalLM):
    """DeciLM, by Puzzle (arXiv 2411.19146); the converter permuted q and k as for Llama."""

    traits = Traits(is_hybrid=True)
    block_type = TransformerBlock

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Mark no layer as recurrent: layers without key-value heads simply have no attention.

        Raises:
            InvalidGGUF: there are experts, or a matrix cannot be split like its heads.
        """
        hp.refuse_experts()
        for n_head in filter(None, hp.n_head):
            if hp.n_embd % n_head:
                raise hp.keys.invalid(
                    "{other} elements cannot be divided among {n} heads", n=n_head, other=hp.n_embd
                )
        return replace(hp, recurrent=(False,) * hp.n_layer)

    @classmethod
    def block_for(cls, hp: HParams, layer: int) -> type[Block]:
        n_head, n_head_kv = hp.n_head[layer], hp.n_head_kv[layer]
        kind: MixerKind = "attention" if n_head_kv else "linear" if n_head else "none"
        return BLOCKS[kind, hp.n_ff[layer] > 0]
