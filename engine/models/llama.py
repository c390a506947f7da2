"""Llama and what shares its blocks: Llama 1-3, Mistral, Mixtral (routed experts), InternLM 2, …"""

from __future__ import annotations

from typing import ClassVar

from engine.forward.operands import RELU2
from engine.layers.block import TransformerBlock
from engine.layers.hparams import Traits
from engine.models.base import CausalLM
from engine.models.registry import register


@register("llama", "internlm2")
class Llama(CausalLM):
    """arXiv 2302.13971; the converter has permuted q and k for neighbouring rotation pairs."""

    block_type = TransformerBlock


class ArceeBlock(TransformerBlock):
    """An FFN without a gate."""

    act = RELU2
    is_gated = False


@register("arcee")
class Arcee(Llama):
    """AFM 4.5B."""

    block_type = ArceeBlock


class SeedOssBlock(TransformerBlock):
    """Llama's block; the biases load by themselves."""

    tensor_names: ClassVar = {"ffn_norm": "post_attention_norm"}


@register("seed_oss")
class SeedOss(CausalLM):
    """ByteDance's Seed-OSS 36B."""

    traits = Traits(rope_style="neox")
    block_type = SeedOssBlock
