"""Activations, gated or not: `act(gate) × up` or `act(gate)`, element by element."""

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
from engine.backends.cpu.kernels.language.values import F32, I32, VOID, Code, Value, internal
from engine.backends.cpu.kernels.running.thread_pool import add_run
from engine.model.forward.operands import OAI_ALPHA

KINDS = ("silu", "gelu", "relu", "relu2", "oai", "sigmoid")
"""Activations; see `engine.model.forward.operands.Activation`."""

ARGUMENTS = ("gate", "gate_stride", "up", "up_stride", "n_rows", "n", "limit", "out")
"""Arguments of the kernels. gate and up are F32, (n_rows, n), with strides in bytes; out has their
shape, contiguous. up is 0 for an activation without a gate. limit: F32 bits; infinity for none."""

GELU_SCALE, GELU_CUBE = 0.7978845608028654, 0.044715
"""√(2 / π), and the coefficient of x³ in GELU's tanh form (arXiv 1606.08415)."""

COLUMNS = 4096
"""Largest number of columns per piece."""


def build(module: ir.Module) -> None:
    """Emit a kernel `kind(pool, *ARGUMENTS)` for each activation."""
    add_run(module)
    for kind in KINDS:
        _add_row(module, kind)
        with piece(module, kind, ARGUMENTS) as (code, given, index):
            _emit_piece(code, kind, given, index)
        add_kernel(module, kind, ARGUMENTS, _n_pieces)


def _n_pieces(code: Code, given: Named) -> Value:
    return given["n_rows"] * ceil_div(given["n"], COLUMNS)


def _emit_piece(code: Code, kind: str, given: Named, index: Value) -> None:
    n = given["n"]
    per_row = ceil_div(n, COLUMNS)
    row, first = index // per_row, index % per_row * COLUMNS
    gate = given["gate"] + row * given["gate_stride"] + first * 4
    up = given["up"] + row * given["up_stride"] + first * 4
    out = given["out"] + (row * n + first) * 4
    count = code.min_signed(n - first, code.number(COLUMNS))
    with code.if_else(given["up"].equals(0)) as (alone, both):
        with alone:
            code.call(f"{kind}_alone", VOID, gate, count, out)
        with both:
            code.call(f"{kind}_both", VOID, gate, up, count, given["limit"], out)


def _add_row(module: ir.Module, kind: str) -> None:
    """Emit `kind_alone(gate, n, out)` and `kind_both(gate, up, n, limit, out)`."""
    code, (gate, n, out) = internal(module, f"{kind}_alone", 3)
    for_each_vector(
        code, n, lambda lanes: lanes.store(activated(code, kind, lanes.load(gate)), out)
    )
    code.builder.ret_void()
    code, (gate, up, n, bits, out) = internal(module, f"{kind}_both", 5)
    limit = code.splat(bits.to(I32).bitcast(F32))

    def below(x: Value) -> Value:
        """Return x capped at the limit; NaN stays NaN."""
        return code.where(x > limit, limit, x)

    def emit(lanes: SimdLanes) -> None:
        factor, x = below(lanes.load(up)), lanes.load(gate)
        lowest = limit * -1.0
        factor = code.where(factor < lowest, lowest, factor)
        if kind == "oai":
            y, factor = activated(code, kind, below(x)), factor + 1.0
        else:
            y = below(activated(code, kind, x))
        lanes.store(y * factor, out)

    for_each_vector(code, n, emit)
    code.builder.ret_void()


def activated(code: Code, kind: str, x: Value) -> Value:
    """Return act(x)."""
    if kind == "silu":
        return over_one_plus_exp(code, x, x * -1.0)
    if kind == "oai":
        return over_one_plus_exp(code, x, x * -OAI_ALPHA)
    if kind == "gelu":  # (1 + tanh u) / 2 is 1 / (1 + exp(-2u))
        cubic = code.fma(x * x * x, code.constant(x.kind, GELU_CUBE), x)
        return over_one_plus_exp(code, x, cubic * (-2 * GELU_SCALE))
    if kind == "sigmoid":
        return maths.sigmoid(code, x)
    positive = code.maximum(x, code.constant(x.kind, 0.0))
    return positive * positive if kind == "relu2" else positive


def over_one_plus_exp(code: Code, x: Value, exponent: Value) -> Value:
    """Return x / (1 + exp(exponent))."""
    return x / (maths.exp(code, exponent) + 1.0)
