"""Llama and families with its blocks: InternLM 2, Arcee, Seed-OSS, SmolLM 3, Mellum, Baichuan,
StableLM, ERNIE 4.5, Llama 4 (chunked attention), Ministral 3."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from engine.model.architectures.base import CausalLM, EachFourthNoPELM, SwaRopeLM
from engine.model.architectures.qwen import Qwen3Block
from engine.model.architectures.registry import register
from engine.model.forward.operands import RELU2, Scores
from engine.model.layers.block import Block, ParallelBlock, TransformerBlock
from engine.model.layers.ffn import MoE
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.mixers.attention import (
    AlibiAttention,
    Attention,
    HeadNormAttention,
    Temperature,
)
from engine.model.layers.norm import LayerNorm, Rope
from engine.model.sharding.split import BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context
    from engine.model.forward.expert_rows import Groups


@register("llama", "internlm2")
class Llama(CausalLM):
    """Llama (arXiv 2302.13971); the converter permuted q and k for adjacent rotation pairs."""

    block_type = TransformerBlock


class ArceeBlock(TransformerBlock):
    """Llama's block with an ungated FFN that uses squared ReLU."""

    act = RELU2
    is_gated = False


@register("arcee")
class Arcee(Llama):
    """Arcee's AFM 4.5B."""

    block_type = ArceeBlock


class SeedOssBlock(TransformerBlock):
    """Llama's block with a different name for the FFN norm; biases are optional."""

    tensor_names: ClassVar = {"ffn_norm": "post_attention_norm"}


@register("seed_oss")
class SeedOss(CausalLM):
    """ByteDance's Seed-OSS 36B."""

    traits = Traits(rope_style="neox")
    block_type = SeedOssBlock


@register("smollm3")
class SmolLM3(EachFourthNoPELM):
    """SmolLM 3; the converter permuted q and k for adjacent rotation pairs."""

    block_type = TransformerBlock


@register("mellum")
class Mellum(SwaRopeLM):
    """JetBrains' Mellum 2."""

    traits = Traits(rope_style="neox", swa_period=4)
    block_type = Qwen3Block
    has_swa_base = False


N_LAYER_13B = 40
"""Layers in the 13B model; as in llama.cpp, only the layer count distinguishes the two sizes."""


class BaichuanAlibiBlock(TransformerBlock):
    """Llama's block with ALiBi."""

    mixer_type = AlibiAttention


@register("baichuan")
class Baichuan(CausalLM):
    """Baichuan (arXiv 2309.10305); the converter permuted q and k for adjacent rotation pairs."""

    block_type = TransformerBlock

    @classmethod
    def block_for(cls, hp: HParams, layer: int) -> type[Block]:
        return BaichuanAlibiBlock if hp.n_layer == N_LAYER_13B else cls.block_type

    def rope_of(self, layer: int) -> Rope | None:
        return None if self.hp.n_layer == N_LAYER_13B else super().rope_of(layer)


class StableLMBlock(TransformerBlock):
    """Llama's block with LayerNorms; query and key norms in the 12B only."""

    norm_type = LayerNorm
    mixer_type = HeadNormAttention


class StableLMParallelBlock(ParallelBlock, StableLMBlock):
    """A parallel block with one norm."""


@register("stablelm")
class StableLM(CausalLM):
    """StableLM (arXiv 2402.17834); a block without `ffn_norm` is parallel."""

    traits = Traits(rope_style="neox", norm_eps="layer")
    block_type = StableLMBlock

    @classmethod
    def block_for(cls, hp: HParams, layer: int) -> type[Block]:
        is_parallel = not hp.has(layer, "ffn_norm.weight")
        return StableLMParallelBlock if is_parallel else cls.block_type


@register("ernie4_5", "ernie4_5-moe")
class Ernie45(CausalLM):
    """ERNIE 4.5: Llama's blocks; experts with softmax gating and an optional selection bias."""

    block_type = TransformerBlock


CHUNK = 8192  # tokens per attention chunk; not in files, but the same for all models

TEMPERATURE = Temperature(0.1, 8192, offset=1)
"""Attention temperature in layers without RoPE; not in files, but the same for all models."""

N_EXPERT_WITHOUT_NORM = 128
"""Number of experts in Maverick, which has no query and key norms; files have no key for this."""


def has_chunks(hp: HParams) -> bool:
    """Return whether RoPE layers use chunked attention; a window of 0 turns it off (MobileLLM)."""
    return hp.keys.integer("attention.sliding_window", CHUNK) > 0


class Llama4Attention(Attention):
    """Attention with weightless query and key norms after RoPE."""

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
    """Experts with the router's weight applied to their input, not their output."""

    def weighted_sum(self, x: Tensor, weights: Tensor, groups: Groups, ctx: Context) -> Tensor:
        y = self.expert_outputs(x, groups, ctx, weights)
        return ctx.ops.sum_of_experts(y, None, groups)


class Llama4Block(TransformerBlock):
    """A block with a dense FFN, or with sigmoid-gated experts and a shared one."""

    mixer_type = Llama4Attention
    gating = "sigmoid"
    normalises_experts = False

    def make_experts(self) -> MoE:
        return InputWeightedMoE(self.hp, self.split, self.layer, self.routing())


@register("llama4")
class Llama4(EachFourthNoPELM):
    """Scout and Maverick: every fourth layer has full attention and no RoPE."""

    block_type = Llama4Block

    def rope_of(self, layer: int) -> Rope | None:
        return super().rope_of(layer) if has_chunks(self.hp) else CausalLM.rope_of(self, layer)


class Mistral3Attention(Attention):
    """Attention with an optional temperature on the queries."""

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.temperature = Temperature.read(hp)

    def rotate(self, q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        q, k = super().rotate(q, k, ctx)
        return (q if self.temperature is None else self.temperature.apply(q, ctx)), k


class Mistral3Block(TransformerBlock):
    """Llama's block, dense or with routed experts."""

    mixer_type = Mistral3Attention


@register("mistral3")
class Mistral3(CausalLM):
    """Ministral 3; its files state YaRN's bounds, and `mscale_all_dim` undivided."""

    block_type = Mistral3Block

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        keys, rope = hp.keys, hp.rope
        mscale = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
        rope = rope.balanced(1.0, mscale) if mscale else rope
        rope = replace(
            rope,
            beta_fast=keys.number("rope.scaling.yarn_beta_fast", rope.beta_fast),
            beta_slow=keys.number("rope.scaling.yarn_beta_slow", rope.beta_slow),
        )
        return replace(hp, rope=rope)
