"""GEMM of many rows by the vendor's library, on weights dequantised to F16 or BF16.

Sums are F32. Some rows of weights are dequantised at a time, into a scratch buffer that is reused:
as many as keep the whole card busy (`engine.model.forward.batch_sizes.chunk_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.backends.gpu.launch.refusals import allows
from engine.backends.gpu.launch.target import target_of
from engine.backends.gpu.matmul import dequantise
from engine.model.forward.batch_sizes import chunk_rows

if TYPE_CHECKING:
    from engine.backends.gpu.matmul.planes import QuantisedMatrix


def product(x: Tensor, weight: QuantisedMatrix | Tensor) -> Tensor:
    """Return `x Wᵀ` (T, n_out) in F32 for x (T, n_in) in F32; see `products`."""
    return products(x, [weight])[0]


def products(x: Tensor, weights: Sequence[QuantisedMatrix | Tensor]) -> list[Tensor]:
    """Multiply x (T, n_in) in F32 by several matrices, rounding x once for all of them.

    Args:
        weights: matrices in planes, or (n_out, n_in) in F32, F16 or BF16.

    Returns:
        `x Wᵀ` (T, n_out) of each matrix, in F32.
    """
    rounded: dict[torch.dtype, tuple[Tensor, Tensor | None]] = {}
    found, half = [], half_dtype(x.device)
    for weight in weights:
        dtype = half  # in which the library multiplies
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
    """Return whether the kernel that dequantises is not refused for any of the matrices."""
    return all(
        isinstance(weight, Tensor) or allows(x.device, "dequant_gemm", weight.type_number)
        for weight in weights
    )


def _in_chunks(numbers: Tensor, weight: QuantisedMatrix | Tensor) -> Tensor:
    """Return the products of rows in F16 or BF16 with a matrix, converted some rows at a time."""
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
            dequantise.dequantise_rows(
                weight.planes, weight.type_number, weight.extent, n_rows, first, n, part.dtype, part
            )
        multiply(numbers, part.T, y if n == n_rows else y[:, first : first + n])
    return y


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
    if a.is_cpu:
        out.copy_(torch.mm(a.float(), b.float()))
    elif torch.version.hip:  # AMD's library rounds results to the operands' type
        out.copy_(torch.mm(a, b))
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)


def batched_multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return `a b` in F32 for each pair of a (n, T, k) and b (n, k, m), of one type."""
    if a.dtype == torch.float32 or a.is_cpu:
        return torch.bmm(a.float(), b.float())
    if torch.version.hip:
        return torch.bmm(a, b).float()
    return torch.bmm(a, b, out_dtype=torch.float32)
