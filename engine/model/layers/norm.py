"""Norms over the last dimension, for vectors on a single rank or split over several; and RoPE."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from engine.model.forward.operands import NO_SLICE, NormLayer, RopeLayer, RopeParams
from engine.model.layers.module import Module, Slot, TensorSource
from engine.model.sharding.placement import Placement, Replicate, Shard

if TYPE_CHECKING:
    from torch import Tensor

    from engine.model.forward.context import Context
    from engine.model.forward.ops import Ops
    from engine.model.layers.hparams import HParams


class Norm(NormLayer, Module, ABC):
    """Base of the norms.

    Args:
        shape: shape of the weight, (elements,), or (heads, elements) if each head has its own
            weight.
        affine: whether there is a weight (and a bias if the file has one).
        optional: whether a file may omit it; vectors are then unchanged.
    """

    def __init__(
        self, shape: int | tuple[int, ...], eps: float, placement: Placement, *,
        affine: bool = True, optional: bool = False,
    ) -> None:  # fmt: skip
        self.shape = (shape,) if isinstance(shape, int) else shape
        self.eps = eps
        self.placement = placement
        self.affine = affine
        self.optional = optional
        self.n_owners = len(placement.owners())

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        """Locate weight and bias; files call the weight `name.weight` or `name`."""
        if not self.affine:
            return []
        tensor = name if name in source else f"{name}.weight"
        self.is_absent = self.optional and tensor not in source
        if self.is_absent:
            return []
        weight = source.get(tensor, self.shape)
        slots = [Slot(self, "weight", weight, self.placement, is_matrix=False)]
        if f"{name}.bias" in source:
            bias = source.get(f"{name}.bias", self.shape)
            slots.append(Slot(self, "bias", bias, self.placement, is_matrix=False))
        return slots

    def __call__(self, x: Tensor, ctx: Context) -> Tensor:
        """Normalise x (..., n) over vectors that are whole on this rank."""
        if self.is_absent:
            return x
        assert self.weight is not None or not self.affine, NO_SLICE
        normed = ctx.normed(x, self)
        return self.apply(x, ctx.ops) if normed is None else normed

    @abstractmethod
    def apply(self, x: Tensor, ops: Ops) -> Tensor:
        """Apply the formula to x (..., n)."""


class RMSNorm(Norm):
    """RMS norm `x / sqrt(mean(x²) + eps) * weight + bias` (Zhang & Sennrich 2019)."""

    kind = "rms"

    def apply(self, x: Tensor, ops: Ops) -> Tensor:
        return ops.rms_norm(x, self.weight, self.bias, self.eps)

    def sharded(self, x: Tensor | None, ctx: Context) -> Tensor | None:
        """Normalise vectors that are split over the group, with an all-reduce of one number per
        token.

        Collective; a rank without a slice of x (T, this rank's elements) passes None and gets None.
        Elements that several ranks hold (key-value heads) count once. If one rank holds all
        elements, nothing is reduced.
        """
        if self.n_owners == 1:
            return None if x is None else self.apply(x, ctx.ops)
        assert isinstance(self.placement, Shard)
        (ranges,) = self.placement.segments
        n = self.shape[0]
        squares = None
        if x is not None:
            mine, factor = ranges.first_held(ctx.rank), n // ranges.total
            own = x[..., mine.start * factor : mine.stop * factor]
            squares = own.square().sum(-1, keepdim=True)
        mean = ctx.all_reduce(squares, n=1) / n
        if x is None or self.weight is None:
            return None
        scaled: Tensor = x * (mean + self.eps).rsqrt() * self.weight
        return scaled if self.bias is None else scaled + self.bias


class LayerNorm(Norm):
    """Layer norm `(x - mean) / sqrt(variance + eps) * weight + bias` (Ba et al. 2016)."""

    kind = "layer"

    def apply(self, x: Tensor, ops: Ops) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


class Rope(RopeLayer, Module):
    """Rotation of queries and keys by their positions."""

    def __init__(self, params: RopeParams, group: tuple[int, ...]) -> None:
        self.params = params
        self.placement = Replicate(group)

    def bind(self, source: TensorSource, name: str = "") -> list[Slot]:
        if f"{name}.weight" not in source:
            return []
        factors = source.get(f"{name}.weight", (self.params.n_rot // 2,))
        return [Slot(self, "weight", factors, self.placement, is_matrix=False)]


def choose_rope_factors(source: TensorSource, hp: HParams) -> None:
    """Select LongRoPE's frequency divisors for the model's context, as `rope_freqs`.

    LongRoPE (arXiv 2402.13753) has divisors for short and for long contexts. As in llama.cpp, the
    choice applies to all positions, because cached keys cannot change while a sequence grows.

    Raises:
        InvalidGGUF: one of the two is missing or misshapen.
    """
    names = [f"rope_factors_{length}.weight" for length in ("short", "long")]
    if "rope_freqs.weight" in source or not any(name in source for name in names):
        return
    factors = [source.get(name, (hp.rope.n_rot // 2,)) for name in names]
    source.tensors["rope_freqs.weight"] = factors[hp.n_ctx > hp.rope.n_ctx_orig]
