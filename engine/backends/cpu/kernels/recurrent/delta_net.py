"""Gated delta net, token by token.

For each token, `D = exp(g) S; S = D + k ⊗ β (v - Dᵀ k); o = Sᵀ q`. The columns of a head's state S
are independent, so the work is split into strips of columns. The bits depend neither on how a
prompt is split nor on the number of threads.

A strip is copied to memory that stays in the core's cache, and is visited once per token. The visit
adds the token's write, reads the output, applies the next token's decay and reads the value for its
key. Rows are added from first to last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    internal,
)
from engine.backends.cpu.kernels.recurrent.state_rows import chain_words, n_chains
from engine.backends.cpu.kernels.running.thread_pool import add_run

NAME = "delta_net"

ARGUMENTS = (
    "q", "q_stride", "k", "k_stride", "v", "v_stride", "step", "step_stride", "beta",
    "beta_stride", "step_bias", "rate", "key_of", "chains", "goals", "n_head", "n_key", "n_value",
    "scale", "eps", "state", "state_stride", "per_piece", "out",
)  # fmt: skip
"""The kernel's arguments; see `forward.operands.DeltaInputs`. Strides are the bytes between
tokens; a token's elements have no gaps. key_of: int64 (n_head,), or 0. chains, goals: see
`kernels.recurrent.state_rows`. scale: factor for the normalised queries; scale and eps are F32
bits. state: (n_head, n_key, n_value) in each place, `state_stride` bytes apart. out: (T, n_head,
n_value), contiguous. per_piece: number of strips per piece. With decay by channel, step is (T,
n_head, n_key) and step_bias (n_head, n_key)."""

BLOCK = LANES
"""Number of tokens per block, whose keys, queries and decays are prepared together."""

MAX_KEY = 1024
"""Largest number of elements in a key, as a strip and a block's keys must fit on the stack."""


def build(module: ir.Module, isa: Isa, *, by_channel: bool) -> None:
    """Emit `delta_net(pool, *ARGUMENTS)`.

    Args:
        by_channel: whether each of a key's channels has a separate decay.
    """
    add_run(module)
    _add_normalise(module)
    _add_strip(module, isa, by_channel=by_channel)
    columns = columns_of(isa)

    def n_pieces(code: Code, given: Named) -> Value:
        return ceil_div(_n_strips(code, given, columns), given["per_piece"])

    with piece(module, NAME, ARGUMENTS) as (code, given, index):
        _emit_piece(code, given, index, columns, by_channel=by_channel)
    add_kernel(module, NAME, ARGUMENTS, n_pieces)


def _n_strips(code: Code, given: Named, columns: int) -> Value:
    n_head = n_chains(code, given["chains"]) * given["n_head"]
    return n_head * ceil_div(given["n_value"], columns)


class _Block(NamedTuple):
    """Stack memory for a block's prepared tokens; see `STRIP`."""

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
    """Prepare a head's n tokens: unit keys and queries, betas, and decay factors."""
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
    """Prepare a head's decay factors for n tokens: `exp(rate × softplus(step + bias))`."""
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
    """Copy n floats that are `stride` bytes apart into one vector, padded with zeros."""
    code.store(code.constant(FLOATS, 0.0), goal)
    with code.loop(code.number(0), n) as index:
        code.store(code.load(source + index * stride, F32), goal + index * 4)


def _add_normalise(module: ir.Module) -> None:
    """Emit `normalise_rows(x, stride, n_row, n, scale, eps, out, out_stride)`.

    Each row becomes `x / max(|x|, eps) × scale`, padded with zeros to a multiple of 16 elements.
    """
    code, (x, stride, n_row, n, scale, eps, out, out_stride) = internal(module, "normalise_rows", 8)
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


STRIP = (
    "keys", "queries", "decays", "key_bytes", "betas", "n_token", "n_key", "v", "v_stride", "out",
    "out_stride", "state", "goal", "state_stride", "n_left", "held",
)  # fmt: skip
"""Arguments of the strip functions. keys, queries: unit vectors of n_key F32, `key_bytes` apart.
decays: one factor per token or, by channel, a vector like a key. betas: one factor per token. v and
out: the strip's columns for the first token; state and goal: its columns in the first row, before
and after the tokens. Strides are in bytes. n_left: number of columns from here to the end of the
state. held: memory for n_key rows of the strip."""

ROWS_AT_ONCE = 4
"""Unroll factor for the loop over rows."""

Visit = Callable[[Value], None]
"""Function that emits the visit to a row, given its index."""


def columns_of(isa: Isa) -> int:
    """Return the number of columns per strip for which its sums fit in registers."""
    return (2 if isa.register_bytes == 4 * LANES else 1) * LANES


def _add_strip(module: ir.Module, isa: Isa, *, by_channel: bool) -> None:
    columns = columns_of(isa)
    for is_whole in (True, False):
        code, values = internal(module, _part_name(is_whole=is_whole), len(STRIP))
        _Strip(code, values, columns, by_channel=by_channel, is_whole=is_whole).emit()
        code.builder.ret_void()
    code, values = internal(module, "strip", len(STRIP))
    with code.if_else(values[STRIP.index("n_left")] >= columns) as branches:
        for branch, is_whole in zip(branches, (True, False), strict=True):
            with branch:
                code.call(_part_name(is_whole=is_whole), VOID, *values)
    code.builder.ret_void()


def _part_name(*, is_whole: bool) -> str:
    return "whole_strip" if is_whole else "partial_strip"


class _Strip:
    """Generates the code for a strip; `is_whole` if the state has all the strip's columns."""

    def __init__(
        self, code: Code, values: list[Value], columns: int, *, by_channel: bool, is_whole: bool
    ) -> None:
        self._code = code
        self._given = dict(zip(STRIP, values, strict=True))
        self._by_channel = by_channel
        self._row_bytes = 4 * columns
        left = self._given["n_left"]
        self._lanes = [
            SimdLanes(code, code.number(at), None if is_whole else left - at)
            for at in range(0, columns, LANES)
        ]
        zero = code.constant(FLOATS, 0.0)
        self._factor = code.variable(zero)
        self._read, self._out, self._written = (
            [code.variable(zero) for _ in self._lanes] for _ in range(3)
        )

    def emit(self) -> None:
        code, given, none = self._code, self._given, self._code.number(0)
        self._set_factor(none)
        self._each_row(self._begin)
        last = given["n_token"] - 1
        with code.loop(none, last) as token:
            self._set_written(token)
            self._set_factor(token + 1)
            self._each_row(lambda row: self._step(row, token))
            self._store_out(token)
        self._set_written(last)
        self._each_row(lambda row: self._end(row, last))
        self._store_out(last)

    def _each_row(self, visit: Visit) -> None:
        """Clear the sums, then loop over the rows."""
        code, n = self._code, self._given["n_key"]
        for total in (*self._read, *self._out):
            total.set(code.constant(FLOATS, 0.0))
        whole = n - n % ROWS_AT_ONCE
        with code.loop(code.number(0), whole, ROWS_AT_ONCE) as row:
            for extra in range(ROWS_AT_ONCE):
                visit(row + extra)
        with code.loop(whole, n) as row:
            visit(row)

    def _begin(self, row: Value) -> None:
        state = self._given["state"] + row * self._given["state_stride"]
        vectors = [lanes.load(state) for lanes in self._lanes]
        self._decay(row, self._code.number(0), vectors)

    def _step(self, row: Value, token: Value) -> None:
        self._decay(row, token + 1, self._write(row, token))

    def _end(self, row: Value, token: Value) -> None:
        goal = self._given["goal"] + row * self._given["state_stride"]
        for lanes, vector in zip(self._lanes, self._write(row, token), strict=True):
            lanes.store(vector, goal)

    def _write(self, row: Value, token: Value) -> list[Value]:
        """Add a token's write to a row, and the row to the output; return the row."""
        code = self._code
        key, query = (self._number(name, row, token) for name in ("keys", "queries"))
        vectors = []
        for n, (written, total) in enumerate(zip(self._written, self._out, strict=True)):
            vector = code.fma(key, written.get(), code.load(self._place(n, row), FLOATS))
            total.set(code.fma(query, vector, total.get()))
            vectors.append(vector)
        return vectors

    def _decay(self, row: Value, token: Value, vectors: Sequence[Value]) -> None:
        """Apply a token's decay to a row, store it, and add it to the value for the token's key."""
        code, key = self._code, self._number("keys", row, token)
        factor = self._number("decays", row, token) if self._by_channel else self._factor.get()
        for n, (vector, total) in enumerate(zip(vectors, self._read, strict=True)):
            decayed = vector * factor
            code.store(decayed, self._place(n, row))
            total.set(code.fma(key, decayed, total.get()))

    def _place(self, n: int, row: Value) -> Value:
        return self._given["held"] + row * self._row_bytes + 4 * LANES * n

    def _number(self, name: str, row: Value, token: Value) -> Value:
        given = self._given
        address = given[name] + token * given["key_bytes"] + row * 4
        return self._code.splat(self._code.load(address, F32))

    def _of_token(self, name: str, token: Value) -> Value:
        return self._code.splat(self._code.load(self._given[name] + token * 4, F32))

    def _set_factor(self, token: Value) -> None:
        if not self._by_channel:
            self._factor.set(self._of_token("decays", token))

    def _set_written(self, token: Value) -> None:
        """Compute a token's write: `β (v - Dᵀ k)`."""
        v = self._given["v"] + token * self._given["v_stride"]
        self._prefetch(v, self._given["v_stride"])
        beta = self._of_token("betas", token)
        for lanes, seen, written in zip(self._lanes, self._read, self._written, strict=True):
            written.set(beta * (lanes.load(v) - seen.get()))

    def _store_out(self, token: Value) -> None:
        out = self._given["out"] + token * self._given["out_stride"]
        self._prefetch(out, self._given["out_stride"])
        for lanes, total in zip(self._lanes, self._out, strict=True):
            lanes.store(total.get(), out)

    def _prefetch(self, row: Value, stride: Value) -> None:
        """Prefetch the strip's columns for the next token, which are in another memory page."""
        for lanes in self._lanes:
            self._code.prefetch(row + stride + lanes.index * 4)
