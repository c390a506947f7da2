"""Qwen 1 to 3, dense and with routed experts; text of their vision models."""

from __future__ import annotations

from dataclasses import replace

from engine.layers.block import TransformerBlock
from engine.layers.hparams import HParams, Traits
from engine.layers.mixers.attention import QKNormAttention
from engine.models.base import CausalLM
from engine.models.registry import register


@register("qwen2", "qwen2vl")
class Qwen2(CausalLM):
    """arXiv 2407.10671; the biases load by themselves. For text, M-RoPE is plain RoPE."""

    traits = Traits(rope_style="neox")
    block_type = TransformerBlock


@register("qwen")
class Qwen1(Qwen2):
    """arXiv 2309.16609; files say how many columns gate and up have together."""

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        return replace(hp, n_ff=tuple(n // 2 for n in hp.n_ff))


class Qwen2MoEBlock(TransformerBlock):
    """The weights of the chosen experts are not brought to a sum of 1."""

    normalises_experts = False


@register("qwen2moe")
class Qwen2MoE(Qwen2):
    """Qwen 1.5 and 2 with routed experts and a gated shared one."""

    block_type = Qwen2MoEBlock


class Qwen3Block(TransformerBlock):
    """Each query and key head is normalised."""

    mixer_type = QKNormAttention


@register("qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe")
class Qwen3(Qwen2):
    """arXiv 2505.09388."""

    block_type = Qwen3Block
