"""Qwen 1 to 3.5, dense and with routed experts, and the text models of their vision models."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from engine.model.architectures.base import CausalLM, HybridLM
from engine.model.architectures.registry import register
from engine.model.forward.operands import SIGMOID
from engine.model.layers.block import Block, TransformerBlock
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.linear import Linear
from engine.model.layers.mixers.attention import QKNormAttention, split_heads
from engine.model.layers.mixers.delta_net import GroupedDeltaNet, TiledDeltaNet
from engine.model.layers.mixers.mixer import Mixer
from engine.model.layers.norm import Rope
from engine.model.sharding.placement import Shard
from engine.model.sharding.split import BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context


@register("qwen2")
class Qwen2(CausalLM):
    """Qwen 2 (arXiv 2407.10671), with biases."""

    traits = Traits(rope_style="neox")
    block_type = TransformerBlock


def with_sections(hp: HParams, *, is_interleaved: bool) -> HParams:
    """Return the sizes with M-RoPE sections, if the file has any."""
    sections = hp.keys.sections()
    rope = replace(hp.rope, sections=sections, is_interleaved=is_interleaved and bool(sections))
    return replace(hp, rope=rope)


@register("qwen2vl")
class Qwen2VL(Qwen2):
    """Text model of Qwen 2-VL and 2.5-VL (arXiv 2409.12191)."""

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        return with_sections(hp, is_interleaved=False)


@register("qwen")
class Qwen1(Qwen2):
    """Qwen 1 (arXiv 2309.16609); `n_ff` in files counts gate and up together."""

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        return replace(hp, n_ff=tuple(n // 2 for n in hp.n_ff))


class Qwen2MoEBlock(TransformerBlock):
    """Llama's block without normalised expert weights."""

    normalises_experts = False


@register("qwen2moe")
class Qwen2MoE(Qwen2):
    """Qwen 1.5 and 2 with routed experts and a gated shared one."""

    block_type = Qwen2MoEBlock


class Qwen3Block(TransformerBlock):
    """Llama's block with query and key norms."""

    mixer_type = QKNormAttention


@register("qwen3", "qwen3moe")
class Qwen3(Qwen2):
    """Qwen 3 (arXiv 2505.09388)."""

    block_type = Qwen3Block


@register("qwen3vl", "qwen3vlmoe")
class Qwen3VL(Qwen3):
    """Text model of Qwen 3-VL; images also add features after the first blocks."""

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        return with_sections(hp, is_interleaved=True)


class QueryGatedAttention(QKNormAttention):
    """Attention with elementwise gates on its heads' outputs (arXiv 2505.06708).

    `attn_q` interleaves the query rows and the gate rows of each head.
    """

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        if self.head_dim_k != self.head_dim_v:
            raise hp.keys.invalid(
                "its gates have {n} elements, but its values have {other}",
                n=self.head_dim_k, other=self.head_dim_v,
            )  # fmt: skip
        n_q = hp.n_head[layer] * self.head_dim_k
        self.attn_q = Linear(hp.n_embd, 2 * n_q, Shard(0, split.heads))

    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        if not ctx.owns(self.split.heads):
            return None
        q, gate = split_heads(self.attn_q(x), 2 * self.head_dim_k).chunk(2, dim=-1)
        k = split_heads(self.attn_k(x), self.head_dim_k)
        v = split_heads(self.attn_v(x), self.head_dim_v)
        q, k = self.rotate(q, k, ctx)
        heads = self.attend(q, k, v, ctx)
        heads = ctx.ops.gated(SIGMOID, ctx.kept(gate), heads)
        return self.attn_output(heads.flatten(-2))


class Qwen3NextBlock(TransformerBlock):
    """Llama's block with gated attention and a different name for the FFN norm."""

    mixer_type: ClassVar[type[Mixer]] = QueryGatedAttention
    tensor_names: ClassVar = {"ffn_norm": "post_attention_norm"}


class Qwen3NextLinearBlock(Qwen3NextBlock):
    """Qwen3-Next's block with linear attention."""

    mixer_type = GroupedDeltaNet


@register("qwen3next")
class Qwen3Next(HybridLM):
    """Qwen3-Next: routed experts and a gated shared one in every layer."""

    traits = Traits(rope_style="neox", is_hybrid=True, recurrent_period=4, mtp_hidden="normed")
    block_type = Qwen3NextBlock
    recurrent_type: ClassVar[type[Block]] = Qwen3NextLinearBlock


class Qwen35LinearBlock(Qwen3NextBlock):
    """Qwen 3.5's block with linear attention; files tile its value heads."""

    mixer_type = TiledDeltaNet


@register("qwen35", "qwen35moe")
class Qwen35(Qwen3Next):
    """Qwen 3.5, dense or with routed experts."""

    recurrent_type = Qwen35LinearBlock

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        return with_sections(super().refine(hp), is_interleaved=True)
