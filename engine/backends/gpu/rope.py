"""Rotary position embedding (RoPE) by kernels: the angles of a pass, and rotated heads."""

from __future__ import annotations

from collections.abc import Sequence
from math import tau
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.backends.gpu.elementwise import power_of_two
from engine.backends.gpu.kernels import rope as kernels
from engine.backends.gpu.launch.kernel_launch import launch
from engine.backends.gpu.launch.refusals import refusable
from engine.backends.reference.ops import frequencies

if TYPE_CHECKING:
    from engine.model.forward.operands import RopeParams
    from engine.model.forward.ops import NormLayer

LONGEST_HEAD = 1 << 12
"""Most elements of a head that one program holds."""

TURNED = 1 << 9
"""Pairs of elements that one program rotates."""


class Angles:
    """Computes cosines and sines of positions in the device's memory.

    One kernel computes them anew in each pass: a table of all positions would take 64 MiB for
    heads of 128 elements and a context of 131072.
    """

    def __init__(self) -> None:
        self._turns: dict[tuple[RopeParams, int, torch.device], tuple[Tensor | None, Tensor]] = {}

    def __call__(
        self, params: RopeParams, factors: Tensor | None, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute `Ops.rope_angles`: two of (T, 1, n_rot / 2), for positions (T,)."""
        turns = self._turns_of(params, factors, positions.device)
        n_tokens, n_pairs = positions.shape[0], turns.shape[0]
        cos, sin = (torch.empty(n_tokens, 1, n_pairs, device=positions.device) for _ in range(2))
        launch(
            kernels.angles, (n_tokens,), turns, positions, cos, sin, n_pairs, params.magnitude(),
            num_warps=2, SIZE=power_of_two(n_pairs),
        )  # fmt: skip
        return cos, sin

    def _turns_of(self, params: RopeParams, factors: Tensor | None, device: torch.device) -> Tensor:
        """Return the turns by which each pair rotates per position: F64, (n_rot / 2,)."""
        key = params, id(factors), device
        if key not in self._turns:
            self._turns[key] = factors, frequencies(params, factors, device) / tau
        return self._turns[key][1]


def rope(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor | None:
    """Apply RoPE to one tensor, see `rope_all`."""
    turned = rope_all((x,), cos, sin, style)
    return None if turned is None else turned[0]


@refusable
def rope_all(
    xs: Sequence[Tensor], cos: Tensor, sin: Tensor, style: str, norms: Sequence[NormLayer] = ()
) -> tuple[Tensor, ...] | None:
    """Apply RoPE to one or two tensors (T, heads, head_dim), such as q and k, in one launch.

    Args:
        norms: the norm that each tensor goes through first, if any.

    Returns:
        None where the kernel does not support the arguments.
    """
    n_tokens, _, dim = xs[0].shape
    n_pairs = cos.shape[-1]
    for x in xs:
        if x.shape[0] != n_tokens or x.shape[2] != dim or not _is_plain(x):
            return None
    for x in (cos, sin):
        if not _is_plain(x) or not x.is_contiguous():
            return None
    if dim > LONGEST_HEAD or 2 * n_pairs > dim:
        return None
    weights = [(xs[0], 0.0)] * 2  # placeholders without norms
    if norms:
        found = [_weight(norm, dim) for norm in norms]
        weights = [
            (weight, norm.eps)
            for weight, norm in zip(found, norms, strict=True)
            if weight is not None
        ]
        if len(weights) < len(xs):
            return None
    pairs, rest = power_of_two(n_pairs), dim - 2 * n_pairs
    heads = max(1, TURNED // pairs)
    turned = tuple([torch.empty(x.shape, device=x.device) for x in xs])
    n_blocks = [-(-x.shape[1] // heads) for x in xs]
    q, k = xs[0], xs[-1]
    launch(
        kernels.rotate, (n_tokens, sum(n_blocks)),
        q, q.stride(0), q.stride(1), turned[0], q.shape[1], *weights[0],
        k, k.stride(0), k.stride(1), turned[-1], k.shape[1], *weights[-1],
        cos, sin, n_pairs, dim, n_blocks[0],
        HAS_NORM=bool(norms), IS_NEOX=style == "neox", HEADS=heads, PAIRS=pairs,
        REST=power_of_two(rest) if rest else 0,
    )  # fmt: skip
    return turned


def _weight(norm: NormLayer, dim: int) -> Tensor | None:
    """Return the weight of an RMS norm (head_dim,) without bias; None of norms of other kinds."""
    weight = None if norm.is_absent or norm.kind != "rms" or norm.bias is not None else norm.weight
    return weight if weight is not None and weight.shape == (dim,) and _is_plain(weight) else None


def _is_plain(x: Tensor) -> bool:
    """Return whether x is F32, not empty, and its rows have no gaps."""
    return x.dtype == torch.float32 and x.numel() > 0 and x.stride(-1) == 1
