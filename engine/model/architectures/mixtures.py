"""gpt-oss: attention sinks, a window on every second layer, experts with clamped SwiGLU."""

from __future__ import annotations

from typing import ClassVar

from engine.model.architectures.base import CausalLM, EachFourthNoPELM, SqrtScaledLM, SwaRopeLM
from engine.model.architectures.deepseek import SigmoidRoutedBlock
from engine.model.architectures.registry import register
from engine.model.forward.operands import Activation
from engine.model.layers.block import SandwichBlock, TransformerBlock
from engine.model.layers.hparams import Traits
from engine.model.layers.mixers.attention import (
    ClampedAttention,
    GatedAttention,
    RowNormAttention,
    SinkAttention,
    SoftplusGatedAttention,
)
from engine.model.layers.norm import LayerNorm


class AfmoeBlock(SandwichBlock):
    """A block with a gate for each element of a head, and experts scored one by one."""

    mixer_type = GatedAttention
    gating = "sigmoid"
    normalises_experts = False


@register("afmoe")
class Afmoe(EachFourthNoPELM, SqrtScaledLM):
    """Trinity: every fourth layer sees the whole context; embedding scaled by sqrt(n_embd)."""

    traits = Traits(rope_style="neox", swa_period=4)
    block_type = AfmoeBlock


class DbrxBlock(TransformerBlock):
    """A block with routed experts alone, whose weights sum to 1."""

    tensor_names: ClassVar = {"ffn_norm": "attn_output_norm"}
    norm_type = LayerNorm
    mixer_type = ClampedAttention


@register("dbrx")
class Dbrx(CausalLM):
    """DBRX, Databricks' 132B model."""

    traits = Traits(rope_style="neox", norm_eps="layer")
    block_type = DbrxBlock


class MiniMaxM2Block(TransformerBlock):
    """A block with experts gated by sigmoid, with a bias on their choice alone."""

    mixer_type = RowNormAttention
    gating = "sigmoid"


@register("minimax-m2")
class MiniMaxM2(CausalLM):
    """MiniMax M2 (2025); half of each head is rotated."""

    traits = Traits(rope_style="neox")
    block_type = MiniMaxM2Block


class LagunaBlock(SigmoidRoutedBlock):
    """A block whose attention has a gate per head (XS) or per element (M)."""

    mixer_type = SoftplusGatedAttention


@register("laguna")
class Laguna(SwaRopeLM):
    """Laguna; layers with a window may have more heads than others; M has no windows."""

    traits = Traits(rope_style="neox", swa_period=4, swa_first_full=True)
    block_type = LagunaBlock


class GptOssBlock(TransformerBlock):
    """A block with attention sinks and experts gated by a softmax over the chosen ones."""

    tensor_names: ClassVar = {"ffn_norm": "post_attention_norm"}
    mixer_type = SinkAttention
    act = Activation("oai", limit=7.0)
    gating = "softmax_chosen"


@register("gpt-oss")
class GptOss(CausalLM):
    """gpt-oss (arXiv 2508.10925); biases load where a file has them."""

    traits = Traits(rope_style="neox", swa_period=2)
    block_type = GptOssBlock
