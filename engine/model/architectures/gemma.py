"""Gemma 1 to 3: scaled embeddings, GELU, norms around each part, capped scores and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from engine.model.architectures.base import SqrtScaledLM, SwaRopeLM
from engine.model.architectures.registry import register
from engine.model.forward.operands import GELU, RopeParams, Scores
from engine.model.layers.block import SandwichBlock, TransformerBlock
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.mixers.attention import Attention, QKNormAttention
from engine.model.sharding.split import ModelSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context


class GemmaLM(SwaRopeLM, SqrtScaledLM):
    """A Gemma model: scaled embedding, optionally soft-capped logits.

    Its norms multiply by one plus their weight; in files the one is already added.

    Attributes:
        softcap: default of the cap that turns logits z into softcap × tanh(z / softcap); 0 for
            none.
    """

    softcap: ClassVar[float] = 0.0

    def __init__(self, hp: HParams, split: ModelSplit) -> None:
        super().__init__(hp, split)
        self.final_softcap = hp.keys.number("final_logit_softcapping", self.softcap)

    def head(self, x: Tensor, ctx: Context) -> Tensor:
        logits = super().head(x, ctx)
        cap = self.final_softcap
        return ctx.ops.softcap(logits, cap) if cap else logits


class GemmaBlock(TransformerBlock):
    """Llama's block with GELU."""

    act = GELU


@register("gemma")
class Gemma(GemmaLM):
    """Gemma 1 (arXiv 2403.08295); also CodeGemma."""

    traits = Traits(rope_style="neox")
    block_type = GemmaBlock


def score_scale(hp: HParams, layer: int, n_layer_27b: int) -> float:
    """Return 1 / sqrt(head_dim); the 27B models alone use n_embd / n_head for head_dim."""
    if hp.n_layer == n_layer_27b:
        return float(max(hp.n_embd // hp.n_head[layer], 1) ** -0.5)
    return float(hp.head_dim_k[layer] ** -0.5)


class Gemma2Attention(Attention):
    """Attention with soft-capped scores."""

    def make_scores(self) -> Scores:
        softcap = self.hp.keys.number("attn_logit_softcapping", 50.0)
        scale = score_scale(self.hp, self.layer, n_layer_27b=46)
        return replace(super().make_scores(), scale=scale, softcap=softcap)


class Gemma2Block(SandwichBlock):
    """A block with norms before and after each part, and soft-capped scores."""

    mixer_type = Gemma2Attention
    act = GELU


@register("gemma2")
class Gemma2(GemmaLM):
    """Gemma 2 (arXiv 2408.00118); early files lack caps and window, which all its models share."""

    traits = Traits(rope_style="neox", swa_period=2, n_swa=4096)
    block_type = Gemma2Block
    softcap = 30.0

    @classmethod
    def swa_rope(cls, hp: HParams) -> RopeParams:
        return hp.rope


class Gemma3Attention(QKNormAttention):
    """Attention with normalised query and key heads in place of capped scores."""

    def make_scores(self) -> Scores:
        scale = score_scale(self.hp, self.layer, n_layer_27b=62)
        return replace(super().make_scores(), scale=scale)


class Gemma3Block(SandwichBlock):
    """A block with norms before and after each part, and of query and key heads."""

    mixer_type = Gemma3Attention
    act = GELU


@register("gemma3")
class Gemma3(GemmaLM):
    """Gemma 3 (arXiv 2503.19786), MedGemma, and Rnj-1, which has no windows."""

    traits = Traits(rope_style="neox", swa_period=6)
    block_type = Gemma3Block
