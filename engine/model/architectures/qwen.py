"""Qwen 1 to 3, dense and with routed experts; text of their vision models."""

from __future__ import annotations

from dataclasses import replace

from engine.model.architectures.base import CausalLM
from engine.model.architectures.registry import register
from engine.model.layers.block import TransformerBlock
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.mixers.attention import QKNormAttention


@register("qwen2")
class Qwen2(CausalLM):
    """Qwen 2 (arXiv 2407.10671), with biases."""

    traits = Traits(rope_style="neox")
    block_type = TransformerBlock


def with_sections(hp: HParams, *, is_interleaved: bool) -> HParams:
    """Return the sizes with the sections of M-RoPE, where the file has any."""
    sections = hp.keys.sections()
    rope = replace(hp.rope, sections=sections, is_interleaved=is_interleaved and bool(sections))
    return replace(hp, rope=rope)


@register("qwen2vl")
class Qwen2VL(Qwen2):
    """Text of Qwen 2-VL and 2.5-VL (arXiv 2409.12191)."""

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        return with_sections(hp, is_interleaved=False)


@register("qwen")
class Qwen1(Qwen2):
    """Qwen 1 (arXiv 2309.16609); files state the columns of gate and up together."""

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        return replace(hp, n_ff=tuple(n // 2 for n in hp.n_ff))


class Qwen2MoEBlock(TransformerBlock):
    """Llama's block; the weights of the chosen experts are not normalised."""

    normalises_experts = False


@register("qwen2moe")
class Qwen2MoE(Qwen2):
    """Qwen 1.5 and 2 with routed experts and a gated shared one."""

    block_type = Qwen2MoEBlock


class Qwen3Block(TransformerBlock):
    """Llama's block with normalised query and key heads."""

    mixer_type = QKNormAttention


@register("qwen3", "qwen3moe")
class Qwen3(Qwen2):
    """Qwen 3 (arXiv 2505.09388)."""

    block_type = Qwen3Block


@register("qwen3vl", "qwen3vlmoe")
class Qwen3VL(Qwen3):
    """Text of Qwen 3-VL, whose pictures add to the first blocks as well."""

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        return with_sections(hp, is_interleaved=True)
