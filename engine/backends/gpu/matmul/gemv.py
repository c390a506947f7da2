"""Gemv: products of a few rows with matrices in planes, F16, BF16 or F32, for decode.

A row's result has the same bits in any batch and any launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from engine.backends.gpu.elementwise import is_plain, rows_at_once
from engine.backends.gpu.kernels import gemv, unquantised
from engine.backends.gpu.launch.configs import WARP, Config, allows, config_of, target_of
from engine.backends.gpu.launch.kernel_launch import launch
from engine.backends.gpu.quantised import (
    N_COUNTERS,
    QuantisedMatrix,
    QuantisedRows,
    allocate_rows,
    attach_rows,
    constants_of,
    quantise,
)
from engine.backends.reference.weights import gathered_rows
from engine.formats.quants.layout import LAYOUTS, TILE, Extent, n_tiles
from engine.model.forward.attention import most_few_rows
from engine.model.forward.batch import SMALL_BATCH

if TYPE_CHECKING:
    from engine.model.forward.operands import Activation

T = TypeVar("T")

MAX_TOGETHER = 3  # max. matrices in one launch


def product(
    x: Tensor, weight: QuantisedMatrix, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor | None:
    """Return `x Wᵀ + bias + residual` (n, n_rows) in F32; None if the kernel does not apply.

    Args:
        x: rows (n, extent.n_columns), F32.
        bias: F32 (n_rows,).
        residual: F32 (n, n_rows).
    """
    if not serves(x, [weight]) or not all(is_plain(t) for t in (bias, residual) if t is not None):
        return None
    rows = quantise(x, weight.extent, weight.x_bytes)
    return _launch_products(rows, [weight], [bias], residual)[0]


def products(
    x: Tensor, weights: Sequence[QuantisedMatrix], biases: Sequence[Tensor | None] = ()
) -> list[Tensor] | None:
    """Return `x Wᵀ + bias` for each matrix; None if the kernel does not apply.

    x is quantised once per distinct extent.

    Args:
        biases: a bias or None for each matrix; or empty.
    """
    if not serves(x, weights) or not all(bias is None or is_plain(bias) for bias in biases):
        return None
    biases = list(biases) or [None] * len(weights)
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, weight in enumerate(weights):
        key = (weight.type_number, weight.extent, weight.x_bytes, biases[index] is None)
        alike.setdefault(key, []).append(index)
    found: dict[int, Tensor] = {}
    rows: dict[tuple[Extent, int], QuantisedRows] = {}
    for group in alike.values():
        weight = weights[group[0]]
        if (weight.extent, weight.x_bytes) not in rows:
            rows[weight.extent, weight.x_bytes] = quantise(x, weight.extent, weight.x_bytes)
        for start in range(0, len(group), MAX_TOGETHER):
            some = group[start : start + MAX_TOGETHER]
            results = _launch_products(
                rows[weight.extent, weight.x_bytes],
                [weights[n] for n in some], [biases[n] for n in some], None,
            )  # fmt: skip
            found.update(zip(some, results, strict=True))
    return [found[index] for index in range(len(weights))]


def gated(x: Tensor, gate: QuantisedMatrix, up: QuantisedMatrix, act: Activation) -> Tensor | None:
    """Return `act(x gateᵀ) * (x upᵀ)` (see `Ops.gated`); None if the kernel does not apply.

    Results that fill whole blocks are also quantised for the next product.
    """
    same = (gate.type_number, gate.extent, gate.n_rows) == (up.type_number, up.extent, up.n_rows)
    if not same or not serves(x, [gate, up], "gated"):
        return None
    rows = quantise(x, gate.extent, gate.x_bytes)
    m, config, (n_parts,) = _launch_shape(rows, [gate])
    out = torch.empty(rows.n_row, gate.n_rows, device=x.device)
    n_program = n_tiles(gate.n_rows) * n_parts * -(-rows.n_row // m)
    inner = allocate_rows(rows.n_row, Extent.of(0, gate.n_rows), rows.x_bytes, rows.counters)
    launch(
        gemv.gated, (n_program,), gate.planes, up.planes, out, *inner.typed, rows.numbers,
        rows.facts, *_shared(rows, n_program if n_parts > 1 else 0, 2 * m), gate.n_rows, n_parts,
        rows.n_row, gate.planes.shape[-1], gate.extent.n_blocks, gate.extent.skip, act.limit,
        KIND=act.kind, HAS_LIMIT=act.limit != 0, IS_ROUNDED=inner.extent.is_exact, M=m,
        **_constants(rows, gate, config),
    )  # fmt: skip
    if inner.extent.is_exact:
        attach_rows(out, inner)
    return out


def serves(x: Tensor, weights: Sequence[QuantisedMatrix], kernel: str = "gemv") -> bool:
    """Return whether the kernels can multiply rows x by all of these matrices.

    `kernel` is the name under which the kernel may be refused.
    """
    n = rows_at_once(x.shape[0])
    return (
        is_plain(x)
        and x.dim() == 2
        and x.shape[0] <= most_few_rows()
        and all(
            weight.type_number in LAYOUTS
            and weight.planes.dim() == 2
            and weight.planes.is_contiguous()
            and weight.n_rows > 0
            and weight.extent.n_columns == x.shape[1]
            and allows(x.device, kernel, weight.type_number, n)
            for weight in weights
        )
    )


def _launch_products(
    rows: QuantisedRows, weights: Sequence[QuantisedMatrix], biases: Sequence[Tensor | None],
    residual: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Multiply rows by up to three matrices of one type and extent, with a bias each or none."""
    first = weights[0]
    m, config, parts = _launch_shape(rows, weights)
    device = first.planes.device
    outs = [torch.empty(rows.n_row, weight.n_rows, device=device) for weight in weights]
    n_program = sum(n_tiles(w.n_rows) * n for w, n in zip(weights, parts, strict=True))
    n_program *= -(-rows.n_row // m)
    shared = _shared(rows, n_program if max(parts) > 1 else 0, m)
    has_bias = biases[0] is not None
    launch(
        gemv.products, (n_program,),
        *_padded([weight.planes for weight in weights]), *_padded(outs),
        *_padded([out if bias is None else bias for out, bias in zip(outs, biases, strict=True)]),
        outs[0] if residual is None else residual, rows.numbers, rows.facts, *shared,
        *_padded([weight.n_rows for weight in weights]), *_padded(parts), rows.n_row,
        first.planes.shape[-1], first.extent.n_blocks, first.extent.skip, COUNT=len(weights), M=m,
        HAS_BIAS=has_bias, HAS_RESIDUAL=residual is not None, **_constants(rows, first, config),
    )  # fmt: skip
    return outs


def _launch_shape(
    rows: QuantisedRows, weights: Sequence[QuantisedMatrix]
) -> tuple[int, Config, list[int]]:
    """Return the rows per program, the configuration, and each matrix's parts per tile.

    Warps and parts, which affect a result's bits, depend only on the matrix.
    """
    target = target_of(rows.numbers.device)
    n_blocks = weights[0].extent.n_blocks
    config = config_of(target, "few", n_blocks=n_blocks)
    parts = [
        config_of(
            target, "few_parts", n_blocks=n_blocks, n_rows=weight.n_rows,
            num_warps=config["num_warps"],
        )["parts"]
        if weight.n_rows <= N_COUNTERS // MAX_TOGETHER * TILE
        else 1
        for weight in weights
    ]  # fmt: skip
    n_step = -(-n_blocks // (config["num_warps"] * WARP // 4))
    unroll = min(config["unroll"], -(-n_step // min(parts)))
    return rows_at_once(rows.n_row), {**config, "unroll": unroll}, parts


def _constants(rows: QuantisedRows, weight: QuantisedMatrix, config: Config) -> dict[str, Any]:
    num_warps, has_asm = config["num_warps"], target_of(weight.planes.device).has_asm
    return {
        "ITEMS": num_warps * WARP, "UNROLL": config["unroll"], "num_warps": num_warps,
        "X_BYTES": rows.x_bytes, "ASM": has_asm, **constants_of(weight.type_number),
    }  # fmt: skip


def _shared(rows: QuantisedRows, n_program: int, n_sums: int) -> tuple[Tensor, Tensor]:
    """Return memory for partial sums, and counters, for programs that share a tile.

    If none do, any tensors will do. Several groups of rows need more counters than `rows` has.
    """
    if not n_program:
        return rows.facts.view(torch.float32), rows.counters
    scratch = rows.facts.new_empty(n_program, n_sums, TILE, dtype=torch.float32)
    is_one = rows.n_row <= SMALL_BATCH
    return scratch, rows.counters if is_one else rows.counters.new_zeros(n_program)


def _padded(things: Sequence[T]) -> list[T]:
    """Return `MAX_TOGETHER` things for the kernel's parameters; the last one is repeated."""
    return [*things, *[things[-1]] * (MAX_TOGETHER - len(things))]


def plain_product(x: Tensor, data: Tensor) -> Tensor | None:
    """Return `x Wᵀ` (T, n_out) in F32 for x (T, n_in) in F32; None if the kernel does not apply.

    `data` is the matrix W (n_out, n_in) in F16, BF16 or F32.
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
    target = target_of(x.device)
    config = config_of(target, "plain", n_token=m, n_rows=n_rows, n_columns=n_columns)
    aligned = 16 if n_columns % 16 == 0 and x.stride(0) % 16 == 0 else 1
    launch(
        unquantised.product, (-(-n_rows // config["rows"]) * -(-n_row // m),),
        x, data, y, n_row, n_rows, x.stride(0) // aligned, n_columns // aligned,
        M=m, ROWS=config["rows"], STEP=config["step"], ALIGNED=aligned,
        num_warps=config["num_warps"],
    )  # fmt: skip
    return y


def look_up(data: Tensor, ids: Tensor) -> Tensor:
    """Return rows `ids` (T,) as F32 (T, n_in); zeros for rows that do not exist."""
    return gathered_rows(ids, len(data), lambda rows: data.index_select(0, rows).float())
