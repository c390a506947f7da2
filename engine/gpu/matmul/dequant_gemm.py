"""GEMM of many rows by the vendor's library, on weights dequantised to F16 or BF16.

Sums are F32. Some rows of weights are dequantised at a time, into a scratch buffer that is reused;
on cards with a large cache it never leaves the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.gpu.launch.target import target_of
from engine.gpu.matmul import dequantise
from engine.quants.extent import DEVICE_CHUNK
from engine.quants.layout import TILE

if TYPE_CHECKING:
    from engine.gpu.matmul.planes import QuantisedMatrix


def product(x: Tensor, weight: QuantisedMatrix) -> Tensor:
    """Return `x Wᵀ` (T, n_rows) in F32 for x (T, n_in) in F32."""
    dtype = half_dtype(x.device)
    numbers, scale = to_half(x, dtype)
    y = torch.empty(x.shape[0], weight.n_rows, device=x.device)
    n_columns = weight.extent.n_columns
    step = chunk_rows(n_columns)
    scratch = torch.empty(min(step, weight.n_rows) * n_columns, dtype=dtype, device=x.device)
    for first in range(0, weight.n_rows, step):
        n = min(step, weight.n_rows - first)
        part = dequantise.dequantise_rows(
            weight.planes, weight.type_number, weight.extent, weight.n_rows, first, n, dtype,
            scratch[: n * n_columns].view(n, n_columns),
        )  # fmt: skip
        multiply(numbers, part.T, y[:, first : first + n])
    return y if scale is None else y.mul_(scale)


def unquantised_product(x: Tensor, data: Tensor) -> Tensor:
    """Return `x Wᵀ` (T, n_out) in F32 for x (T, n_in) in F32.

    Args:
        data: the matrix W (n_out, n_in), in F32, F16 or BF16.
    """
    if data.dtype == torch.float32:
        return torch.mm(x, data.T)
    dtype = half_dtype(x.device) if data.dtype == torch.bfloat16 else data.dtype
    numbers, scale = to_half(x, dtype)
    y = torch.empty(x.shape[0], data.shape[0], device=x.device)
    step = data.shape[0] if dtype == data.dtype else chunk_rows(data.shape[1])
    for first in range(0, data.shape[0], step):
        part = data[first : first + step].to(dtype)
        multiply(numbers, part.T, y[:, first : first + step])
    return y if scale is None else y.mul_(scale)


def chunk_rows(n_columns: int) -> int:
    """Return the number of rows, of `n_columns` columns each, to dequantise at a time."""
    return max(TILE, DEVICE_CHUNK // max(1, n_columns) // TILE * TILE)


def half_dtype(device: torch.device) -> torch.dtype:
    """Return the type of tensor-core operands: BF16 where the device has it, else F16."""
    target = target_of(device)
    is_old = target.maker == "nvidia" and target.capability < 80
    return torch.float16 if is_old else torch.bfloat16


def to_half(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Round rows x (T, n) to F16 or BF16.

    Returns:
        The rounded rows, and factors (T, 1) on their products; None for BF16, which needs none.
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


SMALLEST = 2.0**-100
"""Least divisor, for rows of zeros; its inverse is finite."""


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Compute `out = a b` in F32, for a (T, k) and b (k, n) in F16 or BF16."""
    if a.device.type == "cpu":
        out.copy_(torch.mm(a.float(), b.float()))
    elif torch.version.hip:  # AMD's library rounds results to the operands' type
        out.copy_(torch.mm(a, b))
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)


def batched_multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return `a b` in F32 for each pair of a (n, T, k) and b (n, k, m), of one type."""
    if a.dtype == torch.float32 or a.device.type == "cpu":
        return torch.bmm(a.float(), b.float())
    if torch.version.hip:
        return torch.bmm(a, b).float()
    return torch.bmm(a, b, out_dtype=torch.float32)
