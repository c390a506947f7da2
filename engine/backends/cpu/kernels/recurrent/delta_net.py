"""Gated delta net, one token after the other, whatever the number of tokens of a pass.

For each token `D = exp(g) S; S = D + k ⊗ β (v - Dᵀ k); o = Sᵀ q`. No column of a head's state S
meets another one, so that threads share strips of columns (`kernels.recurrent.delta_strip`).
Neither the cuts of a pass nor the number of threads change a bit of the result.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir

from engine.backends.cpu.kernels.language import maths
from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.loops import (
    Named,
    SimdLanes,
    add_kernel,
    ceil_div,
    for_each_vector,
    piece,
)
from engine.backends.cpu.kernels.language.values import (  # fmt: skip
    F32,
    FLOATS,
    I8,
    I32,
    I64,
    LANES,
    VOID,
    Code,
    Value,
    Variable,
    function,
)
from engine.backends.cpu.kernels.recurrent import delta_strip
from engine.backends.cpu.kernels.recurrent.state_rows import chain_words, n_chains
from engine.backends.cpu.kernels.running.thread_pool import add_run

NAME = "delta_net"

ARGUMENTS = (
    "q", "q_stride", "k", "k_stride", "v", "v_stride", "step", "step_stride", "beta",
    "beta_stride", "step_bias", "rate", "key_of", "chains", "goals", "n_head", "n_key", "n_value",
    "scale", "eps", "state", "state_stride", "per_piece", "out",
)  # fmt: skip
"""Arguments of the kernel; see `forward.operands.DeltaInputs`. Strides are those between
tokens, in bytes; a token's elements have no gaps. key_of: int64 (n_head,), or 0. chains, goals: see
`kernels.recurrent.state_rows`. scale: factor on the normalised queries; it and eps are the bits of
an F32. state: (n_head, n_key, n_value) in each place, `state_stride` bytes apart. out: (T, n_head,
n_value), contiguous. per_piece: number of strips of a piece. With a decay by channel, step is (T,
n_head, n_key) and step_bias (n_head, n_key)."""

BLOCK = LANES
"""Number of tokens whose keys, queries and decays are prepared at a time."""

MAX_KEY = 1024
"""Largest number of elements of a key: a strip and the keys of a block must fit in the stack."""


def build(module: ir.Module, isa: Isa, *, by_channel: bool) -> None:
    """Write `delta_net(pool, *ARGUMENTS)`.

    Args:
        by_channel: whether each channel of a key has a decay of its own.
    """
    add_run(module)
    _add_normalise(module)
    delta_strip.add_strip(module, isa, by_channel=by_channel)
    columns = delta_strip.columns_of(isa)

    def n_pieces(code: Code, given: Named) -> Value:
        return ceil_div(_n_strips(code, given, columns), given["per_piece"])

    with piece(module, NAME, ARGUMENTS) as (code, given, index):
        _emit_piece(code, given, index, columns, by_channel=by_channel)
    add_kernel(module, NAME, ARGUMENTS, n_pieces)


def _n_strips(code: Code, given: Named, columns: int) -> Value:
    n_head = n_chains(code, given["chains"]) * given["n_head"]
    return n_head * ceil_div(given["n_value"], columns)


class _Block(NamedTuple):
    """Memory in the stack for the prepared tokens of a block; see `delta_strip.ARGUMENTS`."""

    keys: Value
    queries: Value
    decays: Value
    key_bytes: Value
    betas: Value

    @classmethod
    def reserve(cls, code: Code, n_key: Value) -> _Block:
        key_bytes = ceil_div(n_key, LANES) * (4 * LANES)
        keys, queries, decays = (_reserve(code, key_bytes * BLOCK) for _ in range(3))
        return cls(keys, queries, decays, key_bytes, _reserve(code, code.number(4 * BLOCK)))


def _reserve(code: Code, n_bytes: Value) -> Value:
    place = code.builder.alloca(I8, n_bytes.raw)
    place.align = 4 * LANES
    return Value(code, code.builder.ptrtoint(place, I64))


def _emit_piece(
    code: Code, given: Named, index: Value, columns: int, *, by_channel: bool
) -> None:  # fmt: skip
    n_key, n_value = given["n_key"], given["n_value"]
    n_strip = ceil_div(n_value, columns)
    stop = code.min_signed((index + 1) * given["per_piece"], _n_strips(code, given, columns))
    block, held = _Block.reserve(code, n_key), _reserve(code, n_key * (4 * columns))
    wide = n_value * 4
    out_stride = given["n_head"] * wide
    at = code.variable(index * given["per_piece"])
    with code.forever() as leave:
        leave(at.get() >= stop)
        place, first = at.get() // n_strip, at.get() % n_strip
        number, head = place // given["n_head"], place % given["n_head"]
        last = code.min_signed(n_strip, first + stop - at.get())
        begin, end, source, most = chain_words(code, given["chains"], number)
        size, held_at = code.min_signed(most, code.number(BLOCK)), code.variable(source)
        with code.loop(begin, end, size) as token:
            n = code.min_signed(end - token, size)
            _emit_block(code, given, head, token, n, block, by_channel=by_channel)
            v = given["v"] + token * given["v_stride"] + head * wide
            out = given["out"] + token * out_stride + head * wide
            state = given["state"] + held_at.get() * given["state_stride"] + head * n_key * wide
            held_at.set(code.load(given["goals"] + (token + n - 1) * 8, I64))
            goal = given["state"] + held_at.get() * given["state_stride"] + head * n_key * wide
            with code.loop(first, last) as strip:
                column = strip * columns
                code.call(
                    "strip", VOID, *block, n, n_key, v + column * 4, given["v_stride"],
                    out + column * 4, out_stride, state + column * 4, goal + column * 4, wide,
                    n_value - column, held,
                )  # fmt: skip
        at.set(at.get() + last - first)


def _emit_block(
    code: Code, given: Named, head: Value, token: Value, n: Value, block: _Block,
    *, by_channel: bool,
) -> None:  # fmt: skip
    """Prepare n tokens of a head: unit keys and queries, betas, and decay factors."""
    n_key = given["n_key"]
    key_head = code.variable(head)
    with code.when(given["key_of"].differs(0)):
        key_head.set(code.load(given["key_of"] + head * 8, I64))
    one = code.constant(F32, 1.0).bitcast(I32).to(I64)
    for name, goal, scale in (("k", block.keys, one), ("q", block.queries, given["scale"])):
        stride = given[f"{name}_stride"]
        rows = given[name] + token * stride + key_head.get() * n_key * 4
        code.call(
            "normalise_rows", VOID, rows, stride, n, n_key, scale, given["eps"], goal,
            block.key_bytes,
        )  # fmt: skip
    beta = given["beta"] + token * given["beta_stride"] + head * 4
    _gather(code, beta, given["beta_stride"], n, block.betas)
    code.store(maths.sigmoid(code, code.load(block.betas, FLOATS)), block.betas)
    _emit_decays(code, given, head, token, n, block, by_channel=by_channel)


def _emit_decays(
    code: Code, given: Named, head: Value, token: Value, n: Value, block: _Block,
    *, by_channel: bool,
) -> None:  # fmt: skip
    """Prepare the decay factors of n tokens of a head: `exp(rate × softplus(step + bias))`."""
    n_key, stride, goal = given["n_key"], given["step_stride"], block.decays
    steps, biases = given["step"] + token * stride, given["step_bias"]
    rate = code.splat(code.load(given["rate"] + head * 4, F32))

    def decay(step: Value, bias: Value) -> Value:
        return maths.exp(code, maths.softplus(code, step + bias) * rate)

    if not by_channel:
        _gather(code, steps + head * 4, stride, n, goal)
        bias = code.splat(code.load(biases + head * 4, F32))
        code.store(decay(code.load(goal, FLOATS), bias), goal)
        return
    own = head * n_key * 4
    with code.loop(code.number(0), n) as row:
        step, factors = steps + row * stride + own, goal + row * block.key_bytes

        def emit(lanes: SimdLanes) -> None:
            factor = decay(lanes.load(step), lanes.load(biases + own))
            code.store(factor, factors + lanes.index * 4)

        for_each_vector(code, n_key, emit)


def _gather(code: Code, source: Value, stride: Value, n: Value, goal: Value) -> None:
    """Copy n floats that lie `stride` bytes apart to one vector, with zeros behind them."""
    code.store(code.constant(FLOATS, 0.0), goal)
    with code.loop(code.number(0), n) as index:
        code.store(code.load(source + index * stride, F32), goal + index * 4)


def _add_normalise(module: ir.Module) -> None:
    """Write `normalise_rows(x, stride, n_row, n, scale, eps, out, out_stride)`.

    Each row becomes `x / max(|x|, eps) × scale`; zeros follow up to a multiple of 16 elements.
    """
    code, (x, stride, n_row, n, scale, eps, out, out_stride) = function(module, "normalise_rows", 8)
    code.builder.function.linkage = "internal"
    number, least = (bits.to(I32).bitcast(F32) for bits in (scale, eps))
    total = code.variable(code.constant(FLOATS, 0.0))
    with code.loop(code.number(0), n_row) as index:
        _emit_normalised(
            code, x + index * stride, n, number, least, out + index * out_stride, total
        )
    code.builder.ret_void()


def _emit_normalised(
    code: Code, x: Value, n: Value, scale: Value, eps: Value, out: Value, total: Variable
) -> None:
    total.set(code.constant(FLOATS, 0.0))

    def add(lanes: SimdLanes) -> None:
        numbers = lanes.load(x)
        total.set(code.fma(numbers, numbers, total.get()))

    for_each_vector(code, n, add)
    length = code.unary("sqrt", code.reduce("add", total.get()))
    factor = code.splat(scale / code.maximum(length, eps))
    for_each_vector(
        code, n, lambda lanes: code.store(lanes.load(x) * factor, out + lanes.index * 4)
    )
