"""GEMM for many rows with the vendor's library, on weights dequantised to F16 or BF16.

Sums are F32. Rows of weights are dequantised into a reusable scratch buffer, as many at a time as
keep the whole card busy (`engine.model.forward.batch.chunk_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.backends.gpu.kernels import unquantised as kernels
from engine.backends.gpu.launch.configs import allows, target_of
from engine.backends.gpu.launch.kernel_launch import FixedConstants, launch
from engine.backends.gpu.quantised import constants_of
from engine.formats.quants.layout import DEVICE_CHUNK, TILE
from engine.model.forward.batch import chunk_rows

if TYPE_CHECKING:
    from engine.backends.gpu.quantised import QuantisedMatrix
    from engine.formats.quants.layout import Extent

BLOCKS = 8  # blocks of 32 columns that each program dequantises, in each of 16 rows
BLOCKS_OF_ROW = 32  # blocks of 32 columns that each program of a look-up dequantises, in one row
SMALLEST = 2.0**-100  # smallest row divisor, for rows of zeros; its inverse is finite


def dequantise_rows(
    planes: Tensor, type_number: int, extent: Extent, n_rows: int, first: int, n: int,
    dtype: torch.dtype, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Dequantise rows `first` to `first + n` of a matrix; in F32 bit-equal to the dequantised file.

    Args:
        planes: one matrix's planes, uint8 (n_tile, tile_bytes).
        n_rows: number of rows in the matrix.
        dtype: F32, F16 or BF16; the latter two are rounded to nearest.
        out: contiguous output (n, extent.n_columns) in `dtype`; None to allocate one.
    """
    assert 0 <= first <= first + n <= n_rows, "there are no such rows"
    if out is None:
        out = torch.empty(n, extent.n_columns, dtype=dtype, device=planes.device)
    n_tile = -(-(first + n) // TILE) - first // TILE if n else 0
    launch(
        kernels.dequantise, (n_tile, -(-extent.n_blocks // BLOCKS)),
        planes, planes.shape[-1], extent.n_blocks, extent.skip, extent.lead, extent.n_columns,
        n, first, out, fixed=_constants(type_number, extent.is_exact),
    )  # fmt: skip
    return out


@cache
def _constants(type_number: int, is_exact: bool) -> FixedConstants:
    return FixedConstants({"BLOCKS": BLOCKS, "IS_EXACT": is_exact, **constants_of(type_number)})


def look_up(planes: Tensor, type_number: int, extent: Extent, n_rows: int, ids: Tensor) -> Tensor:
    """Return rows `ids` (T,) of a matrix as F32 (T, extent.n_columns).

    Args:
        planes: one matrix's planes, uint8 (n_tile, tile_bytes).
        n_rows: number of rows in the matrix; out-of-range ids give rows of zeros.
    """
    if not allows(planes.device, "look_up", type_number):
        return _searched(planes, type_number, extent, n_rows, ids)
    out = torch.empty(len(ids), extent.n_columns, device=planes.device)
    launch(
        kernels.look_up, (len(ids), -(-extent.n_blocks // BLOCKS_OF_ROW)),
        planes, planes.shape[-1], extent.n_blocks, extent.skip, extent.lead, extent.n_columns,
        n_rows, ids.contiguous(), out, BLOCKS=BLOCKS_OF_ROW, num_warps=1,
        **constants_of(type_number),
    )  # fmt: skip
    return out


def _searched(planes: Tensor, type_number: int, extent: Extent, n_rows: int, ids: Tensor) -> Tensor:
    """Compute `look_up` by dequantising all rows, since the host does not know the ids."""
    out = torch.zeros(len(ids), extent.n_columns, device=planes.device)
    step = max(TILE, DEVICE_CHUNK // extent.n_columns // TILE * TILE)
    for first in range(0, n_rows, step):
        n = min(step, n_rows - first)
        rows = dequantise_rows(planes, type_number, extent, n_rows, first, n, torch.float32)
        is_here = (ids >= first) & (ids < first + n)
        here = rows.index_select(0, (ids - first).clamp(0, n - 1))
        out = here.where(is_here[:, None], out)
    return out


def product(x: Tensor, weight: QuantisedMatrix | Tensor) -> Tensor:
    """Return `x Wᵀ` (T, n_out) in F32 for x (T, n_in) in F32; see `products`."""
    return products(x, [weight])[0]


def products(x: Tensor, weights: Sequence[QuantisedMatrix | Tensor]) -> list[Tensor]:
    """Return `x Wᵀ` (T, n_out) in F32 for each of several matrices, rounding x once for all.

    Args:
        x: F32 (T, n_in).
        weights: matrices in planes, or (n_out, n_in) in F32, F16 or BF16.
    """
    rounded: dict[torch.dtype, tuple[Tensor, Tensor | None]] = {}
    found, half = [], half_dtype(x.device)
    for weight in weights:
        dtype = half
        if isinstance(weight, Tensor) and weight.dtype != torch.bfloat16:
            dtype = weight.dtype
        if isinstance(weight, Tensor) and dtype == torch.float32:
            found.append(torch.mm(x, weight.T))
            continue
        if dtype not in rounded:
            rounded[dtype] = to_half(x, dtype)
        numbers, scale = rounded[dtype]
        y = _in_chunks(numbers, weight)
        found.append(y if scale is None else y.mul_(scale))
    return found


def serves(x: Tensor, weights: Sequence[QuantisedMatrix | Tensor]) -> bool:
    """Return whether the dequantising kernel is allowed for all matrices."""
    return all(
        isinstance(weight, Tensor) or allows(x.device, "dequant_gemm", weight.type_number)
        for weight in weights
    )


def _in_chunks(numbers: Tensor, weight: QuantisedMatrix | Tensor) -> Tensor:
    n_rows = weight.shape[0] if isinstance(weight, Tensor) else weight.n_rows
    y = torch.empty(numbers.shape[0], n_rows, device=numbers.device)
    if isinstance(weight, Tensor) and weight.dtype == numbers.dtype:
        multiply(numbers, weight.T, y)
        return y
    n_token, n_columns = numbers.shape
    step = chunk_rows(n_token, n_rows, n_columns, target_of(numbers.device).n_sm)
    scratch = torch.empty(min(step, n_rows), n_columns, dtype=numbers.dtype, device=numbers.device)
    for first in range(0, n_rows, step):
        n = min(step, n_rows - first)
        part = scratch if n == scratch.shape[0] else scratch[:n]
        if isinstance(weight, Tensor):
            part.copy_(weight[first : first + n])
        else:
            dequantise_rows(
                weight.planes, weight.type_number, weight.extent, n_rows, first, n, part.dtype, part
            )
        multiply(numbers, part.T, y if n == n_rows else y[:, first : first + n])
    return y


def half_dtype(device: torch.device) -> torch.dtype:
    """Return the type for tensor-core operands: BF16 if the device has it, else F16."""
    target = target_of(device)
    is_old = target.maker == "nvidia" and target.capability < 80
    return torch.float16 if is_old else torch.bfloat16


def to_half(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Round rows x (T, n) to F16 or BF16; also return factors (T, 1) for their products.

    The factors are None for BF16, which needs none.
    """
    if dtype != torch.float16:
        return x.to(dtype), None
    scale = f16_row_scale(x)
    return (x / scale).to(dtype), scale


def f16_row_scale(x: Tensor) -> Tensor:
    """Return divisors (T, 1) that bring rows x (T, n) into the range of F16, which ends at 65504.

    A row's divisor is the smallest power of two not below its largest magnitude.
    """
    largest = x.abs().amax(-1, keepdim=True).clamp(min=SMALLEST)
    return largest.log2().ceil().exp2()


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Compute `out = a b` in F32, for a (T, k) and b (k, n) in F16 or BF16."""
    if a.is_cpu:
        out.copy_(torch.mm(a.float(), b.float()))
    elif torch.version.hip:  # AMD's library rounds results to the operands' type
        out.copy_(torch.mm(a, b))
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)


def batched_multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return `a b` in F32 for each pair from a (n, T, k) and b (n, k, m), of the same type."""
    if a.dtype == torch.float32 or a.is_cpu:
        return torch.bmm(a.float(), b.float())
    if torch.version.hip:
        return torch.bmm(a, b).float()
    return torch.bmm(a, b, out_dtype=torch.float32)
