"""Elementwise operations and norms between matrix products, computed by kernels.

Each function returns None if its kernel does not support the arguments: tensors that are not F32,
or whose rows have gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod, tau
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from engine.backends.gpu.kernels import elementwise as kernels
from engine.backends.gpu.launch.configs import refusable
from engine.backends.gpu.launch.kernel_launch import FixedConstants, launch
from engine.backends.gpu.quantised import N_COUNTERS, allocate_rows_like, attach_rows
from engine.model.forward.batch import SMALL_BATCH
from engine.model.forward.ops import frequencies

if TYPE_CHECKING:
    from engine.model.forward.operands import Activation, Addend, NormLayer, RopeParams

MAX_ROW = 1 << 14  # max. elements in one program: 16 for each of 1024 threads
BLOCK = 1 << 10  # elements per program in operations without reductions
UNIT = 4  # elements per vector load, if sizes, strides and offsets are multiples of it
MAX_HEAD = 1 << 12  # max. elements of a head in one program
TURNED = 1 << 9  # pairs of elements that each program rotates


class RowLayout(NamedTuple):
    """Sizes and strides of a tensor (n_token, n_head, n) with a contiguous last dimension."""

    n_token: int
    n_head: int
    n: int
    token_stride: int
    head_stride: int

    @property
    def number(self) -> int:
        """Number of rows."""
        return self.n_token * self.n_head


@refusable
def rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor | None:
    """Compute `Ops.rms_norm` for x (..., n), with weights (n,) or (n_head, n)."""
    return _norm("rms", x, weight, bias, eps)


@refusable
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor | None:
    """Compute `Ops.layer_norm`; shapes as in `rms_norm`."""
    return _norm("layer", x, weight, bias, eps)


@refusable
def l2_norm(x: Tensor, eps: float) -> Tensor | None:
    """Compute `Ops.l2_norm`."""
    return _norm("l2", x, None, None, eps)


@refusable
def add_norm(
    x: Tensor, addend: Addend, norm_of: NormLayer | None, x_bytes: int | None = None
) -> tuple[Tensor, Tensor | None] | None:
    """Compute `Ops.add_norm` in one kernel.

    Args:
        x_bytes: bytes per number in a quantised activation, if a few normed rows are also quantised
            for the next product.
    """
    if addend.partial is None:
        return None
    found = add_norm_launch(x, addend.partial, addend, norm_of, x_bytes)
    if found is None:
        return None
    n_rows = x.numel() // x.shape[-1]
    launch(kernels.add_norm, (n_rows,), *found.arguments, num_warps=found.num_warps,
           fixed=found.constants)  # fmt: skip
    return found.result


class AddNormLaunch(NamedTuple):
    """Launch parameters of a kernel like `kernels.add_norm`.

    Attributes:
        arguments: the kernel's first arguments.
        result: the result of `add_norm`, which the kernel writes.
    """

    arguments: tuple[Tensor | int | float, ...]
    num_warps: int
    constants: FixedConstants
    result: tuple[Tensor, Tensor | None]


def add_norm_launch(
    x: Tensor, delta: Tensor | None, addend: Addend, norm_of: NormLayer | None,
    x_bytes: int | None = None, smallest: int = 1,
) -> AddNormLaunch | None:  # fmt: skip
    """Return the launch parameters for `add_norm`, or None if its kernel does not apply.

    Args:
        delta: replaces the addend's partial sum; None if the kernel gets it elsewhere.
        smallest: minimum number of elements per program.
    """
    n, factor = x.shape[-1], addend.sum_scale
    inner = None if addend.norm is None or addend.norm.is_absent else addend.norm
    outer = None if norm_of is None or norm_of.is_absent else norm_of
    vectors = [addend.bias, None, None, None, None]
    if inner:
        vectors[1:3] = inner.weight, inner.bias
    if outer:
        vectors[3:5] = outer.weight, outer.bias
    if not is_plain(x) or (delta is not None and not (delta.shape == x.shape and is_plain(delta))):
        return None
    are_vectors = all(_is_vector(v, n) for v in vectors if v is not None)
    if n > MAX_ROW or not are_vectors or not _is_vector(factor, 1):
        return None
    total = torch.empty_like(x)
    y = torch.empty_like(x) if outer else total
    rows = allocate_rows_like(x, x_bytes) if outer else None
    unit = unit_of(x, delta, *vectors, sizes=(n,))
    size = max(power_of_two(n), smallest)
    arguments: tuple[Tensor | int | float, ...] = (
        x, x if delta is None else delta, *[x if v is None else v for v in (*vectors, factor)],
        total, y, *((y, y, y) if rows is None else (*rows.typed, rows.counters)), n // unit,
        inner.eps if inner else 0.0, addend.scale, outer.eps if outer else 0.0,
    )  # fmt: skip
    constants = _add_norm_constants(
        inner.kind if inner else "none", outer.kind if outer else "none",
        -1 if rows is None else rows.x_bytes, size, unit, addend.scale != 1.0,
        factor is not None, *[v is not None for v in vectors],
    )  # fmt: skip
    if rows is not None:
        attach_rows(y, rows)
    return AddNormLaunch(arguments, warps_of(size), constants, (total, y if outer else None))


@lru_cache(maxsize=1 << 10)
def _add_norm_constants(
    inner: str, outer: str, x_bytes: int, size: int, unit: int, has_scale: bool,
    has_sum_scale: bool, *has_vector: bool,
) -> FixedConstants:  # fmt: skip
    """Return the constants for `kernels.add_norm`; equal arguments give the same object.

    Args:
        x_bytes: bytes per number in a quantised activation; -1 if nothing is quantised.
        has_vector: whether the addend's bias and both norms' weights and biases are present.
    """
    names = ("DELTA_BIAS", "INNER_WEIGHT", "INNER_BIAS", "WEIGHT", "BIAS")
    return FixedConstants({
        "INNER": inner, "KIND": outer, "X_BYTES": x_bytes, "N_COUNTERS": N_COUNTERS, "SIZE": size,
        "UNIT": unit, "HAS_SCALE": has_scale, "HAS_SUM_SCALE": has_sum_scale,
        **{f"HAS_{name}": has for name, has in zip(names, has_vector, strict=True)},
    })  # fmt: skip


@refusable
def norm_gated(x: Tensor, norm_of: NormLayer, act: Activation, gate: Tensor) -> Tensor | None:
    """Compute `Ops.norm_gated`."""
    if norm_of.is_absent or act.kind == "oai" or act.limit or not _is_matrix(gate):
        return None
    shape = x.shape
    if len(shape) != 3 or gate.shape != (shape[0], shape[1] * shape[2]) or shape[2] > MAX_ROW:
        return None
    y = _norm(norm_of.kind, x, norm_of.weight, norm_of.bias, norm_of.eps, act.kind, gate)
    return None if y is None else y.flatten(1)


@refusable
def opened(x: Tensor, door: Tensor, y: Tensor, other: Tensor | None = None) -> Tensor | None:
    """Compute `Ops.opened`."""
    base = y if other is None else other
    n_in, n = x.shape[-1], y.shape[-1]
    size = power_of_two(max(n_in, n))
    if not all(map(_is_matrix, (x, y, base))) or not _is_vector(door, n_in):
        return None
    if size > MAX_ROW or base.shape != y.shape:
        return None
    out = torch.empty(y.shape, device=y.device)
    sizes = (n_in, n, x.stride(0), y.stride(0), base.stride(0))
    unit = unit_of(x, door, y, base, sizes=sizes)
    launch(
        kernels.opened, (y.shape[0],),
        x, door, y, base, out, *(size // unit for size in sizes),
        num_warps=warps_of(size), HAS_OTHER=other is not None, UNIT=unit, SIZE=size,
    )  # fmt: skip
    return out


@refusable
def activate(act: Activation, x: Tensor) -> Tensor | None:
    """Compute `Ops.activate`."""
    return None if act.kind == "oai" else _gated(act.kind, 0.0, x, None)


@refusable
def gated(act: Activation, gate: Tensor, up: Tensor) -> Tensor | None:
    """Compute `Ops.gated` for two tensors with the same shape."""
    return _gated(act.kind, act.limit, gate, up)


@refusable
def xielu(x: Tensor, positive: float, negative: float, beta: float, eps: float) -> Tensor | None:
    """Compute `Ops.xielu`."""
    rows = flat_rows(x)
    if rows is None:
        return None
    y = torch.empty(x.shape, device=x.device)
    unit = unit_of(x, sizes=(rows.n, rows.token_stride))
    launch(
        kernels.xielu, grid_of(rows),
        x, y, rows.n // unit, rows.token_stride // unit, positive, negative, beta, eps,
        UNIT=unit, BLOCK=BLOCK,
    )  # fmt: skip
    return y


@refusable
def softplus(x: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Compute `ln(1 + e^(x + bias))` for x (..., n) and bias (n,)."""
    rows = flat_rows(x) if bias is None else rows_of(x)
    if rows is None or rows.n_head != 1 or not _is_vector(bias, rows.n):
        return None
    y = torch.empty(x.shape, device=x.device)
    unit = unit_of(x, bias, sizes=(rows.n, rows.token_stride))
    launch(
        kernels.softplus_rows, grid_of(rows),
        x, x if bias is None else bias, y, rows.n // unit, rows.token_stride // unit,
        HAS_BIAS=bias is not None, UNIT=unit, BLOCK=BLOCK,
    )  # fmt: skip
    return y


def _norm(
    kind: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
    act: str = "none", gate: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Normalise rows of any length, or of up to `MAX_ROW` elements if there is a gate."""
    rows = rows_of(x)
    if rows is None:
        return None
    vectors = [v for v in (weight, bias) if v is not None]
    shapes = {v.shape for v in vectors}
    per_head = shapes == {(rows.n_head, rows.n)}
    if not all(is_plain(v) for v in vectors) or (shapes and not per_head and shapes != {(rows.n,)}):
        return None
    y = torch.empty(x.shape, device=x.device)
    stride = 0 if gate is None else gate.stride(0)
    unit = unit_of(x, gate, *vectors, sizes=(rows.n, rows.token_stride, rows.head_stride, stride))
    size = min(power_of_two(rows.n), MAX_ROW)
    own = rows.n // unit if per_head else 0
    places = [x if v is None else v for v in (weight, bias)]
    numbers = [rows.n_head, rows.n, rows.token_stride, rows.head_stride]
    numbers[1:] = [number // unit for number in numbers[1:]]
    constants: dict[str, Any] = {
        "KIND": kind, "SIZE": size, "UNIT": unit,
        "HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None,
    }  # fmt: skip
    grid, num_warps = (rows.number,), warps_of(size)
    if rows.n > size:
        launch(kernels.long_norm, grid, x, *places, y, *numbers, own, eps, num_warps=num_warps,
               **constants)  # fmt: skip
        return y
    door = x if gate is None else gate
    launch(kernels.norm, grid, x, *places, door, y, *numbers, own, stride // unit, eps,
           num_warps=num_warps, ACT=act, HAS_GATE=gate is not None, **constants)  # fmt: skip
    return y


def _gated(kind: str, limit: float, gate: Tensor, up: Tensor | None) -> Tensor | None:
    parts = [gate] if up is None else [gate, up]
    if len({part.shape for part in parts}) > 1:
        return None
    flat = all(is_plain(part) for part in parts)
    found = [flat_rows(part) if flat else rows_of(part) for part in parts]
    rows, up_rows = found[0], found[-1]
    if rows is None or up_rows is None:
        return None
    y = torch.empty(gate.shape, device=gate.device)
    sizes = (rows.n, *rows[3:], *up_rows[3:])
    unit = unit_of(*parts, sizes=sizes)
    launch(
        kernels.gated, grid_of(rows),
        gate, gate if up is None else up, y, rows.n_head, *(size // unit for size in sizes), limit,
        KIND=kind, HAS_UP=up is not None, HAS_LIMIT=limit != 0, UNIT=unit, BLOCK=BLOCK,
    )  # fmt: skip
    return y


def is_plain(x: Tensor) -> bool:
    """Return whether x is F32, contiguous and not empty, as most kernels require."""
    return x.dtype == torch.float32 and x.is_contiguous() and x.numel() > 0


def _is_vector(x: Tensor | None, n: int) -> bool:
    return x is None or (is_plain(x) and x.shape == (n,))


def _is_matrix(x: Tensor) -> bool:
    """Return whether x is an F32 matrix with contiguous rows and any row stride."""
    return x.dtype == torch.float32 and x.dim() == 2 and x.numel() > 0 and x.stride(1) == 1


def rows_of(x: Tensor) -> RowLayout | None:
    """Return the layout of x (..., n) as rows; None if kernels cannot read them."""
    shape, strides = x.shape, x.stride()
    if x.dtype != torch.float32 or not x.numel() or not shape:
        return None
    n = shape[-1]
    if x.is_contiguous() and len(shape) != 3:
        return RowLayout(prod(shape[:-1]), 1, n, n, n)
    if (strides[-1] != 1 and n > 1) or not 2 <= len(shape) <= 3:
        return None
    n_head = shape[1] if len(shape) == 3 else 1
    return RowLayout(shape[0], n_head, n, strides[0], strides[1] if len(shape) == 3 else n)


def flat_rows(x: Tensor) -> RowLayout | None:
    """Return the layout for an elementwise kernel: one long row if x is contiguous, else its rows.

    Return None if kernels cannot read x, or if its rows are heads.
    """
    if is_plain(x):
        return RowLayout(1, 1, x.numel(), x.numel(), x.numel())
    rows = rows_of(x)
    return rows if rows is not None and rows.n_head == 1 else None


def grid_of(rows: RowLayout) -> tuple[int]:
    return (rows.number * -(-rows.n // BLOCK),)


def unit_of(*tensors: Tensor | None, sizes: tuple[int, ...]) -> int:
    """Return the number of elements per vector load: `UNIT` if it divides all sizes, else 1."""
    bits = 0
    for size in sizes:
        bits |= size
    for x in tensors:
        if x is not None:
            bits |= int(x.storage_offset())
    return 1 if bits % UNIT else UNIT


def warps_of(size: int) -> int:
    """Return the number of warps for a program with `size` elements, a power of two."""
    return min(32 if size == MAX_ROW else 16, max(1, size // 256))


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


def rows_at_once(n: int) -> int:
    """Return how many of x's n rows a program multiplies by a few weights: a power of two."""
    return min(power_of_two(n), SMALL_BATCH)


class Angles:
    """Cosines and sines for positions, computed in device memory.

    One kernel computes them in each pass, because a table for all positions would take 64 MiB with
    heads of 128 elements and a context of 131072.
    """

    def __init__(self) -> None:
        self._turns: dict[tuple[RopeParams, int, torch.device], tuple[Tensor | None, Tensor]] = {}

    def __call__(
        self, params: RopeParams, factors: Tensor | None, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute `Ops.rope_angles`, two tensors (T, 1, n_rot / 2), for positions (T,)."""
        turns = self._turns_of(params, factors, positions.device)
        n_tokens, n_pairs = positions.shape[0], turns.shape[0]
        cos, sin = (torch.empty(n_tokens, 1, n_pairs, device=positions.device) for _ in range(2))
        launch(
            kernels.angles, (n_tokens,), turns, positions, cos, sin, n_pairs, params.magnitude(),
            num_warps=2, SIZE=power_of_two(n_pairs),
        )  # fmt: skip
        return cos, sin

    def _turns_of(self, params: RopeParams, factors: Tensor | None, device: torch.device) -> Tensor:
        """Return each pair's rotation per position, in whole turns: F64 (n_rot / 2,)."""
        key = params, id(factors), device
        if key not in self._turns:
            self._turns[key] = factors, frequencies(params, factors, device) / tau
        return self._turns[key][1]


def rope(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor | None:
    """Apply RoPE to one tensor; see `rope_all`."""
    turned = rope_all((x,), cos, sin, style)
    return None if turned is None else turned[0]


@refusable
def rope_all(
    xs: Sequence[Tensor], cos: Tensor, sin: Tensor, style: str, norms: Sequence[NormLayer] = ()
) -> tuple[Tensor, ...] | None:
    """Apply RoPE to one or two tensors (T, heads, head_dim), for example q and k, in one launch.

    Args:
        norms: norm to apply to each tensor first; empty for none.

    Returns:
        None if the kernel does not support the arguments.
    """
    n_tokens, _, dim = xs[0].shape
    n_pairs = cos.shape[-1]
    for x in xs:
        if x.shape[0] != n_tokens or x.shape[2] != dim or not has_dense_rows(x):
            return None
    if not all(has_dense_rows(x) and x.is_contiguous() for x in (cos, sin)):
        return None
    if dim > MAX_HEAD or 2 * n_pairs > dim:
        return None
    weights = [(xs[0], 0.0)] * 2  # placeholders if there are no norms
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
    """Return the weight (head_dim,) of an RMS norm without bias; None for other norms."""
    weight = None if norm.is_absent or norm.kind != "rms" or norm.bias is not None else norm.weight
    if weight is None or weight.shape != (dim,) or not has_dense_rows(weight):
        return None
    return weight


def has_dense_rows(x: Tensor) -> bool:
    """Return whether x is F32, not empty, and has contiguous rows."""
    return x.dtype == torch.float32 and x.numel() > 0 and x.stride(-1) == 1
