"""Element-wise functions: softplus, softcap and xIELU; sum and product of two tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
"""Arguments of the kernels: x and out have n F32 numbers each. The parameters are F32 bits:
none for softplus; the cap for softcap; xIELU's factors `positive`, `negative`, `beta` and `eps`."""

PAIRWISE = ("add", "multiply")

PAIRWISE_ARGUMENTS = ("x", "y", "n", "out")
"""Arguments of the sum and product kernels: x, y and out have n F32 numbers each."""

PER_PIECE, PAIRWISE_PER_PIECE = 4096, 16384
"""Elements per piece."""


def build(module: ir.Module) -> None:
    """Emit a kernel `name(pool, *ARGUMENTS)` for each of `NAMES`."""

    def function(code: Code, name: str, given: Named, numbers: list[Value]) -> Value:
        (x,) = numbers
        factors = [code.splat(given[p].to(I32).bitcast(F32)) for p in PARAMETERS]
        if name == "softplus":
            return maths.softplus(code, x)
        if name == "softcap":
            return maths.tanh(code, x / factors[0]) * factors[0]
        return _xielu(code, x, factors)

    _build(module, NAMES, ARGUMENTS, PER_PIECE, function)


def build_pairwise(module: ir.Module) -> None:
    """Emit `add(pool, *PAIRWISE_ARGUMENTS)` and `multiply(pool, *PAIRWISE_ARGUMENTS)`."""

    def function(_code: Code, name: str, _given: Named, numbers: list[Value]) -> Value:
        a, b = numbers
        return a + b if name == "add" else a * b

    _build(module, PAIRWISE, PAIRWISE_ARGUMENTS, PAIRWISE_PER_PIECE, function)


def _build(
    module: ir.Module, names: Sequence[str], arguments: Sequence[str], per_piece: int,
    function: Callable[[Code, str, Named, list[Value]], Value],
) -> None:  # fmt: skip
    add_run(module)
    inputs = [name for name in arguments if name in "xy"]

    def emit(code: Code, name: str, given: Named, start: Value) -> None:
        places = [given[place] + start * 4 for place in inputs]
        out = given["out"] + start * 4

        def compute(lanes: SimdLanes) -> None:
            numbers = [lanes.load(place) for place in places]
            lanes.store(function(code, name, given, numbers), out)

        n = code.min_signed(given["n"] - start, code.number(per_piece))
        for_each_vector(code, n, compute)

    for name in names:
        with piece(module, name, arguments) as (code, given, index):
            emit(code, name, given, index * per_piece)
        add_kernel(module, name, arguments, lambda _, given: ceil_div(given["n"], per_piece))


def _xielu(code: Code, x: Value, factors: list[Value]) -> Value:
    """Return `positive × x² + beta × x` if x > 0, else `(e^min(x, eps) - 1 - x) × negative + …`."""
    positive, negative, beta, eps = factors
    below = (maths.expm1(code, code.minimum(x, eps)) - x) * negative
    return code.where(x > 0.0, positive * x * x, below) + beta * x
