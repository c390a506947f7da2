"""Nemotron 3 and 4, Minitron: GPT-2's block with squared ReLU and RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from engine.model.architectures.base import CausalLM
from engine.model.architectures.gpt import GPT2Block
from engine.model.architectures.registry import register
from engine.model.forward.operands import RELU2, Activation, Routing
from engine.model.layers.block import Block, FFNBlock, MixerBlock, TransformerBlock
from engine.model.layers.ffn import MoE
from engine.model.layers.hparams import HParams, Traits
from engine.model.layers.linear import Linear
from engine.model.layers.mixers.mamba import Mamba2
from engine.model.layers.module import TensorSource
from engine.model.sharding.placement import Replicate, Shard
from engine.model.sharding.shares import Ranges
from engine.model.sharding.split import BlockSplit

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context


class NemotronBlock(GPT2Block):
    """GPT-2's block with squared ReLU; files already add one to norm weights."""

    act = RELU2


@register("nemotron")
class Nemotron(CausalLM):
    """Nemotron (arXiv 2402.16819)."""

    traits = Traits(rope_style="neox", norm_eps="layer")
    block_type = NemotronBlock


class LatentMoE(MoE):
    """Routed experts in a narrower space than the router and the shared expert (Nemotron 3).

    The up-projection is linear, so each rank applies it to its own partial sum.
    """

    def __init__(
        self, hp: HParams, split: BlockSplit, layer: int, routing: Routing, act: Activation,
        width: int,
    ) -> None:  # fmt: skip
        super().__init__(hp, split, layer, routing, act, is_gated=False, width=width)
        owners = split.experts.owners()
        all_columns = Ranges(
            tuple((0, width if rank in owners else 0) for rank in range(len(split.experts.spans))),
            width,
        )
        self.ffn_latent_down = Linear(hp.n_embd, width, Replicate(owners))
        self.ffn_latent_up = Linear(width, hp.n_embd, Shard(1, all_columns), split.group)

    @property
    def bias(self) -> Tensor | None:
        return self.ffn_latent_up.bias

    def routed(self, x: Tensor, router_input: Tensor, ctx: Context) -> Tensor | None:
        if not ctx.owns(self.columns):
            return None
        total = super().routed(self.ffn_latent_down(x), router_input, ctx)
        return None if total is None else self.ffn_latent_up(total)


class NemotronHMambaBlock(MixerBlock):
    """A block with Mamba 2 only."""

    mixer_type = Mamba2


class NemotronHFFNBlock(FFNBlock):
    """A block with only an ungated FFN or experts, with squared ReLU."""

    tensor_names: ClassVar[Mapping[str, str]] = {"ffn_norm": "attn_norm"}
    act = RELU2
    is_gated = False
    gating = "sigmoid"
    normalises_experts = False

    def make_experts(self) -> MoE:
        width = self.hp.keys.integer("moe_latent_size", 0)
        if not width:
            return super().make_experts()
        return LatentMoE(self.hp, self.split, self.layer, self.routing(), self.act, width)


class NemotronHMTPBlock(NemotronHFFNBlock, TransformerBlock):
    """The MTP block: attention, then an FFN or routed experts (Nemotron 3)."""

    tensor_names: ClassVar = {"ffn_norm": "post_attention_norm"}


@register("nemotron_h", "nemotron_h_moe")
class NemotronH(CausalLM):
    """Nemotron-H (arXiv 2504.03624), without RoPE."""

    traits = Traits(rope_style=None, is_hybrid=True, mtp_hidden="normed")
    block_type = MixerBlock

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Mark layers with neither key-value heads nor an FFN as recurrent."""
        has_ffn = [dense or routed for dense, routed in zip(hp.n_ff, hp.n_ff_exp, strict=True)]
        return replace(
            hp,
            recurrent=tuple(
                n_kv == 0 and not ffn for n_kv, ffn in zip(hp.n_head_kv, has_ffn, strict=True)
            ),
        )

    @classmethod
    def adapt(cls, source: TensorSource, hp: HParams) -> None:
        """Accept the FFN norm of the MTP block under the name that most models use."""
        super().adapt(source, hp)
        for layer in range(hp.n_trunk, hp.n_layer):
            norm = source.tensors.get(f"blk.{layer}.ffn_norm.weight")
            name = f"blk.{layer}.post_attention_norm.weight"
            if norm is not None and name not in source:
                source.add_name(norm, name)

    @classmethod
    def block_for(cls, hp: HParams, layer: int) -> type[Block]:
        if layer >= hp.n_trunk:
            return NemotronHMTPBlock
        if hp.recurrent[layer]:
            return NemotronHMambaBlock
        if hp.n_ff[layer] or hp.n_ff_exp[layer]:
            return NemotronHFFNBlock
        return cls.block_type
