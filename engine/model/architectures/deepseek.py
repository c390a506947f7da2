"""DeepSeek V2 and V3 and related families: latent attention, routed and shared experts.

Mistral 4, dots.llm1, Ling, MiniCPM 3, Kimi Linear, GLM 4 and GLM 4.5 to 4.7.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from engine.model.architectures.base import CausalLM, HybridLM
from engine.model.architectures.granite import MiniCPM, MiniCPMBlock
from engine.model.architectures.registry import register
from engine.model.forward.operands import Routing, Scores
from engine.model.layers.block import SandwichBlock, TransformerBlock
from engine.model.layers.ffn import read_routing
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.mixers.attention import QKNormAttention, Temperature
from engine.model.layers.mixers.delta_net import KimiDeltaAttention
from engine.model.layers.mixers.mixer import Mixer
from engine.model.layers.mixers.mla import LatentAttention
from engine.model.layers.norm import Rope
from engine.model.sharding.split import BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context


def mscale_of_all(hp: HParams) -> float:
    """Return YaRN's `mscale_all_dim`, which files store divided by 10; 0 if absent."""
    return 10 * hp.keys.number("rope.scaling.yarn_log_multiplier", 0.0)


class DeepSeekAttention(LatentAttention):
    """Latent attention in which YaRN sharpens whole heads, not only their rotated elements."""

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.temperature = Temperature.read(hp)

    def make_scores(self) -> Scores:
        sharper = self.hp.rope.mscale(mscale_of_all(self.hp))
        return Scores(super().make_scores().scale * sharper**2)

    def adjust(self, q: Tensor, ctx: Context) -> Tensor:
        return q if self.temperature is None else self.temperature.apply(q, ctx)


class DeepSeek2Block(TransformerBlock):
    """DeepSeek's block.

    V2 files do not state the expert gating; files with a selection bias use V3's.
    """

    mixer_type = DeepSeekAttention

    def routing(self) -> Routing:
        is_biased = self.hp.has(self.layer, "exp_probs_b.bias")
        return read_routing(self.hp, "sigmoid" if is_biased else "softmax", normalise=False)


@register("deepseek2")
class DeepSeek2(CausalLM):
    """DeepSeek V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437).

    Also Moonlight, Kimi K2, GLM 4.7 Flash and Mistral Large 3.
    """

    traits = Traits(mtp_hidden="normed")
    block_type = DeepSeek2Block

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        mscale = mscale_of_all(hp)
        return replace(hp, rope=hp.rope.balanced(mscale, mscale)) if mscale else hp


@register("mistral4")
class Mistral4(DeepSeek2):
    """Mistral 4: DeepSeek V3 with an `mscale` of 1, regardless of `mscale_all_dim`."""

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        mscale = mscale_of_all(hp)
        return replace(hp, rope=hp.rope.balanced(1.0, mscale)) if mscale else hp


class SigmoidRoutedBlock(TransformerBlock):
    """A block with query and key norms and experts; sigmoid gating is the default."""

    mixer_type = QKNormAttention
    gating = "sigmoid"
    normalises_experts = False


@register("dots1", "hy_v3")
class SigmoidRoutedMoE(CausalLM):
    """dots.llm1 (arXiv 2506.05767), Hunyuan 3."""

    traits = Traits(rope_style="neox")
    block_type = SigmoidRoutedBlock


@register("bailingmoe2")
class BailingMoE2(SigmoidRoutedMoE):
    """Ling and Ring 2.0 (arXiv 2510.22115)."""

    traits = Traits(rope_style="neox", mtp_hidden="normed")


class MiniCPM3Block(MiniCPMBlock):
    """MiniCPM's block with latent attention; files fuse its key and value projections."""

    mixer_type = LatentAttention


@register("minicpm3")
class MiniCPM3(MiniCPM):
    """MiniCPM 3, with MiniCPM's scale factors, which its files omit."""

    traits = Traits(rope_style="neox")
    block_type = MiniCPM3Block

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Set the size of value heads, which divide the width evenly, unlike key heads."""
        value = hp.keys.integer("attention.value_length", hp.n_embd // hp.n_head[0])
        return replace(hp, head_dim_v=(value,) * hp.n_layer)


class KimiBlock(TransformerBlock):
    """A block with latent attention and experts, with DeepSeek V3's gating."""

    mixer_type: ClassVar[type[Mixer]] = LatentAttention
    gating = "sigmoid"


class KimiLinearBlock(KimiBlock):
    """Kimi's block with linear attention (KDA) instead of latent attention."""

    mixer_type = KimiDeltaAttention


@register("kimi-linear")
class KimiLinear(HybridLM):
    """Kimi Linear (arXiv 2510.26692)."""

    traits = Traits(rope_style=None, is_hybrid=True)
    block_type = KimiBlock
    recurrent_type = KimiLinearBlock


@register("glm4")
class Glm4(CausalLM):
    """GLM 4 (arXiv 2406.12793); biases are optional."""

    block_type = SandwichBlock

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Use NeoX-style RoPE for the vision models, whose files store q and k for M-RoPE."""
        sections = hp.keys.integers("rope.dimension_sections", 2, (0, 0))
        return replace(hp, rope=replace(hp.rope, style="neox")) if all(sections) else hp


class Glm4MoEBlock(SigmoidRoutedBlock):
    """A block with routed experts; GLM 4.5 Air and Solar Open have no query and key norms."""

    tensor_names: ClassVar = {"ffn_norm": "post_attention_norm"}


@register("glm4moe")
class Glm4MoE(CausalLM):
    """GLM 4.5 to 4.7 (arXiv 2508.06471); also Solar Open."""

    traits = Traits(rope_style="neox", mtp_hidden="normed")
    block_type = Glm4MoEBlock
