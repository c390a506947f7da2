"""Gemv with matrices in F16, BF16 or F32, and look-ups of their rows."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.backends.gpu.elementwise import rows_at_once
from engine.backends.gpu.kernels import unquantised as kernels
from engine.backends.gpu.launch.configs import config_of, target_of
from engine.backends.gpu.launch.kernel_launch import launch
from engine.backends.gpu.launch.refusals import allows
from engine.backends.reference.weights import gathered_rows
from engine.model.forward.attention import most_few_rows


def product(x: Tensor, data: Tensor) -> Tensor | None:
    """Return `x Wᵀ` (T, n_out) in F32 for x (T, n_in) in F32; None where the kernel does not serve.

    A row's result has the same bits alone and among others.

    Args:
        data: the matrix W (n_out, n_in), in F16, BF16 or F32.
    """
    n_row, (n_rows, n_columns) = x.shape[0], data.shape
    if not 0 < n_row <= most_few_rows() or x.dtype != torch.float32 or not data.is_contiguous():
        return None
    if x.stride(-1) != 1:
        x = x.contiguous()
    m = rows_at_once(n_row)
    if not allows(x.device, "plain", str(data.dtype), m):
        return None
    y = torch.empty(n_row, n_rows, device=x.device)
    config = config_of(
        target_of(x.device), "plain",
        n_token=m, n_rows=n_rows, n_columns=n_columns,
    )  # fmt: skip
    aligned = 16 if n_columns % 16 == 0 and x.stride(0) % 16 == 0 else 1
    launch(
        kernels.product, (-(-n_rows // config["rows"]) * -(-n_row // m),),
        x, data, y, n_row, n_rows, x.stride(0) // aligned, n_columns // aligned,
        M=m, ROWS=config["rows"], STEP=config["step"], ALIGNED=aligned,
        num_warps=config["num_warps"],
    )  # fmt: skip
    return y


def look_up(data: Tensor, ids: Tensor) -> Tensor:
    """Return rows `ids` (T,) as F32 (T, n_in); zeros where there is no such row."""
    return gathered_rows(ids, len(data), lambda rows: data.index_select(0, rows).float())
