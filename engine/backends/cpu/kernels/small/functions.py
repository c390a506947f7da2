"""Functions with parameters, element by element: softplus, a cap of logits, xIELU."""

from __future__ import annotations

from llvmlite import ir

from engine.backends.cpu.kernels.language import maths
from engine.backends.cpu.kernels.language.loops import (
    Named,
    SimdLanes,
    add_kernel,
    ceil_div,
    for_each_vector,
    piece,
)
from engine.backends.cpu.kernels.language.values import F32, I32, Code, Value
from engine.backends.cpu.kernels.running.thread_pool import add_run

NAMES = ("softplus", "softcap", "xielu")

PARAMETERS = ("a", "b", "c", "d")

ARGUMENTS = ("x", "n", *PARAMETERS, "out")
"""Arguments of the kernels: x and out have n F32 numbers each. The parameters are the bits of F32:
none for the softplus; the cap; xIELU's factors `positive`, `negative`, `beta` and `eps`."""

PER_PIECE = 4096
"""Elements of a piece."""


def build(module: ir.Module) -> None:
    """Write a kernel `name(pool, *ARGUMENTS)` for each of `NAMES`."""
    add_run(module)
    for name in NAMES:
        with piece(module, name, ARGUMENTS) as (code, given, index):
            _emit_piece(code, name, given, index * PER_PIECE)
        add_kernel(module, name, ARGUMENTS, lambda _, given: ceil_div(given["n"], PER_PIECE))


def _emit_piece(code: Code, name: str, given: Named, start: Value) -> None:
    x, out = (given[place] + start * 4 for place in ("x", "out"))
    factors = [code.splat(given[p].to(I32).bitcast(F32)) for p in PARAMETERS]

    def compute(lanes: SimdLanes) -> None:
        v = lanes.load(x)
        if name == "softplus":
            y = maths.softplus(code, v)
        elif name == "softcap":
            y = maths.tanh(code, v / factors[0]) * factors[0]
        else:
            y = _xielu(code, v, factors)
        lanes.store(y, out)

    for_each_vector(code, code.min_signed(given["n"] - start, code.number(PER_PIECE)), compute)


def _xielu(code: Code, x: Value, factors: list[Value]) -> Value:
    """Return `positive × x² + beta × x` above 0, else `(e^min(x, eps) - 1 - x) × negative + …`."""
    positive, negative, beta, eps = factors
    below = (maths.expm1(code, code.minimum(x, eps)) - x) * negative
    return code.where(x > 0.0, positive * x * x, below) + beta * x
