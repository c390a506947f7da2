"""RMSNorm and LayerNorm: `y = x / sqrt(mean(x²) + eps) × weight + bias`; LayerNorm first centres x.

Sums are made in four vectors, always in the same order.
"""

from __future__ import annotations

from collections.abc import Callable

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
from engine.backends.cpu.kernels.language.values import (
    F32,
    FLOATS,
    I32,
    LANES,
    VOID,
    Code,
    Value,
    Variable,
    function,
)
from engine.backends.cpu.kernels.running.thread_pool import add_run

NAMES = ("rms_norm", "layer_norm")

ARGUMENTS = (
    "x", "token_stride", "head_stride", "n_tokens", "n_heads", "n", "weight", "bias",
    "weight_stride", "eps", "out",
)  # fmt: skip
"""Arguments of both kernels. x is F32, (n_tokens, n_heads, n), with strides in bytes; out has its
shape, contiguous. weight and bias are (n,) F32, or 0 for none; with a `weight_stride` (bytes), each
head has its own. eps: the bits of an F32."""

Term = Callable[[Value], Value]
"""Function of elements, to be summed."""


def build(module: ir.Module) -> None:
    """Write `rms_norm(pool, *ARGUMENTS)` and `layer_norm(pool, *ARGUMENTS)`."""
    add_run(module)
    for name in NAMES:
        add_row(module, name)
        with piece(module, name, ARGUMENTS) as (code, given, index):
            _emit_piece(code, name, given, index)
        add_kernel(module, name, ARGUMENTS, _n_pieces)


def _n_pieces(code: Code, given: Named) -> Value:
    per_piece = rows_per_piece(code, given["n_heads"] * given["n"])
    return ceil_div(given["n_tokens"], per_piece)


def _emit_piece(code: Code, name: str, given: Named, index: Value) -> None:
    n, n_heads = given["n"], given["n_heads"]
    per_piece = rows_per_piece(code, n_heads * n)
    stop = code.min_signed((index + 1) * per_piece, given["n_tokens"])
    none = code.number(0)
    with code.loop(index * per_piece, stop) as token, code.loop(none, n_heads) as head:
        x = given["x"] + token * given["token_stride"] + head * given["head_stride"]
        out = given["out"] + (token * n_heads + head) * n * 4
        weights = given["weight"], given["bias"], head * given["weight_stride"]
        code.call(f"{name}_row", VOID, x, n, *weights, given["eps"], out)


def add_row(module: ir.Module, name: str) -> None:
    """Write `name_row(x, n, weight, bias, offset, eps, out)`: one row; offset of its weights."""
    is_centred = name == "layer_norm"
    code, (x, n, weight, bias, offset, eps, out) = function(module, f"{name}_row", 7)
    code.builder.function.linkage = "internal"
    count = n.to(F32)
    zero = code.constant(F32, 0.0)
    centre = code.splat(_sum(code, x, n, lambda v: v) / count if is_centred else zero)

    def centred(v: Value) -> Value:
        return v - centre if is_centred else v

    def square(v: Value) -> Value:
        return centred(v) * centred(v)

    root = code.unary("sqrt", _sum(code, x, n, square) / count + eps.to(I32).bitcast(F32))
    factor = code.splat(code.constant(F32, 1.0) / root)

    def finish(lanes: SimdLanes) -> None:
        y = code.variable(centred(lanes.load(x)) * factor)
        with code.when(weight.differs(0)):
            y.set(y.get() * lanes.load(weight + offset))
        with code.when(bias.differs(0)):
            y.set(y.get() + lanes.load(bias + offset))
        lanes.store(y.get(), out)

    for_each_vector(code, n, finish)
    code.builder.ret_void()


def _sum(code: Code, x: Value, n: Value, term: Term) -> Value:
    sums = [code.variable(code.constant(FLOATS, 0.0)) for _ in range(4)]

    def add(lanes: SimdLanes, total: Variable = sums[0]) -> None:
        total.set(total.get() + lanes.only(term(lanes.load(x))))

    whole = n - n % (4 * LANES)
    with code.loop(code.number(0), whole, 4 * LANES) as index:
        for part, total in enumerate(sums):
            add(SimdLanes(code, index + part * LANES), total)
    for_each_vector(code, n, add, whole)
    first, second, third, fourth = (total.get() for total in sums)
    return code.reduce("add", (first + second) + (third + fourth))
