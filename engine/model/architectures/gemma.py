"""Gemma: scaled embeddings, GELU, norms around each part, capped scores and logits.

Gemma 4 is dense, has routed experts next to a dense FFN, or has per-layer embeddings (E2B, E4B).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from engine.model.architectures.base import SqrtScaledLM, SwaRopeLM
from engine.model.architectures.registry import register
from engine.model.forward.operands import GELU, Addend, RopeParams, Scores
from engine.model.layers.block import (
    SIDE,
    Block,
    PerLayerEmbedding,
    PerLayerGate,
    SandwichBlock,
    TransformerBlock,
    per_layer_width,
)
from engine.model.layers.ffn import FFN, MoE, read_routing
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.linear import Linear, Vector
from engine.model.layers.mixers.attention import Attention, QKNormAttention
from engine.model.layers.mixers.mixer import Mixer
from engine.model.layers.mixers.shared_kv import (
    NormedAttention,
    SharedKVAttention,
    check_kv_sources,
    kv_source,
    share_caches,
)
from engine.model.layers.module import Slot, TensorSource
from engine.model.layers.norm import RMSNorm, Rope
from engine.model.sharding.placement import Replicate
from engine.model.sharding.split import BlockSplit, ModelSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context


class GemmaLM(SwaRopeLM, SqrtScaledLM):
    """A Gemma model: scaled embedding, logits z soft-capped to softcap × tanh(z / softcap).

    Norms multiply by one plus their weight; the weights in files already include the one.
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
    """Return 1 / sqrt(head_dim); the 27B models use n_embd / n_head instead of head_dim."""
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
    """Gemma 2 (arXiv 2408.00118); early files omit the caps and the window, which are the same in
    all sizes."""

    traits = Traits(rope_style="neox", swa_period=2, n_swa=4096)
    block_type = Gemma2Block
    softcap = 30.0

    @classmethod
    def swa_rope(cls, hp: HParams) -> RopeParams:
        return hp.rope


class Gemma3Attention(QKNormAttention):
    """Attention with query and key norms instead of capped scores."""

    def make_scores(self) -> Scores:
        scale = score_scale(self.hp, self.layer, n_layer_27b=62)
        return replace(super().make_scores(), scale=scale)


class Gemma3Block(SandwichBlock):
    """A block with norms before and after each part, and query and key norms."""

    mixer_type = Gemma3Attention
    act = GELU


@register("gemma3")
class Gemma3(GemmaLM):
    """Gemma 3 (arXiv 2503.19786), MedGemma, and Rnj-1, which has no windows."""

    traits = Traits(rope_style="neox", swa_period=6)
    block_type = Gemma3Block


class ScaledRouter(Linear):
    """A router that first multiplies its input by a vector."""

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        weight = source.get(f"{name}.weight", self.shape)
        scale = source.get(f"{name}.scale", self.shape[1:])
        return [
            Slot(self, "weight", weight, self.placement, is_matrix=True),
            Slot(self, "scale", scale, self.placement, is_matrix=False),
        ]

    def __call__(self, x: Tensor) -> Tensor:
        assert self.weight is not None, "a rank outside the group must not call it"
        assert self.scale is not None, "set together with the weight"
        return self.weight.matmul(x * self.scale)


class Gemma4MoE(MoE):
    """Routed experts that read the residual stream through their own norms, one for the router."""

    def __init__(self, hp: HParams, split: BlockSplit, layer: int) -> None:
        super().__init__(hp, split, layer, read_routing(hp), GELU)
        if self.shared is not None:
            raise hp.keys.invalid("it has shared experts in addition to a dense FFN")
        everyone = Replicate(split.group)
        self.ffn_gate_inp = ScaledRouter(hp.n_embd, hp.n_expert, everyone)
        self.router_norm = RMSNorm(hp.n_embd, hp.norm_eps, everyone, affine=False)
        self.pre_ffw_norm_2 = RMSNorm(hp.n_embd, hp.norm_eps, everyone)

    def __call__(self, x: Tensor, ctx: Context) -> Tensor | None:
        router_input = self.router_norm(x, ctx) * x.shape[-1] ** -0.5
        return self.routed(self.pre_ffw_norm_2(x, ctx), router_input, ctx)


class Gemma4Block(SandwichBlock):
    """Gemma 2's block with a per-layer input, added last, and a scale on the sum.

    If there are experts, their output and the dense FFN's have separate norms but share an
    all-reduce.
    """

    mixer_type: ClassVar[type[Mixer]] = NormedAttention
    act = GELU

    def __init__(self, hp: HParams, split: BlockSplit, layer: int, rope: Rope | None) -> None:
        super().__init__(hp, split, layer, rope)
        self.gate = PerLayerGate(hp, split, layer) if per_layer_width(hp) else None
        self.layer_output_scale = Vector((1,), Replicate(split.group), optional=True)
        self.experts: Gemma4MoE | None = None
        if hp.n_ff_exp[layer]:
            self.experts = Gemma4MoE(hp, split, layer)
            self.post_ffw_norm_1 = self.norm()
            self.post_ffw_norm_2 = self.norm()

    def make_ffn(self) -> FFN:
        return self.make_dense()

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        x = ctx.all_reduce_add(x, self.mix(x, ctx), self.ffn_norm)
        last = self.feed(x, ctx)
        if self.gate is not None:
            x = ctx.all_reduce_add(x, last)
            last = self.gate(x, ctx)
        return ctx.all_reduce_add(
            x, last._replace(sum_scale=self.layer_output_scale.value), self.next_norm
        )

    def feed(self, x: Tensor, ctx: Context) -> Addend:
        if self.experts is None:
            return super().feed(x, ctx)
        parts = self.ffn(self.ffn_norm(x, ctx), ctx), self.experts(x, ctx)
        joined = None
        if any(part is not None for part in parts):
            joined = ctx.ops.concat(*(x.new_zeros(x.shape) if p is None else p for p in parts))
        dense, routed = ctx.all_reduce(joined, n=2 * x.shape[-1]).chunk(2, dim=-1)
        if self.ffn.bias is not None:
            dense = dense + self.ffn.bias
        y = self.post_ffw_norm_1(dense, ctx) + self.post_ffw_norm_2(routed, ctx)
        return Addend(y, norm=self.post_ffw_norm, is_whole=True)


class Gemma4SharedBlock(Gemma4Block):
    """A block that reuses the keys and values of an earlier one."""

    mixer_type = SharedKVAttention


@register("gemma4")
class Gemma4(GemmaLM):
    """Gemma 4 (Google 2026); sliding-window layers have smaller heads."""

    traits = Traits(rope_style="neox", swa_period=6)
    block_type = Gemma4Block

    def __init__(self, hp: HParams, split: ModelSplit) -> None:
        super().__init__(hp, split)
        self.inputs = PerLayerEmbedding(hp, split.embedding) if per_layer_width(hp) else None
        share_caches(hp, [block.mixer for block in self.blk if isinstance(block, Gemma4Block)])

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Check the sliding-window pattern and the shared keys and values.

        Raises:
            InvalidGGUF: the pattern is missing, keys and values differ in size, or a layer cannot
                share them.
        """
        hp = super().refine(hp)
        if "attention.sliding_window_pattern" not in hp.keys:
            raise hp.keys.invalid("it does not specify which layers have a sliding window")
        if hp.head_dim_k != hp.head_dim_v:
            raise hp.keys.invalid("its key and value heads differ in size")
        check_kv_sources(hp)
        return hp

    @classmethod
    def block_for(cls, hp: HParams, layer: int) -> type[Block]:
        return Gemma4Block if kv_source(hp, layer) == layer else Gemma4SharedBlock

    @classmethod
    def adapt(cls, source: TensorSource, hp: HParams) -> None:
        """Accept unused key and value tensors, which some files keep from their checkpoints."""
        super().adapt(source, hp)
        for layer in range(hp.n_layer):
            if kv_source(hp, layer) != layer:
                unread = ("attn_k", "attn_v", "attn_k_norm")
                source.used |= {f"blk.{layer}.{name}.weight" for name in unread}

    def embed(self, ids: Tensor, ctx: Context) -> Tensor | None:
        """Return the embeddings, and broadcast the per-layer inputs to all ranks along with them.

        The per-layer inputs are computed from image features if a token belongs to an image.
        """
        x = ctx.with_images(super().embed(ids, ctx))
        if self.inputs is None:
            return x
        inputs = self.inputs(ids, x, ctx)
        joined = None if x is None or inputs is None else ctx.ops.concat(x, inputs)
        joined = ctx.enter(joined, self.split.used)
        if joined is None:
            return None
        n_embd = self.hp.n_embd
        ctx.side[SIDE] = joined[:, n_embd:]
        return joined[:, :n_embd]
