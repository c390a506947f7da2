"""Granite 3 and 4 and MiniCPM: Llama with four scale factors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from engine.model.architectures.base import HybridLM, ScaledLM
from engine.model.architectures.registry import register
from engine.model.forward.operands import Addend, Scores
from engine.model.layers.block import TransformerBlock
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.mixers.attention import Attention, SinkAttention
from engine.model.layers.mixers.mamba import Mamba2
from engine.model.layers.mixers.mixer import Mixer
from engine.model.layers.norm import Rope
from engine.model.sharding.split import BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context


class GraniteAttention(Attention):
    """Attention with an optional score scale in the file."""

    def make_scores(self) -> Scores:
        scores = super().make_scores()
        return replace(scores, scale=self.hp.keys.number("attention.scale", 0.0) or scores.scale)


class GraniteSinkAttention(GraniteAttention, SinkAttention):
    """Granite's attention with sinks."""


class GraniteBlock(TransformerBlock):
    """Llama's block with a scale on both residual branches."""

    mixer_type: ClassVar[type[Mixer]] = GraniteAttention

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.residual_scale = hp.keys.number("residual_scale", 0.0) or self.residual_default(hp)

    @classmethod
    def residual_default(cls, hp: HParams) -> float:
        """Return the scale for files without one."""
        return 1.0

    def mix(self, x: Tensor, ctx: Context) -> Addend:
        return super().mix(x, ctx)._replace(scale=self.residual_scale)

    def feed(self, x: Tensor, ctx: Context) -> Addend:
        return super().feed(x, ctx)._replace(scale=self.residual_scale)


class GraniteLM(ScaledLM):
    """A model that multiplies the embedding and divides the logits by factors from the file."""

    @classmethod
    def embedding_factor(cls, hp: HParams) -> float:
        return hp.keys.number("embedding_scale", 0.0) or cls.embedding_default(hp)

    @classmethod
    def logit_factor(cls, hp: HParams) -> float:
        return 1 / (hp.keys.number("logit_scale", 0.0) or cls.logit_default(hp))

    @classmethod
    def embedding_default(cls, hp: HParams) -> float:
        """Return the embedding scale for files without one."""
        return 1.0

    @classmethod
    def logit_default(cls, hp: HParams) -> float:
        """Return the logit divisor for files without one."""
        return 1.0


@register("granite", "granitemoe")
class Granite(GraniteLM):
    """Granite 3; a file may turn RoPE off."""

    block_type = GraniteBlock

    def rope_of(self, layer: int) -> Rope | None:
        is_rotated = self.hp.keys.flag("rope.scaling.finetuned", True)
        return super().rope_of(layer) if is_rotated else None


class GraniteMambaBlock(GraniteBlock):
    """Granite's block with Mamba 2 instead of attention."""

    mixer_type = Mamba2


@register("granitehybrid")
class GraniteHybrid(Granite, HybridLM):
    """Granite 4; files of most sizes turn RoPE off."""

    traits = Traits(is_hybrid=True)
    recurrent_type = GraniteMambaBlock


class GraniteSwaBlock(GraniteBlock):
    """Granite's block with attention sinks."""

    mixer_type = GraniteSinkAttention


@register("granite_swa")
class GraniteSwa(GraniteLM):
    """Granite with sliding windows and sinks."""

    traits = Traits(swa_period=2)
    block_type = GraniteSwaBlock

    def rope_of(self, layer: int) -> Rope | None:
        n_layer = self.hp.n_layer
        pattern = self.hp.keys.flags("attention.rope_pattern", n_layer, (True,) * n_layer)
        return super().rope_of(layer) if pattern[layer] else None


class MiniCPMBlock(GraniteBlock):
    """MiniCPM's block (arXiv 2404.06395): residual branches are scaled by 1.4 / sqrt(n_layer)."""

    @classmethod
    def residual_default(cls, hp: HParams) -> float:
        return 1.4 / float(hp.n_layer**0.5)


@register("minicpm")
class MiniCPM(GraniteLM):
    """MiniCPM; older files omit the factors, which are the same in all models of that time."""

    block_type = MiniCPMBlock

    @classmethod
    def embedding_default(cls, hp: HParams) -> float:
        return 12.0

    @classmethod
    def logit_default(cls, hp: HParams) -> float:
        return hp.n_embd / 256
