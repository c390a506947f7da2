"""Rotary position embedding (RoPE) of queries and keys.

Two ways to pair the elements of a head exist. The file does not say which, it depends on the
architecture: "norm" rotates neighbours (2i, 2i+1), "neox" rotates the halves (i, i + n/2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.model.forward.operands import RopeParams
from engine.model.layers.module import Module, Slot, TensorSource
from engine.model.sharding.placement import Replicate

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.layers.hparams import HParams


class Rope(Module):
    """Rotation of queries and keys by their positions.

    Attributes:
        weight: divisors of the frequencies (Llama 3's `rope_freqs`), (n_rot / 2,), or None.
    """

    weight: Tensor | None = None

    def __init__(self, params: RopeParams, group: tuple[int, ...]) -> None:
        self.params = params
        self.placement = Replicate(group)

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        if f"{name}.weight" not in source:
            return []
        factors = source.get(f"{name}.weight", (self.params.n_rot // 2,))
        return [Slot(self, "weight", factors, self.placement, is_matrix=False)]


def choose_rope_factors(source: TensorSource, hp: HParams) -> None:
    """Choose LongRoPE's divisors of the frequencies for the model's context, as `rope_freqs`.

    LongRoPE (arXiv 2402.13753) has divisors for short and for long contexts. The choice holds for
    all positions, as in llama.cpp: cached keys cannot change while a sequence grows.

    Raises:
        InvalidGGUF: one of the two is missing or misshapen.
    """
    names = [f"rope_factors_{length}.weight" for length in ("short", "long")]
    if "rope_freqs.weight" in source or not any(name in source for name in names):
        return
    factors = [source.get(name, (hp.rope.n_rot // 2,)) for name in names]
    source.tensors["rope_freqs.weight"] = factors[hp.n_ctx > hp.rope.n_ctx_orig]
