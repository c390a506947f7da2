"""Element-wise sum and product of two vectors."""

from __future__ import annotations

from llvmlite import ir

from engine.backends.cpu.kernels.language.loops import (
    Named,
    SimdLanes,
    add_kernel,
    ceil_div,
    for_each_vector,
    piece,
)
from engine.backends.cpu.kernels.language.values import Code, Value
from engine.backends.cpu.kernels.running.thread_pool import add_run

NAMES = ("add", "multiply")

ARGUMENTS = ("x", "y", "n", "out")
"""Arguments of both kernels: x, y and out have n F32 numbers each."""

PER_PIECE = 16384
"""Elements of a piece."""


def build(module: ir.Module) -> None:
    """Write `add(pool, *ARGUMENTS)` and `multiply(pool, *ARGUMENTS)`."""
    add_run(module)
    for name in NAMES:
        with piece(module, name, ARGUMENTS) as (code, given, index):
            _emit_piece(code, name, given, index * PER_PIECE)
        add_kernel(module, name, ARGUMENTS, _n_pieces)


def _n_pieces(code: Code, given: Named) -> Value:
    return ceil_div(given["n"], PER_PIECE)


def _emit_piece(code: Code, name: str, given: Named, start: Value) -> None:
    x, y, out = (given[name] + start * 4 for name in ("x", "y", "out"))

    def compute(lanes: SimdLanes) -> None:
        a, b = lanes.load(x), lanes.load(y)
        lanes.store(a + b if name == "add" else a * b, out)

    for_each_vector(code, code.min_signed(given["n"] - start, code.number(PER_PIECE)), compute)
