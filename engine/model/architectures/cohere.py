"""Cohere's Command models: parallel blocks with one bias-free norm, scaled logits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from engine.model.architectures.base import ScaledLM, SwaOnlyRopeLM
from engine.model.architectures.registry import register
from engine.model.layers.block import Block, ParallelBlock
from engine.model.layers.ffn import MoE
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.mixers.attention import HeadNormAttention
from engine.model.layers.norm import LayerNorm, Rope

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context


class CommandRBlock(ParallelBlock):
    """A parallel block with LayerNorms; query and key norms in Command R+ only."""

    norm_type = LayerNorm
    mixer_type = HeadNormAttention


class CohereLM(ScaledLM):
    """A model with a logit scale in the file."""

    @classmethod
    def logit_factor(cls, hp: HParams) -> float:
        return hp.keys.number("logit_scale", 0.0) or 1.0


@register("command-r")
class CommandR(CohereLM):
    """Command R and R+, Aya 23 (Cohere 2024)."""

    traits = Traits(norm_eps="layer")
    block_type = CommandRBlock


class Cohere2Block(ParallelBlock):
    """A parallel block with LayerNorms and no query or key norms."""

    norm_type = LayerNorm


@register("cohere2")
class Cohere2(SwaOnlyRopeLM, CohereLM):
    """Command R7B and Command A (arXiv 2504.00698)."""

    traits = Traits(norm_eps="layer", swa_period=4)
    block_type: ClassVar[type[Block]] = Cohere2Block


class AveragedMoE(MoE):
    """Experts that average the routed sum and the shared expert's output."""

    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        y = super().__call__(x, ctx)
        return y if y is None or self.shared is None else y * 0.5


class Cohere2MoEBlock(ParallelBlock):
    """A parallel block with RMSNorms and experts; sigmoid gating is the default."""

    gating = "sigmoid"
    normalises_experts = False

    def make_experts(self) -> MoE:
        return AveragedMoE(self.hp, self.split, self.layer, self.routing())


class Cohere2MoELayerNormBlock(Cohere2MoEBlock):
    """A parallel block with LayerNorms and experts, for files without an RMSNorm epsilon."""

    norm_type = LayerNorm


@register("cohere2moe")
class Cohere2MoE(Cohere2):
    """Command models with routed experts.

    Leading dense blocks and the MTP block always use RoPE; the MTP block has no window.
    """

    traits = Traits(norm_eps="layer", swa_period=4, swa_first_full=True, mtp_hidden="normed")
    block_type = Cohere2MoEBlock

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        hp = super().refine(hp)
        eps = hp.keys.number("attention.layer_norm_rms_epsilon", 0.0)
        swa = hp.swa[: hp.n_trunk] + (False,) * hp.n_mtp
        return replace(hp, norm_eps=eps or hp.norm_eps, swa=swa)

    @classmethod
    def block_for(cls, hp: HParams, layer: int) -> type[Block]:
        has_rms = hp.keys.number("attention.layer_norm_rms_epsilon", 0.0) > 0
        return cls.block_type if has_rms else Cohere2MoELayerNormBlock

    def rope_of(self, layer: int) -> Rope | None:
        n_dense = self.hp.keys.integer("leading_dense_block_count", 0)
        is_rotated = layer < n_dense or layer >= self.hp.n_trunk
        return self.rope_freqs if is_rotated else super().rope_of(layer)
