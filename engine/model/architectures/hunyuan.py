"""Tencent's Hunyuan, dense and with routed experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.model.architectures.base import CausalLM
from engine.model.architectures.registry import register
from engine.model.layers.block import TransformerBlock
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.mixers.attention import Attention, QKNormAttention

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context


class NormAfterRopeAttention(QKNormAttention):
    """Attention that normalises query and key heads after RoPE instead of before."""

    def rotate(self, q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        q, k = Attention.rotate(self, q, k, ctx)
        return self.attn_q_norm(q, ctx), self.attn_k_norm(k, ctx)


class HunyuanBlock(TransformerBlock):
    """A block whose experts are gated by softmax and normalised, with a shared expert."""

    mixer_type = NormAfterRopeAttention


@register("hunyuan-dense", "hunyuan-moe", "hunyuan_vl")
class Hunyuan(CausalLM):
    """Hunyuan (arXiv 2411.02265); also the text of its vision models."""

    traits = Traits(rope_style="neox")
    block_type = HunyuanBlock

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Stretch RoPE's base (NTK), where the converter has not done so."""
        alpha, n_rot = hp.keys.number("rope.scaling.alpha", 0.0), hp.rope.n_rot
        if not alpha or n_rot <= 2:
            return hp
        base = hp.rope.base * alpha ** (n_rot / (n_rot - 2))
        return replace(hp, rope=replace(hp.rope, base=base))
