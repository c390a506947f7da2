"""Llama and models with its blocks: Llama 1-3, Mistral, Mixtral (routed experts), InternLM 2, …"""

from __future__ import annotations

from typing import ClassVar

from engine.model.architectures.base import CausalLM, EachFourthNoPELM, SwaRopeLM
from engine.model.architectures.qwen import Qwen3Block
from engine.model.architectures.registry import register
from engine.model.forward.operands import RELU2
from engine.model.layers.block import Block, ParallelBlock, TransformerBlock
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.mixers.attention import AlibiAttention, HeadNormAttention
from engine.model.layers.norm import LayerNorm, Rope


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
"""Number of layers of the 13B model; no key tells the two models apart, for llama.cpp neither."""


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
    """Llama's block with LayerNorms; query and key heads have norms in the 12B alone."""

    norm_type = LayerNorm
    mixer_type = HeadNormAttention


class StableLMParallelBlock(ParallelBlock, StableLMBlock):
    """A parallel block with one norm for both parts."""


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
    """ERNIE 4.5: Llama's blocks; experts gated by softmax, with an optional bias on the choice."""

    block_type = TransformerBlock
