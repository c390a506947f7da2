"""Llama 4: rotated layers that see only a chunk of the context, among some that see all of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.forward.operands import Scores
from engine.layers.block import TransformerBlock
from engine.layers.hparams import HParams
from engine.layers.mixers.attention import Attention
from engine.layers.mixers.temperature import Temperature
from engine.layers.moe import MoE
from engine.layers.rope import Rope
from engine.models.base import CausalLM, EachFourthNoPELM
from engine.models.registry import register

if TYPE_CHECKING:
    from torch import Tensor

    from engine.forward.context import Context
    from engine.forward.expert_rows import Groups

CHUNK = 8192
TEMPERATURE = Temperature(0.1, 8192, offset=1)
"""No keys say them; files are of models that share them."""

N_EXPERT_WITHOUT_NORM = 128
"""Maverick, which does not normalise its queries and keys; no key says that either."""


def has_chunks(hp: HParams) -> bool:
    """Only a window of 0 says that all layers rotate and see everything (MobileLLM)."""
    return hp.keys.integer("attention.sliding_window", CHUNK) > 0


class Llama4Attention(Attention):
    """Rotated heads are normalised without weights, after the rotation."""

    def make_scores(self) -> Scores:
        is_cut = self.rope is not None and has_chunks(self.hp)
        return replace(super().make_scores(), chunk=CHUNK if is_cut else 0)

    def rotate(self, q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        if self.rope is None:
            return TEMPERATURE.apply(q, ctx), k
        q, k = super().rotate(q, k, ctx)
        if self.hp.n_expert == N_EXPERT_WITHOUT_NORM:
            return q, k
        eps = self.hp.norm_eps
        return ctx.ops.rms_norm(q, None, None, eps), ctx.ops.rms_norm(k, None, None, eps)


class InputWeightedMoE(MoE):
    """A token's weight for an expert is a factor on what the expert reads."""

    def weighted_sum(self, x: Tensor, weights: Tensor, groups: Groups, ctx: Context) -> Tensor:
        y = self.mapped(x, groups, ctx, weights)
        return ctx.ops.sum_of_experts(y, None, groups)


class Llama4Block(TransformerBlock):
    """A dense FFN, or experts that are scored one by one and a shared one."""

    mixer_type = Llama4Attention
    gating = "sigmoid"
    normalises_experts = False

    def make_experts(self) -> MoE:
        return InputWeightedMoE(self.hp, self.split, self.layer, self.routing())


@register("llama4")
class Llama4(EachFourthNoPELM):
    """Scout and Maverick: each fourth layer sees all tokens and knows no positions."""

    block_type = Llama4Block

    def rope_of(self, layer: int) -> Rope | None:
        return super().rope_of(layer) if has_chunks(self.hp) else CausalLM.rope_of(self, layer)
