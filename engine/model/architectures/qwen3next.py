"""Qwen3-Next and Qwen 3.5: three layers of linear attention to one of gated softmax attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from engine.model.architectures.base import HybridLM
from engine.model.architectures.qwen import with_sections
from engine.model.architectures.registry import register
from engine.model.forward.operands import SIGMOID
from engine.model.layers.block import Block, TransformerBlock
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.linear import Linear
from engine.model.layers.mixers.attention import QKNormAttention, split_heads
from engine.model.layers.mixers.delta_net import GroupedDeltaNet, TiledDeltaNet
from engine.model.layers.mixers.mixer import Mixer
from engine.model.layers.rope import Rope
from engine.model.sharding.placement import Shard
from engine.model.sharding.split import BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context


class QueryGatedAttention(QKNormAttention):
    """Attention whose heads' outputs are gated element by element (arXiv 2505.06708).

    The rows of `attn_q` are, head by head, those of the query and those of its gate.
    """

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        if self.head_dim_k != self.head_dim_v:
            raise hp.keys.invalid(
                f"its gates have {self.head_dim_k} elements and its values {self.head_dim_v}"
            )
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
    """Llama's block with gated attention and another name of the FFN's norm."""

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
    """Qwen 3.5's block with linear attention, whose value heads are tiled in the file."""

    mixer_type = TiledDeltaNet


@register("qwen35", "qwen35moe")
class Qwen35(Qwen3Next):
    """Qwen 3.5, dense or with routed experts."""

    recurrent_type = Qwen35LinearBlock

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        return with_sections(super().refine(hp), is_interleaved=True)
