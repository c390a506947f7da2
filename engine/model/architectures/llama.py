"""Llama and models with its blocks: Llama 1-3, Mistral, Mixtral (routed experts), InternLM 2, …"""

from __future__ import annotations

from typing import ClassVar

from engine.model.architectures.base import CausalLM
from engine.model.architectures.registry import register
from engine.model.forward.operands import RELU2
from engine.model.layers.block import TransformerBlock
from engine.model.layers.hparams import Traits


@register("llama", "internlm2")
class Llama(CausalLM):
    """Llama (arXiv 2302.13971); the converter permuted q and k for adjacent rotation pairs."""

    block_type = TransformerBlock


class ArceeBlock(TransformerBlock):
    """Llama's block with an FFN of squared ReLU, without a gate."""

    act = RELU2
    is_gated = False


@register("arcee")
class Arcee(Llama):
    """Arcee's AFM 4.5B."""

    block_type = ArceeBlock


class SeedOssBlock(TransformerBlock):
    """Llama's block with another name of the FFN's norm; biases load where a file has them."""

    tensor_names: ClassVar = {"ffn_norm": "post_attention_norm"}


@register("seed_oss")
class SeedOss(CausalLM):
    """ByteDance's Seed-OSS 36B."""

    traits = Traits(rope_style="neox")
    block_type = SeedOssBlock
