"""Tencent's Hunyuan, dense and with routed experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.layers.attention import Attention, QKNormAttention
from engine.layers.block import TransformerBlock
from engine.layers.hparams import Traits
from engine.models.base import CausalLM
from engine.models.registry import register

if TYPE_CHECKING:
    from torch import Tensor

    from engine.context import Context


class NormAfterRopeAttention(QKNormAttention):
    """Normalises each query and key head after it is rotated instead of before."""

    def project(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        return Attention.project(self, x, ctx)

    def rotate(self, q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        q, k = super().rotate(q, k, ctx)
        return self.attn_q_norm(q, ctx), self.attn_k_norm(k, ctx)


class HunyuanBlock(TransformerBlock):
    """Experts share what a softmax over all of them gives the chosen; one is for every token."""

    mixer_type = NormAfterRopeAttention


@register("hunyuan-dense", "hunyuan-moe")
class Hunyuan(CausalLM):
    """arXiv 2411.02265; the converter has stretched the base of the frequencies."""

    traits = Traits(rope_style="neox")
    block_type = HunyuanBlock
