"""Rotary position embedding: its parameters, from a file's metadata.

Two ways to pair the elements of a head exist and the file does not say which; it is a matter of the
architecture: "norm" rotates neighbours (2i, 2i+1), "neox" rotates the halves (i, i + n/2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, floor, log, pi
from typing import TYPE_CHECKING, Literal

from engine.errors import ModelFileError
from engine.layers.module import Module, Slot, TensorSource
from engine.sharding.placement import Replicate

if TYPE_CHECKING:
    from torch import Tensor

    from engine.layers.hparams import HParams
    from engine.layers.keys import Keys

RopeStyle = Literal["norm", "neox"]

SCALING_TYPES = ("none", "linear", "yarn", "longrope")

DEFAULT_BASE = 10000.0
"""The base of the frequencies where a file has none (arXiv 2104.09864)."""

BETA_FAST, BETA_SLOW = 32.0, 1.0
"""YaRN's bounds in rotations; for most architectures, llama.cpp does not read the file's."""


@dataclass(frozen=True, slots=True)
class RopeParams:
    """How positions turn into angles.

    Attributes:
        n_rot: elements of a head that are rotated; the rest passes through.
        style: how elements are paired.
        base: frequencies are base^(-2i / n_rot).
        scale: 1 / the factor by which the context was stretched.
        yarn: blend scaled and unscaled frequencies (YaRN) instead of scaling all (linear).
        n_ctx_orig: context before stretching, in tokens.
        attn_factor: extra factor on cos and sin.
        beta_fast, beta_slow: rotations within the context before stretching; pairs that make more
            than the first are not scaled by YaRN, those that make less than the second fully.
    """

    n_rot: int
    style: RopeStyle
    base: float
    scale: float = 1.0
    yarn: bool = False
    n_ctx_orig: int = 0
    attn_factor: float = 1.0
    beta_fast: float = BETA_FAST
    beta_slow: float = BETA_SLOW

    @classmethod
    def read(cls, keys: Keys, head_dim: int, style: RopeStyle) -> RopeParams:
        """Read the `rope.*` keys of a file.

        A factor without a type means linear scaling, as in llama.cpp.

        Raises:
            ModelFileError: positions are scaled in a way that is not known here.
        """
        kind = keys.text("rope.scaling.type", "linear")
        if kind not in SCALING_TYPES:
            path = keys.meta.path
            message = f"{path.name} scales positions by {kind[:40]!r}, which Tandem cannot do"
            raise ModelFileError(path, f"{message} yet.", "Pick another model.")
        factor = keys.number("rope.scaling.factor", 0.0) or keys.number("rope.scale_linear", 1.0)
        n_ctx_train = keys.integer("context_length", 0)
        return cls(
            n_rot=keys.integer("rope.dimension_count", head_dim),
            style=style,
            base=keys.number("rope.freq_base", DEFAULT_BASE),
            scale=1.0 if kind in ("none", "longrope") or factor == 0 else 1.0 / factor,
            yarn=kind == "yarn",
            n_ctx_orig=keys.integer("rope.scaling.original_context_length", n_ctx_train),
            attn_factor=keys.number("rope.scaling.attn_factor", 1.0),
        )

    def unscaled(self, base: float) -> RopeParams:
        """The same for layers with a sliding window, which need no stretching."""
        return replace(self, base=base, scale=1.0, yarn=False, attn_factor=1.0)

    def yarn_bounds(self) -> tuple[float, float]:
        """Pair indices between which YaRN (arXiv 2309.00071) blends, rounded as in llama.cpp."""

        def pair_of(rotations: float) -> float:
            return self.n_rot * log(self.n_ctx_orig / (rotations * 2 * pi)) / (2 * log(self.base))

        low, high = floor(pair_of(self.beta_fast)), ceil(pair_of(self.beta_slow))
        return max(0, low), min(self.n_rot - 1, high)

    def mscale(self, multiplier: float = 1.0) -> float:
        """YaRN's m(x) = 1 + 0.1 x ln(stretch), by which attention is sharpened; 1 without YaRN."""
        return 1.0 - 0.1 * multiplier * log(self.scale) if self.yarn and self.scale < 1 else 1.0

    def balanced(self, mscale: float, mscale_all: float) -> RopeParams:
        """The same with m(mscale) / m(mscale_all) instead of m(1) on cos and sin."""
        ratio = self.mscale(mscale) / self.mscale(mscale_all)
        return replace(self, attn_factor=self.attn_factor * ratio / self.mscale())

    def magnitude(self) -> float:
        """The factor on cos and sin; YaRN sharpens attention by 0.1 ln(stretch) + 1."""
        return self.attn_factor * (1.0 - 0.1 * log(self.scale) if self.yarn else 1.0)


class Rope(Module):
    """Rotates queries and keys.

    Attributes:
        weight: (n_rot / 2,) divisors of the frequencies (Llama 3's `rope_freqs`), or None.
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
    """Show the divisors of the frequencies that suit the context as `rope_freqs`.

    LongRoPE (arXiv 2402.13753) has some for short and some for long contexts.

    The choice holds for all positions, as in llama.cpp: keys that are in the cache cannot change
    with a sequence that grows.

    Raises:
        InvalidGGUF: one of the two is missing or misshapen.
    """
    both = [f"rope_factors_{length}.weight" for length in ("short", "long")]
    if "rope_freqs.weight" in source or not any(name in source for name in both):
        return
    factors = [source.get(name, (hp.rope.n_rot // 2,)) for name in both]
    source.tensors["rope_freqs.weight"] = factors[hp.n_ctx > hp.rope.n_ctx_orig]
