"""AFMoE, Arcee's Trinity: gated attention, norms around each part, many experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.layers.gated_attention import GatedAttention
from engine.layers.hparams import Traits
from engine.layers.moe import Routing
from engine.models.nope import NoPELM
from engine.models.registry import register
from engine.models.sandwich import SandwichBlock

if TYPE_CHECKING:
    from torch import Tensor

    from engine.context import Context


class AfmoeBlock(SandwichBlock):
    """Each element of a head has a gate; each expert is scored by itself."""

    mixer_type = GatedAttention

    def routing(self) -> Routing:
        return Routing.read(self.hp, "sigmoid", normalise=False)


@register("afmoe")
class Afmoe(NoPELM):
    """Each fourth layer sees the whole context; the embedding is multiplied by sqrt(n_embd)."""

    traits = Traits(rope_style="neox", swa_period=4)
    block_type = AfmoeBlock

    def embed(self, ids: Tensor, ctx: Context) -> Tensor | None:
        x = super().embed(ids, ctx)
        return None if x is None else x * self.hp.n_embd**0.5
