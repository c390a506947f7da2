"""Apertus: Llama's block with xIELU and normalised query and key heads."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log1p
from typing import TYPE_CHECKING

from engine.model.architectures.base import CausalLM
from engine.model.architectures.registry import register
from engine.model.layers.block import TransformerBlock
from engine.model.layers.ffn import FFN
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.mixers.attention import QKNormAttention
from engine.model.sharding.split import BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context


@dataclass(frozen=True, slots=True)
class Xielu:
    """The activation xIELU with its trained factors (arXiv 2411.13010).

    `positive × x² + beta × x` where x > 0, else `(e^min(x, eps) - 1 - x) × negative + beta × x`.
    """

    positive: float
    negative: float
    beta: float
    eps: float

    @classmethod
    def read(cls, hp: HParams, layer: int) -> Xielu:
        """Return the factors of one layer; files store them before softplus (so they are above 0).

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
