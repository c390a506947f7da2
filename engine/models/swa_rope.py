"""Models whose layers with a sliding window rotate positions by frequencies of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from engine.layers.hparams import HParams
from engine.layers.rope import Rope, RopeParams
from engine.models.base import CausalLM


class SwaRopeLM(CausalLM):
    """Layers with a window need no stretching; `rope_freqs` serves only the others.

    Attributes:
        swa_base: the base of their frequencies where the file has none.
    """

    swa_base: ClassVar[float] = 10000.0

    @classmethod
    def swa_rope(cls, hp: HParams) -> RopeParams:
        """The rotation of the layers with a window."""
        rope = hp.rope.unscaled(hp.keys.number("rope.freq_base_swa", cls.swa_base))
        return replace(rope, n_rot=hp.keys.integer("rope.dimension_count_swa", rope.n_rot))

    @classmethod
    def refine(cls, hp: HParams) -> HParams:
        """Both kinds of layers may have heads of their own size, which rotations must fit.

        Raises:
            InvalidGGUF: more elements are rotated than there are.
        """
        n_rot = {True: cls.swa_rope(hp).n_rot, False: hp.rope.n_rot}
        for is_swa, head_dim in zip(hp.swa, hp.head_dim_k, strict=True):
            if n_rot[is_swa] % 2 or n_rot[is_swa] > head_dim:
                raise hp.keys.invalid(
                    f"it rotates {n_rot[is_swa]} of the {head_dim} elements of a head"
                )
        return hp

    def make_ropes(self) -> None:
        self.rope_swa = Rope(self.swa_rope(self.hp), self.split.used)

    def rope_of(self, layer: int) -> Rope:
        return self.rope_swa if self.hp.swa[layer] else self.rope_freqs
