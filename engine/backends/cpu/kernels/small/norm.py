"""RMSNorm and LayerNorm: `y = x / sqrt(mean(x²) + eps) × weight + bias`; LayerNorm first centres x.

Sums are accumulated in four vectors, always in the same order. `build_sums` fuses an addition to
the residual stream with the next norm, with the same bits as the separate operations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from llvmlite import ir

from engine.backends.cpu.kernels.language.loops import (
    Named,
    SimdLanes,
    add_row_kernel,
    for_each_vector,
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
    internal,
)
from engine.backends.cpu.kernels.running.thread_pool import add_run

NAMES = ("rms_norm", "layer_norm")

ARGUMENTS = (
    "x", "token_stride", "head_stride", "n_tokens", "n_heads", "n", "weight", "bias",
    "weight_stride", "eps", "out",
)  # fmt: skip
"""Arguments of both kernels. x is F32, (n_tokens, n_heads, n), with strides in bytes; out has its
shape, contiguous. weight and bias are (n,) F32, or 0 for none; with a `weight_stride` (bytes), each
head has its own. eps: F32 bits."""

SUM_NAMES = tuple(f"add_{name}" for name in NAMES)

SUM_ARGUMENTS = (
    "x", "x_stride", "delta", "delta_stride", "n_tokens", "n", "weight", "bias", "eps", "total",
    "out",
)  # fmt: skip
"""Arguments of the kernels from `build_sums`. x and delta are F32, (n_tokens, n), with strides in
bytes; total, their sum, and out have that shape, contiguous. The others are as in `ARGUMENTS`."""


def build(module: ir.Module) -> None:
    """Emit `rms_norm(pool, *ARGUMENTS)` and `layer_norm(pool, *ARGUMENTS)`."""
    add_run(module)

    def emit(name: str, code: Code, given: Named, token: Value) -> None:
        n, n_heads = given["n"], given["n_heads"]
        with code.loop(code.number(0), n_heads) as head:
            x = given["x"] + token * given["token_stride"] + head * given["head_stride"]
            out = given["out"] + (token * n_heads + head) * n * 4
            weights = given["weight"], given["bias"], head * given["weight_stride"]
            code.call(f"{name}_row", VOID, x, n, *weights, given["eps"], out)

    for name in NAMES:
        _add_row(module, name)
        add_row_kernel(
            module, name, ARGUMENTS, lambda given: given["n_heads"] * given["n"],
            partial(emit, name),
        )  # fmt: skip


def build_sums(module: ir.Module) -> None:
    """Emit `add_rms_norm(pool, *SUM_ARGUMENTS)` and `add_layer_norm(pool, *SUM_ARGUMENTS)`."""
    add_run(module)

    def emit(name: str, code: Code, given: Named, token: Value) -> None:
        n = given["n"]
        x = given["x"] + token * given["x_stride"]
        delta = given["delta"] + token * given["delta_stride"]
        total, out = (given[place] + token * n * 4 for place in ("total", "out"))
        for_each_vector(
            code, n, lambda lanes: lanes.store(lanes.load(x) + lanes.load(delta), total)
        )
        weights = given["weight"], given["bias"], code.number(0)
        code.call(f"{name}_row", VOID, total, n, *weights, given["eps"], out)

    for name, sum_name in zip(NAMES, SUM_NAMES, strict=True):
        _add_row(module, name)
        add_row_kernel(
            module, sum_name, SUM_ARGUMENTS, lambda given: given["n"], partial(emit, name)
        )


def _add_row(module: ir.Module, name: str) -> None:
    """Emit `name_row(x, n, weight, bias, offset, eps, out)`: one row; its weights are at offset."""
    is_centred = name == "layer_norm"
    code, (x, n, weight, bias, offset, eps, out) = internal(module, f"{name}_row", 7)
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


def _sum(code: Code, x: Value, n: Value, term: Callable[[Value], Value]) -> Value:
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
