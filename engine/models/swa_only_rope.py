"""Models of which only the layers with a sliding window know positions."""

from __future__ import annotations

from engine.layers.hparams import HParams
from engine.layers.rope import Rope
from engine.models.base import CausalLM


class SwaOnlyRopeLM(CausalLM):
    """The other layers see the whole context and do not rotate (arXiv 2501.18795)."""

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Make sure that there are positions at all.

        Raises:
            InvalidGGUF: the file does not say how long the windows are.
        """
        hp.require_windows()
        return hp

    def rope_of(self, layer: int) -> Rope | None:
        return self.rope_freqs if self.hp.swa[layer] else None
