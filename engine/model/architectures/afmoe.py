"""AFMoE, Arcee's Trinity: gated attention, norms around each part, many experts."""

from __future__ import annotations

from engine.model.architectures.base import EachFourthNoPELM, SqrtScaledLM
from engine.model.architectures.registry import register
from engine.model.layers.block import SandwichBlock
from engine.model.layers.hparams import Traits
from engine.model.layers.mixers.gated_attention import GatedAttention


class AfmoeBlock(SandwichBlock):
    """A block with a gate for each element of a head, and experts scored one by one."""

    mixer_type = GatedAttention
    gating = "sigmoid"
    normalises_experts = False


@register("afmoe")
class Afmoe(EachFourthNoPELM, SqrtScaledLM):
    """Trinity: every fourth layer sees the whole context; embedding scaled by sqrt(n_embd)."""

    traits = Traits(rope_style="neox", swa_period=4)
    block_type = AfmoeBlock
