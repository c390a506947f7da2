"""BLOOM and MPT: GPT-2's block with ALiBi in place of positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.model.architectures.base import CausalLM
from engine.model.architectures.gpt2 import GPT2Block
from engine.model.architectures.registry import register
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.mixers.attention import AlibiAttention, ClampedAttention
from engine.model.layers.norm import LayerNorm
from engine.model.sharding.placement import Replicate
from engine.model.sharding.split import ModelSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context


class BloomBlock(GPT2Block):
    """GPT-2's block with ALiBi."""

    mixer_type = AlibiAttention


@register("bloom")
class Bloom(CausalLM):
    """BLOOM (arXiv 2211.05100); the embedding is normalised."""

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
    """MPT (MosaicML 2023), the models with ALiBi."""

    traits = Traits(rope_style=None, norm_eps="layer")
    block_type = MPTBlock

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Check that the model uses ALiBi; no GGUF files of models with learned positions exist."""
        if not hp.keys.number("attention.max_alibi_bias"):
            raise hp.keys.invalid("it is an MPT model without ALiBi")
        return hp
