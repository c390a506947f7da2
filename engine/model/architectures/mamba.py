"""Recurrent families: Mamba 1 and 2, with attention in other layers (Jamba) or in parallel
(Falcon-H1), and LFM2, with short convolutions as recurrent layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from engine.model.architectures.base import CausalLM, HybridLM
from engine.model.architectures.registry import register
from engine.model.layers.block import Block, MixerBlock, TransformerBlock
from engine.model.layers.ffn import add_parts
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.mixers.attention import Attention, QKNormAttention
from engine.model.layers.mixers.mamba import Mamba, Mamba2, NormedMamba
from engine.model.layers.mixers.mixer import Mixer, ShortConv
from engine.model.layers.norm import Rope
from engine.model.sharding.split import BlockDims, BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context


class MambaBlock(MixerBlock):
    """A Mamba 1 block, with a state per channel."""

    mixer_type = Mamba


@register("mamba")
class MambaLM(CausalLM):
    """Mamba 1 (arXiv 2312.00752); also Falcon Mamba."""

    traits = Traits(rope_style=None, is_hybrid=True)
    block_type: ClassVar[type[Block]] = MambaBlock


class Mamba2Block(MixerBlock):
    """A Mamba 2 block, with a state per head."""

    mixer_type = Mamba2


@register("mamba2")
class Mamba2LM(MambaLM):
    """Mamba 2 (arXiv 2405.21060); also Codestral Mamba."""

    block_type = Mamba2Block


class JambaBlock(TransformerBlock):
    """Llama's block without normalised expert weights."""

    normalises_experts = False


class JambaMambaBlock(JambaBlock):
    """Jamba's block with Mamba 1 instead of attention."""

    mixer_type = NormedMamba


@register("jamba")
class Jamba(HybridLM):
    """Jamba (arXiv 2403.19887), without RoPE."""

    traits = Traits(rope_style=None, is_hybrid=True)
    block_type = JambaBlock
    recurrent_type = JambaMambaBlock


class FalconH1Mamba(Mamba2):
    """Mamba 2 with an optional norm; if there is none, outputs are only gated."""

    norm_is_optional = True


class ParallelMixer(Mixer):
    """The mixer `attention(x) + mamba(x)`, with a single all-reduce.

    The weights in files already include the paper's multipliers.
    """

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.attention = Attention(hp, split, layer, rope)
        self.mamba = FalconH1Mamba(hp, split, layer, rope)

    @classmethod
    def dims(cls, hp: HParams, layer: int) -> BlockDims:
        state = FalconH1Mamba.dims(hp, layer)
        return replace(state, n_head=hp.n_head[layer], n_head_kv=hp.n_head_kv[layer])

    @property
    def bias(self) -> Tensor | None:
        return add_parts(self.attention.bias, self.mamba.bias)

    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        mamba = self.mamba(x, ctx)  # first, because attention may drop rows that Mamba needs
        attention = self.attention(x, ctx)
        return add_parts(attention, ctx.kept(mamba))


class FalconH1Block(TransformerBlock):
    """Llama's block with attention and Mamba 2 in parallel."""

    mixer_type = ParallelMixer


@register("falcon-h1")
class FalconH1(CausalLM):
    """Falcon-H1 (arXiv 2507.22448)."""

    traits = Traits(rope_style="neox")
    block_type = FalconH1Block


class LFM2Block(TransformerBlock):
    """Llama's block with query and key norms."""

    mixer_type = QKNormAttention


class LFM2ConvBlock(TransformerBlock):
    """Llama's block with a short convolution instead of attention."""

    mixer_type = ShortConv


@register("lfm2", "lfm2moe")
class LFM2(HybridLM):
    """LFM2 (arXiv 2511.23404)."""

    traits = Traits(rope_style="neox", is_hybrid=True)
    block_type = LFM2Block
    recurrent_type = LFM2ConvBlock
    tensor_names: ClassVar = {"output_norm": "token_embd_norm"}

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Apply a sliding window, which few files have, to every attention layer."""
        n_swa = hp.keys.integer("attention.sliding_window", 0)
        swa = tuple(bool(n_swa) and not is_recurrent for is_recurrent in hp.recurrent)
        return replace(hp, n_swa=n_swa, swa=swa)
