"""GPT-2 and similar families, with LayerNorms and an ungated FFN: StarCoder 1 and 2, GPT-NeoX, Phi,
BLOOM, MPT and Falcon 1."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from engine.model.architectures.base import CausalLM
from engine.model.architectures.registry import register
from engine.model.forward.operands import GELU
from engine.model.layers.block import Block, ParallelBlock, TransformerBlock, TwoNormParallelBlock
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.linear import Vector
from engine.model.layers.mixers.attention import AlibiAttention, ClampedAttention
from engine.model.layers.norm import LayerNorm
from engine.model.sharding.placement import Replicate
from engine.model.sharding.split import ModelSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context


class GPT2Block(TransformerBlock):
    """GPT-2's block, shared by many models; biases are optional."""

    norm_type = LayerNorm
    act = GELU
    is_gated = False


@register("gpt2", "starcoder")
class GPT2(CausalLM):
    """GPT-2 (Radford et al. 2019) and StarCoder (arXiv 2305.06161), with learned positions.

    StarCoder uses multi-query attention.
    """

    traits = Traits(rope_style=None, norm_eps="layer")
    block_type = GPT2Block

    def __init__(self, hp: HParams, split: ModelSplit) -> None:
        super().__init__(hp, split)
        owners = Replicate(split.embedding.owners())
        self.position_embd = Vector((hp.n_ctx_train, hp.n_embd), owners)

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Limit the context to the number of learned positions."""
        if not hp.n_ctx_train:
            raise hp.keys.invalid("its number of learned positions is missing")
        return replace(hp, n_ctx=min(hp.n_ctx, hp.n_ctx_train))

    def embed(self, ids: Tensor, ctx: Context) -> Tensor | None:
        x = super().embed(ids, ctx)
        return None if x is None else x + self.position_embd()[ctx.positions]


@register("starcoder2")
class StarCoder2(CausalLM):
    """StarCoder 2 (arXiv 2402.19173), without its sliding window, as in llama.cpp."""

    traits = Traits(rope_style="neox", norm_eps="layer")
    block_type = GPT2Block


class GPTNeoXParallelBlock(TwoNormParallelBlock, GPT2Block):
    """A block with attention and FFN on the same input, each with its own norm."""


@register("gptneox")
class GPTNeoX(CausalLM):
    """GPT-NeoX (arXiv 2204.06745); a key in the file says whether blocks are parallel."""

    traits = Traits(rope_style="neox", norm_eps="layer")
    block_type = GPT2Block

    @classmethod
    def block_for(cls, hp: HParams, layer: int) -> type[Block]:
        is_parallel = hp.keys.flag("use_parallel_residual", True)
        return GPTNeoXParallelBlock if is_parallel else cls.block_type


class Phi2Block(ParallelBlock, GPT2Block):
    """A parallel block with one norm."""


@register("phi2")
class Phi2(CausalLM):
    """Phi 1, 1.5 and 2 (arXiv 2309.05463)."""

    traits = Traits(rope_style="neox", norm_eps="layer")
    block_type = Phi2Block


@register("phi3", "phimoe")
class Phi3(CausalLM):
    """Phi 3 to 4 (arXiv 2404.14219), dense and with routed experts.

    As in llama.cpp, sliding windows are ignored, because files do not state which layers have one,
    and Phi 3.5 MoE's LayerNorm is an RMSNorm with bias.
    """

    traits = Traits(rope_style="neox")
    block_type = TransformerBlock


class BloomBlock(GPT2Block):
    """GPT-2's block with ALiBi."""

    mixer_type = AlibiAttention


@register("bloom")
class Bloom(CausalLM):
    """BLOOM (arXiv 2211.05100), with a norm after the embedding."""

    traits = Traits(rope_style=None, norm_eps="layer")
    block_type = BloomBlock

    def __init__(self, hp: HParams, split: ModelSplit) -> None:
        super().__init__(hp, split)
        owners = Replicate(split.embedding.owners())
        self.token_embd_norm = LayerNorm(hp.n_embd, hp.norm_eps, owners)

    def embed(self, ids: Tensor, ctx: Context) -> Tensor | None:
        x = super().embed(ids, ctx)
        return None if x is None else self.token_embd_norm(x, ctx)


class MPTAttention(ClampedAttention, AlibiAttention):
    """Attention with ALiBi and clamped queries, keys and values."""


class MPTBlock(GPT2Block):
    """GPT-2's block with MPT's attention, usually without biases."""

    mixer_type = MPTAttention


@register("mpt")
class MPT(CausalLM):
    """MPT (MosaicML 2023), ALiBi models only."""

    traits = Traits(rope_style=None, norm_eps="layer")
    block_type = MPTBlock

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Check that the model uses ALiBi; no GGUF files with learned positions exist."""
        if not hp.keys.number("attention.max_alibi_bias"):
            raise hp.keys.invalid("it is an MPT model without ALiBi")
        return hp


class FalconBlock(ParallelBlock, GPT2Block):
    """A parallel block with one norm."""


class FalconTwoNormBlock(TwoNormParallelBlock, GPT2Block):
    """A parallel block with two norms; files call the FFN's norm `attn_norm`."""

    tensor_names: ClassVar = {"attn_norm": "attn_norm_2", "ffn_norm": "attn_norm"}


@register("falcon")
class Falcon(CausalLM):
    """Falcon 1 (arXiv 2311.16867)."""

    traits = Traits(rope_style="neox", norm_eps="layer")
    block_type = FalconBlock

    @classmethod
    def block_for(cls, hp: HParams, layer: int) -> type[Block]:
        has_two = hp.has(layer, "attn_norm_2.weight")
        return FalconTwoNormBlock if has_two else cls.block_type
