"""Llama 4: layers with RoPE that see a chunk of the context, among some that see all of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.model.architectures.base import CausalLM, EachFourthNoPELM
from engine.model.architectures.registry import register
from engine.model.forward.operands import Scores
from engine.model.layers.block import TransformerBlock
from engine.model.layers.ffn import MoE
from engine.model.layers.hparams import HParams
from engine.model.layers.mixers.attention import Attention, Temperature
from engine.model.layers.norm import Rope

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context
    from engine.model.forward.expert_rows import Groups

CHUNK = 8192
"""Tokens of a chunk; no key says so, but all models share it."""

TEMPERATURE = Temperature(0.1, 8192, offset=1)
"""Attention temperature of the layers without RoPE; no key says so, but all models share it."""

N_EXPERT_WITHOUT_NORM = 128
"""Number of experts of Maverick, which does not normalise queries and keys; no key says so."""


def has_chunks(hp: HParams) -> bool:
    """Return whether layers with RoPE see chunks; a window of 0 says they do not (MobileLLM)."""
    return hp.keys.integer("attention.sliding_window", CHUNK) > 0


class Llama4Attention(Attention):
    """Attention that normalises rotated heads, without weights, after RoPE."""

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
    """Experts whose input, not output, is multiplied by the token's weight."""

    def weighted_sum(self, x: Tensor, weights: Tensor, groups: Groups, ctx: Context) -> Tensor:
        y = self.expert_outputs(x, groups, ctx, weights)
        return ctx.ops.sum_of_experts(y, None, groups)


class Llama4Block(TransformerBlock):
    """A block with a dense FFN, or with experts gated by sigmoid and a shared one."""

    mixer_type = Llama4Attention
    gating = "sigmoid"
    normalises_experts = False

    def make_experts(self) -> MoE:
        return InputWeightedMoE(self.hp, self.split, self.layer, self.routing())


@register("llama4")
class Llama4(EachFourthNoPELM):
    """Scout and Maverick: every fourth layer sees all tokens and rotates no positions."""

    block_type = Llama4Block

    def rope_of(self, layer: int) -> Rope | None:
        return super().rope_of(layer) if has_chunks(self.hp) else CausalLM.rope_of(self, layer)
