"""Mixture-of-experts families: Trinity, DBRX, MiniMax M2, Laguna, gpt-oss, Step 3.5 and Hunyuan."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from engine.model.architectures.base import CausalLM, EachFourthNoPELM, SqrtScaledLM, SwaRopeLM
from engine.model.architectures.deepseek import SigmoidRoutedBlock
from engine.model.architectures.registry import register
from engine.model.forward.operands import Activation, RopeParams
from engine.model.layers.block import SandwichBlock, TransformerBlock
from engine.model.layers.ffn import FFN, MoE, separate
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.mixers.attention import (
    Attention,
    ClampedAttention,
    GatedAttention,
    QKNormAttention,
    RowNormAttention,
    SinkAttention,
    SoftplusGatedAttention,
)
from engine.model.layers.module import TensorSource
from engine.model.layers.norm import LayerNorm

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context


class AfmoeBlock(SandwichBlock):
    """A block with elementwise attention gates and sigmoid-gated experts."""

    mixer_type = GatedAttention
    gating = "sigmoid"
    normalises_experts = False


@register("afmoe")
class Afmoe(EachFourthNoPELM, SqrtScaledLM):
    """Trinity: every fourth layer has full attention; the embedding is scaled by sqrt(n_embd)."""

    traits = Traits(rope_style="neox", swa_period=4)
    block_type = AfmoeBlock


class DbrxBlock(TransformerBlock):
    """A block with routed experts only; their weights sum to 1."""

    tensor_names: ClassVar = {"ffn_norm": "attn_output_norm"}
    norm_type = LayerNorm
    mixer_type = ClampedAttention


@register("dbrx")
class Dbrx(CausalLM):
    """DBRX, Databricks' 132B model."""

    traits = Traits(rope_style="neox", norm_eps="layer")
    block_type = DbrxBlock


class MiniMaxM2Block(TransformerBlock):
    """A block with sigmoid-gated experts and a bias that affects only their selection."""

    mixer_type = RowNormAttention
    gating = "sigmoid"


@register("minimax-m2")
class MiniMaxM2(CausalLM):
    """MiniMax M2 (2025); half of each head is rotated."""

    traits = Traits(rope_style="neox")
    block_type = MiniMaxM2Block


class LagunaBlock(SigmoidRoutedBlock):
    """A block with one attention gate per head (XS) or per element (M)."""

    mixer_type = SoftplusGatedAttention


@register("laguna")
class Laguna(SwaRopeLM):
    """Laguna; sliding-window layers may have more heads than the others; M has no windows."""

    traits = Traits(rope_style="neox", swa_period=4, swa_first_full=True)
    block_type = LagunaBlock


class GptOssBlock(TransformerBlock):
    """A block with attention sinks; experts are gated by a softmax over the selected ones."""

    tensor_names: ClassVar = {"ffn_norm": "post_attention_norm"}
    mixer_type = SinkAttention
    act = Activation("oai", limit=7.0)
    gating = "softmax_chosen"


@register("gpt-oss")
class GptOss(CausalLM):
    """gpt-oss (arXiv 2508.10925); biases are optional."""

    traits = Traits(rope_style="neox", swa_period=2)
    block_type = GptOssBlock


class Step35Block(SigmoidRoutedBlock):
    """A block with clamped activations: one limit for routed experts, one for shared and dense
    FFNs."""

    mixer_type = GatedAttention

    def limited(self, part: str) -> Activation:
        """Return the activation for "exp" (routed) or "shexp" (shared) experts."""
        limits = self.hp.keys.numbers(f"swiglu_clamp_{part}", self.hp.n_layer, 0.0)
        return Activation("silu", limits[self.layer])

    def make_dense(self) -> FFN:
        hp, split = self.hp, self.split
        n_ff, act = hp.n_ff[self.layer], self.limited("shexp")
        return FFN(hp.n_embd, n_ff, split.ffn, split.group, act)

    def make_experts(self) -> MoE:
        routed, shared = self.limited("exp"), self.limited("shexp")
        return MoE(self.hp, self.split, self.layer, self.routing(), routed, shared_act=shared)


@register("step35")
class Step35(SwaRopeLM):
    """Step 3.5 Flash and the text model of 3.7; files already add one to norm weights."""

    traits = Traits(rope_style="neox", swa_period=4, swa_first_full=True, mtp_hidden="raw")
    block_type = Step35Block

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Halve the rotated elements of full-attention layers.

        Raises:
            InvalidGGUF: there are no windows, or a RoPE does not fit its heads.
        """
        hp.require_windows()
        return super().refine(replace(hp, rope=replace(hp.rope, n_rot=hp.rope.n_rot // 2)))

    @classmethod
    def swa_rope(cls, hp: HParams) -> RopeParams:
        n_rot = hp.keys.integer("rope.dimension_count", max(hp.head_dim_k))
        n_rot = hp.keys.integer("rope.dimension_count_swa", n_rot)
        return replace(super().swa_rope(hp), n_rot=n_rot)

    @classmethod
    def adapt(cls, source: TensorSource, hp: HParams) -> None:
        """Ignore frequency divisors (all of them 1) that only sliding-window layers would use."""
        super().adapt(source, hp)
        divisors, n = source.tensors.get("rope_freqs.weight"), hp.rope.n_rot // 2
        if divisors is not None and (n_rest := divisors.shape[0] - n) > 0:
            separate(source, "rope_freqs", (("rope_freqs", n), ("rope_freqs_rest", n_rest)), ())


class NormAfterRopeAttention(QKNormAttention):
    """Attention with query and key norms after RoPE instead of before."""

    def rotate(self, q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        q, k = Attention.rotate(self, q, k, ctx)
        return self.attn_q_norm(q, ctx), self.attn_k_norm(k, ctx)


class HunyuanBlock(TransformerBlock):
    """A block with normalised softmax-gated experts and a shared expert."""

    mixer_type = NormAfterRopeAttention


@register("hunyuan-dense", "hunyuan-moe", "hunyuan_vl")
class Hunyuan(CausalLM):
    """Hunyuan (arXiv 2411.02265), and the text model of its vision models."""

    traits = Traits(rope_style="neox")
    block_type = HunyuanBlock

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Scale RoPE's base (NTK) if the converter has not."""
        alpha, n_rot = hp.keys.number("rope.scaling.alpha", 0.0), hp.rope.n_rot
        if not alpha or n_rot <= 2:
            return hp
        base = hp.rope.base * alpha ** (n_rot / (n_rot - 2))
        return replace(hp, rope=replace(hp.rope, base=base))
