"""Scans for state-space models (Mamba 1 and 2), one token after another.

For each token and state row, `S = decay × S + Δ x ⊗ b; y = S c + d x`, then `silu(gate) y`. Rows
are independent. Mamba 2 has heads of rows, with one decay per head and token; Mamba 1 is one head
in which each row (channel) has a step Δ and each state element a rate. Rows are computed in units
of `UNIT`; the bits depend neither on how a prompt is split nor on the number of threads.
"""

from __future__ import annotations

from typing import NamedTuple

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
from engine.backends.cpu.kernels.language.values import (  # fmt: skip
    F32,
    FLOATS,
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
from engine.backends.cpu.kernels.small.activation import activated

NAMES = ("selective_scan", "state_space_scan")

ARGUMENTS = (
    "x", "x_stride", "step", "step_stride", "step_bias", "a", "b", "b_stride", "c", "c_stride", "d",
    "gate", "gate_stride", "key_of", "chains", "goals", "n_head", "n_row", "n_state", "state",
    "state_stride", "per_piece", "out",
)  # fmt: skip
"""Arguments of both kernels; see `forward.operands.ScanInputs`, whose values are x. Strides
are the bytes between tokens; a token's elements have no gaps. key_of: group of each head,
int64 (n_head,), or 0. chains, goals: see `kernels.recurrent.state_rows`. state: (n_head, n_row,
n_state) in each place, `state_stride` bytes apart. out: (T, n_head, n_row), contiguous. per_piece:
number of units per piece. `selective_scan` (see `forward.ops.Ops`) has one head, step (T,
n_row), a (n_row, n_state), d (n_row,), and neither step_bias nor key_of."""

UNIT = LANES
"""Number of rows per unit."""

BLOCK = LANES
"""Number of tokens for which a unit's steps are prepared together."""

TOGETHER = 4
"""Number of rows that are computed together and share the loads of b and c."""

ROW = 4 * LANES
"""Distance in bytes between tokens in the prepared steps."""


def build(module: ir.Module) -> None:
    """Emit `selective_scan(pool, *ARGUMENTS)` and `state_space_scan(pool, *ARGUMENTS)`."""
    add_run(module)
    for name in NAMES:
        for n_rows in (TOGETHER, 1):
            _add_rows(module, name, n_rows)
        with piece(module, name, ARGUMENTS) as (code, given, index):
            _emit_piece(code, name, given, index)
        add_kernel(module, name, ARGUMENTS, _n_pieces)


def _n_units(code: Code, given: Named) -> Value:
    n_head = n_chains(code, given["chains"]) * given["n_head"]
    return n_head * ceil_div(given["n_row"], UNIT)


def _n_pieces(code: Code, given: Named) -> Value:
    return ceil_div(_n_units(code, given), given["per_piece"])


class _Unit(NamedTuple):
    """A unit of rows in one head of a chain, for the tokens in a block.

    Attributes:
        place: slot of the state before the next token.
        head: the head.
        row: index of the first row within the head.
        rows: the rows.
        token: index of the first token in the pass.
        n_token: number of tokens.
        written: address of Δ x for each token and row.
        sums: address of one number per row.
        steps: address of Δ for each token and row (Mamba 1), or each token's decay (Mamba 2).
    """

    place: Variable
    head: Value
    row: Value
    rows: SimdLanes
    token: Value
    n_token: Value
    written: Value
    sums: Value
    steps: Value


def _emit_piece(code: Code, name: str, given: Named, index: Value) -> None:
    written, steps = (code.stack_buffer(F32, BLOCK * LANES) for _ in range(2))
    sums = code.stack_buffer(F32, LANES)
    stop = code.min_signed((index + 1) * given["per_piece"], _n_units(code, given))
    per_head = ceil_div(given["n_row"], UNIT)
    with code.loop(index * given["per_piece"], stop) as unit:
        of_heads, row = unit // per_head, unit % per_head * UNIT
        number, head = of_heads // given["n_head"], of_heads % given["n_head"]
        rows = SimdLanes(code, code.number(0), given["n_row"] - row)
        begin, end, source, _ = chain_words(code, given["chains"], number)
        place = code.variable(source)
        with code.loop(begin, end, BLOCK) as token:
            n = code.min_signed(end - token, code.number(BLOCK))
            one = _Unit(place, head, row, rows, token, n, written, sums, steps)
            if name == "selective_scan":
                _emit_steps(code, given, one)
            else:
                _emit_decays(code, given, one)
            _emit_rows(code, name, given, one)


def _of_token(given: Named, name: str, unit: _Unit, token: Value) -> Value:
    row = unit.head * given["n_row"] + unit.row
    return given[name] + (unit.token + token) * given[f"{name}_stride"] + row * 4


def _emit_steps(code: Code, given: Named, unit: _Unit) -> None:
    """Prepare Δ and Δ x for each row and token."""
    with code.loop(code.number(0), unit.n_token) as token:
        step = unit.rows.load(_of_token(given, "step", unit, token))
        step = maths.softplus(code, step)
        code.store(step, unit.steps + token * ROW)
        x = unit.rows.load(_of_token(given, "x", unit, token))
        code.store(step * x, unit.written + token * ROW)
        _prefetch(code, given, unit, token)
        code.prefetch(_of_token(given, "step", unit, token + BLOCK))


def _emit_decays(code: Code, given: Named, unit: _Unit) -> None:
    """Prepare each token's decay, and Δ x for each row and token."""
    step, stride, none = given["step"] + unit.head * 4, given["step_stride"], code.number(0)
    code.store(code.constant(FLOATS, 0.0), unit.steps)
    with code.loop(none, unit.n_token) as token:
        number = code.load(step + (unit.token + token) * stride, F32)
        code.store(number, unit.steps + token * 4)
    bias, rate = (code.splat(code.load(given[n] + unit.head * 4, F32)) for n in ("step_bias", "a"))
    steps = maths.softplus(code, code.load(unit.steps, FLOATS) + bias)
    code.store(steps, unit.steps)
    with code.loop(none, unit.n_token) as token:
        x = unit.rows.load(_of_token(given, "x", unit, token))
        step_of = code.splat(code.load(unit.steps + token * 4, F32))
        code.store(step_of * x, unit.written + token * ROW)
        _prefetch(code, given, unit, token)
    code.store(maths.exp(code, steps * rate), unit.steps)


def _prefetch(code: Code, given: Named, unit: _Unit, token: Value) -> None:
    """Prefetch a token's gate, its result, and the values of a token in the next block.

    Tokens are in different memory pages, and hardware prefetchers stop at page boundaries.
    """
    code.prefetch(_of_token(given, "gate", unit, token))
    code.prefetch(_out(given, unit, token))
    code.prefetch(_of_token(given, "x", unit, token + BLOCK))


def _out(given: Named, unit: _Unit, token: Value) -> Value:
    place = (unit.token + token) * given["n_head"] + unit.head
    return given["out"] + (place * given["n_row"] + unit.row) * 4


def _emit_rows(code: Code, name: str, given: Named, unit: _Unit) -> None:
    """Emit the loop over the block's tokens and the unit's rows.

    Rows are the inner loop, so that a token's b and c stay in the cache.
    """
    group = code.variable(unit.head)
    with code.when(given["key_of"].differs(0)):
        group.set(code.load(given["key_of"] + unit.head * 8, I64))
    offset, n_state = group.get() * given["n_state"] * 4, given["n_state"]
    first = unit.head * given["n_row"] + unit.row
    states, stride = given["state"] + first * n_state * 4, given["state_stride"]
    n = code.min_signed(given["n_row"] - unit.row, code.number(UNIT))
    whole = n - n % TOGETHER
    with code.loop(code.number(0), unit.n_token) as token:
        b, c = (
            given[part] + (unit.token + token) * given[f"{part}_stride"] + offset for part in "bc"
        )
        before = states + unit.place.get() * stride
        unit.place.set(code.load(given["goals"] + (unit.token + token) * 8, I64))
        after = states + unit.place.get() * stride
        for n_rows, start, stop in ((TOGETHER, code.number(0), whole), (1, whole, n)):
            with code.loop(start, stop, n_rows) as row:
                steps, rates = unit.steps + token * 4, given["a"]
                if name == "selective_scan":
                    steps = unit.steps + token * ROW + row * 4
                    rates = rates + (first + row) * n_state * 4
                code.call(
                    f"{name}_{n_rows}", VOID, unit.written + token * ROW + row * 4, steps, rates,
                    b, c, n_state, before + row * n_state * 4, after + row * n_state * 4,
                    unit.sums + row * 4,
                )  # fmt: skip
        _emit_result(code, name, given, unit, token)


def _emit_result(code: Code, name: str, given: Named, unit: _Unit, token: Value) -> None:
    """Add d x to a token's sums, and apply the gate."""
    if name == "selective_scan":
        skip = unit.rows.load(given["d"] + unit.row * 4)
    else:
        skip = code.splat(code.load(given["d"] + unit.head * 4, F32))
    x = unit.rows.load(_of_token(given, "x", unit, token))
    gate = unit.rows.load(_of_token(given, "gate", unit, token))
    y = code.fma(skip, x, unit.rows.load(unit.sums))
    unit.rows.store(activated(code, "silu", gate) * y, _out(given, unit, token))


def _add_rows(module: ir.Module, name: str, n_rows: int) -> None:
    """Emit `name_n(written, steps, rates, b, c, n_state, before, after, sums)`: one token, n rows.

    The rows' states before the token are adjacent in memory, as are those after it, and the sums.
    Both states may be in the same memory.
    """
    code, values = internal(module, f"{name}_{n_rows}", 9)
    written, steps, rates, b, c, n_state, before, after, sums = values
    rows = range(n_rows)
    totals = [code.variable(code.constant(FLOATS, 0.0)) for _ in rows]
    inputs = [code.splat(code.load(written + 4 * row, F32)) for row in rows]
    if name == "selective_scan":
        factors = [code.splat(code.load(steps + 4 * row, F32)) for row in rows]
    else:
        factors = [code.splat(code.load(steps, F32))] * n_rows

    def visit(lanes: SimdLanes) -> None:
        keys, queries = lanes.load(b), lanes.load(c)
        for row in rows:
            at, decay = n_state * (4 * row), factors[row]
            if name == "selective_scan":
                decay = maths.exp(code, decay * lanes.load(rates + at))
            held = code.fma(inputs[row], keys, decay * lanes.load(before + at))
            lanes.store(held, after + at)
            totals[row].set(code.fma(lanes.only(held), queries, totals[row].get()))

    for_each_vector(code, n_state, visit)
    code.store(code.reduce_each([total.get() for total in totals]), sums)
    code.builder.ret_void()
