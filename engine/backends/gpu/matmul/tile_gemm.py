"""GEMM for up to a few hundred rows: one kernel dequantises weights and feeds the tensor cores.

Gemv reads each weight once and computes in full precision; the GEMM for long prompts first
dequantises to memory. For row counts in between, both would take longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engine.backends.gpu.elementwise import power_of_two
from engine.backends.gpu.kernels import tile_gemm
from engine.backends.gpu.launch.configs import KernelTarget, allows, config_of, target_of
from engine.backends.gpu.launch.kernel_launch import launch
from engine.backends.gpu.matmul.dequant_gemm import f16_row_scale, half_dtype
from engine.backends.gpu.quantised import constants_of
from engine.formats.quants.layout import BLOCK, LAYOUTS

if TYPE_CHECKING:
    from engine.backends.gpu.launch.configs import Config
    from engine.backends.gpu.quantised import QuantisedMatrix
    from engine.formats.quants.layout import Extent

MAX_ROWS = 256
MAX_ROWS_WITHOUT_CORES = 32  # if Triton cannot use tensor cores: NVIDIA before Ampere
MIN_TOKENS = 16  # rows below which configurations do not differ
ONE = 0x4B000000  # bits of 2^23 as F32; a byte put into the lowest bits is added to it


class ShortRows(NamedTuple):
    """Rows x as written by `kernels.tile_gemm.shorten`, and factors (T, 1) on the products."""

    numbers: Tensor
    scale: Tensor | None


def product(x: Tensor, weight: QuantisedMatrix) -> Tensor | None:
    """Return `x Wᵀ` (T, n_rows) for x (T, n_in) in F32; None if the kernel does not apply."""
    results = products(x, [weight])
    return None if results is None else results[0]


def products(x: Tensor, weights: Sequence[QuantisedMatrix]) -> list[Tensor] | None:
    """Return `x Wᵀ` for each matrix; None if the kernel does not apply.

    x is rounded once for all matrices that read it in the same order.
    """
    target = target_of(x.device)
    if x.shape[0] > most_rows(target):
        return None
    n_token = max(MIN_TOKENS, power_of_two(x.shape[0]))  # so that there are few variants
    if not all(allows(x.device, "tile_gemm", w.type_number, n_token) for w in weights):
        return None
    shorts: dict[tuple[Extent, int], ShortRows] = {}
    found = []
    for weight in weights:
        low = LAYOUTS[weight.type_number].low
        config = config_of(target, "many", n_token=n_token, low=low)
        key = weight.extent, low
        if key not in shorts:
            shorts[key] = _to_half(x, weight.extent, low, config["blocks"])
        found.append(_multiply(shorts[key], weight, target, config))
    return found


def most_rows(target: KernelTarget) -> int:
    """Return the maximum number of rows x that the kernel supports on a target."""
    is_old = target.maker == "nvidia" and target.capability < 80
    return MAX_ROWS_WITHOUT_CORES if is_old else MAX_ROWS


def _to_half(x: Tensor, extent: Extent, low: int, n_block: int) -> ShortRows:
    if x.stride(-1) != 1:
        x = x.contiguous()
    n_step = -(-extent.n_blocks // n_block)
    dtype = half_dtype(x.device)
    scale = f16_row_scale(x) if dtype == torch.float16 else None
    numbers = torch.empty(x.shape[0], n_step, n_block * BLOCK, dtype=dtype, device=x.device)
    launch(
        tile_gemm.shorten, (x.shape[0], n_step),
        x, x.stride(0), x if scale is None else scale, numbers, extent.n_blocks, extent.lead,
        extent.n_columns, LOW=low, BLOCKS=n_block, HAS_SCALE=scale is not None, num_warps=1,
    )  # fmt: skip
    return ShortRows(numbers, scale)


def _multiply(
    short: ShortRows, weight: QuantisedMatrix, target: KernelTarget, config: Config
) -> Tensor:
    n_token, n_step, _ = short.numbers.shape
    n_row_block = -(-weight.n_rows // config["rows"])
    n_token_block = -(-n_token // config["tokens"])
    # split K: if there are too few programs to fill the device, columns are split into parts
    n_program = max(1, n_row_block * n_token_block)
    wanted = config["programs_per_sm"] * target.n_sm // n_program
    n_part = max(1, min(wanted, n_step // config["least_steps"]))
    planes, device = weight.planes, short.numbers.device
    y = torch.empty(n_part, n_token, weight.n_rows, device=device)
    launch(
        tile_gemm.product, (n_token_block, n_row_block, n_part),
        short.numbers, planes, planes.shape[-1], planes.shape[-2], weight.extent.n_blocks,
        weight.extent.skip, n_token, weight.n_rows, n_step, _ramp(device), y,
        ROWS=config["rows"], TOKENS=config["tokens"], BLOCKS=config["blocks"],
        IS_INTERPRETED=target.is_interpreted, ASM=target.has_asm,
        num_warps=config["num_warps"], num_stages=config["num_stages"],
        **constants_of(weight.type_number),
    )  # fmt: skip
    total = y[0] if n_part == 1 else y.sum(0)
    return total if short.scale is None else total.mul_(short.scale)


@cache
def _ramp(device: torch.device) -> Tensor:
    """Return the constant words `ramp` of `engine.backends.gpu.kernels.tile_gemm.product`."""
    words = torch.arange(16, dtype=torch.int32, device=device)
    words[8:] = ONE
    return words
