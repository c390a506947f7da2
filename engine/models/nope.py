"""Models of which some layers do not rotate positions (RNoPE, arXiv 2501.18795)."""

from __future__ import annotations

from engine.layers.rope import Rope
from engine.models.base import CausalLM

PERIOD = 4
"""Each so-many-th layer is one; no key says it."""


class NoPELM(CausalLM):
    """Each fourth layer does not rotate."""

    def rope_of(self, layer: int) -> Rope | None:
        return None if layer % PERIOD == PERIOD - 1 else super().rope_of(layer)
