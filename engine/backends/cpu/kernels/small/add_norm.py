"""A value added to the residual stream, and the norm that reads the sum, while caches have its row.

The bits are those of a sum by itself and of `kernels.small.norm`.
"""

from __future__ import annotations

from llvmlite import ir

from engine.backends.cpu.kernels.language.loops import (
    Named,
    SimdLanes,
    add_kernel,
    ceil_div,
    for_each_vector,
    piece,
    rows_per_piece,
)
from engine.backends.cpu.kernels.language.values import VOID, Code, Value
from engine.backends.cpu.kernels.running.thread_pool import add_run
from engine.backends.cpu.kernels.small import norm

NAMES = tuple(f"add_{name}" for name in norm.NAMES)

ARGUMENTS = (
    "x", "x_stride", "delta", "delta_stride", "n_tokens", "n", "weight", "bias", "eps", "total",
    "out",
)  # fmt: skip
"""Arguments of the kernels. x and delta are F32, (n_tokens, n), with strides in bytes; total, their
sum, and out have that shape, contiguous. weight, bias and eps are those of `norm.ARGUMENTS`."""


def build(module: ir.Module) -> None:
    """Write `add_rms_norm(pool, *ARGUMENTS)` and `add_layer_norm(pool, *ARGUMENTS)`."""
    add_run(module)
    for name, inner in zip(NAMES, norm.NAMES, strict=True):
        norm.add_row(module, inner)
        with piece(module, name, ARGUMENTS) as (code, given, index):
            _emit_piece(code, inner, given, index)
        add_kernel(module, name, ARGUMENTS, _n_pieces)


def _n_pieces(code: Code, given: Named) -> Value:
    return ceil_div(given["n_tokens"], rows_per_piece(code, given["n"]))


def _emit_piece(code: Code, name: str, given: Named, index: Value) -> None:
    n, per_piece = given["n"], rows_per_piece(code, given["n"])
    stop = code.min_signed((index + 1) * per_piece, given["n_tokens"])
    with code.loop(index * per_piece, stop) as token:
        x = given["x"] + token * given["x_stride"]
        delta = given["delta"] + token * given["delta_stride"]
        total, out = (given[place] + token * n * 4 for place in ("total", "out"))

        def add(lanes: SimdLanes, x: Value = x, y: Value = delta, goal: Value = total) -> None:
            lanes.store(lanes.load(x) + lanes.load(y), goal)

        for_each_vector(code, n, add)
        weights = given["weight"], given["bias"], code.number(0)
        code.call(f"{name}_row", VOID, total, n, *weights, given["eps"], out)
