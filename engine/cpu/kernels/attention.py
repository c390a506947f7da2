"""Softmax attention of one token's queries over the KV cache, read once and in its own type.

A query head's result is `Σ_s exp(x_s) v_s / Σ_s exp(x_s)` with scores `x_s = scale × q·k_s`,
further `softcap × tanh(x / softcap)`, plus `slope × (s - position of the query)`; a sink is a score
without a value. The work is split by query heads that share a key-value head and by PIECE
positions, whatever the number of threads, so that the bits do not depend on it. A piece goes
through BLOCK positions at a time and keeps for each head the largest score m, `Σ exp(x - m)` and
`Σ exp(x - m) v` (online softmax, arXiv 2205.14135); then the pieces of a head are merged in order.
"""

from __future__ import annotations

from llvmlite import ir

from engine.config.kv_types import KVTypes
from engine.cpu.kernels import maths
from engine.cpu.kernels.attention_tile import (  # fmt: skip
    BLOCK,
    FACTOR,
    LARGEST,
    MINUS_INFINITY,
    STATE_BYTES,
    SUM,
    add_parts,
)
from engine.cpu.kernels.isa import Isa
from engine.cpu.kernels.parallel_for import Named, ceil_div, piece, share
from engine.cpu.kernels.team import add_run
from engine.cpu.kernels.values import (  # fmt: skip
    F32,
    FLOATS,
    I32,
    I64,
    LANES,
    VOID,
    Code,
    Value,
    function,
)
from engine.cpu.kernels.vector_loop import SimdLanes, for_each_vector

PIECE = 256
"""Positions of a piece, a multiple of BLOCK."""

HEADS = 8
"""Largest number of query heads of a piece."""

ARGUMENTS = (
    "q", "k", "k_stride", "k_head_stride", "v", "v_stride", "v_head_stride", "head_dim_k",
    "head_dim_v", "span", "groups", "n_groups", "n_heads", "scale", "softcap", "sinks", "slopes",
    "work", "out",
)  # fmt: skip
"""Arguments of the kernel. q is (n_heads, head_dim_k) F32, out (n_heads, head_dim_v) F32. k and v
are the cache's rows of each position, `k_stride` bytes apart, with `k_head_stride` bytes from head
to head. span: address of two 64-bit integers, first and stop; the visible positions are first …
stop - 1, and the query is at the last of them. groups: (n_groups, 3) 64-bit integers: a key-value
head, the first query head that uses it, and the number of these, up to HEADS. scale and softcap
are the bits of F32; sinks and slopes are (n_heads,) F32, or 0. work: `work_bytes` of memory."""

INNER = ("first", "stop", *ARGUMENTS)
"""Arguments of the pieces."""

MERGED_ALONE = 4
"""Largest number of pieces of a head that the calling thread merges alone."""


def work_bytes(n_heads: int, head_dim_v: int, n_positions: int) -> int:
    """Return the scratch memory that a call needs, in bytes."""
    row = -(-head_dim_v // LANES) * 4 * LANES + STATE_BYTES
    return -(-n_positions // PIECE) * n_heads * row


def build(module: ir.Module, isa: Isa, types: KVTypes) -> None:
    """Write `attend(team, *ARGUMENTS)` for the types of the cache."""
    add_run(module)
    add_parts(module, isa, types)
    with piece(module, "attend", INNER) as (code, given, index):
        _emit_piece(code, given, index)
    _add_head(module)
    with piece(module, "merge", INNER) as (code, given, index):
        _, head, n = code.load_array(given["groups"] + index * 24, 3)
        with code.loop(head, head + n) as one:
            code.call("head", VOID, *_merged(given, one))
    code, (team, *values) = function(module, "attend", 1 + len(ARGUMENTS))
    values = [*code.load_array(values[ARGUMENTS.index("span")], 2), *values]
    place, given = code.stack_array(values), dict(zip(INNER, values, strict=True))
    n_pieces, n_groups = _n_pieces(given), given["n_groups"]
    share(code, "attend", team, place, n_groups * n_pieces)
    with code.if_else(n_pieces > MERGED_ALONE) as (many, few):
        with many:
            share(code, "merge", team, place, n_groups)
        with few, code.loop(code.number(0), n_groups) as group:
            code.call("merge_piece", VOID, place, group)
    code.builder.ret_void()


def _n_pieces(given: Named) -> Value:
    """Return the number of pieces of each head."""
    return ceil_div(given["stop"] - given["first"], PIECE)


def _value_bytes(given: Named) -> Value:
    """Return the size of a head's values in the scratch memory, in bytes; its state follows."""
    return ceil_div(given["head_dim_v"], LANES) * (4 * LANES)


def _emit_piece(code: Code, given: Named, index: Value) -> None:
    """Write a piece: some query heads of one key-value head, over PIECE positions."""
    part = index % _n_pieces(given)
    kv, head, n = code.load_array(given["groups"] + index // _n_pieces(given) * 24, 3)
    k, v = given["k"] + kv * given["k_head_stride"], given["v"] + kv * given["v_head_stride"]
    dim_k, dim_v = given["head_dim_k"], given["head_dim_v"]
    row_bytes = _value_bytes(given) + STATE_BYTES
    row = given["work"] + (part * given["n_heads"] + head) * row_bytes
    state = row + _value_bytes(given)
    space = code.builder.alloca(F32, HEADS * BLOCK)
    scores = Value(code, code.builder.ptrtoint(space, I64))
    start = given["first"] + part * PIECE
    stop = code.min_signed(start + PIECE, given["stop"])
    with code.loop(start, stop, BLOCK) as at:
        count = code.min_signed(stop - at, code.number(BLOCK))
        is_first = at.equals(start).to(I64, signed=False)
        keys = k + at * given["k_stride"]
        code.call(
            "scores", VOID, n, given["q"] + head * dim_k * 4, dim_k, keys, given["k_stride"],
            count, v + at * given["v_stride"], given["v_stride"], scores,
        )  # fmt: skip
        with code.loop(code.number(0), n) as one:
            slope = code.variable(code.number(0))
            with code.when(given["slopes"].differs(0)):
                slope.set(code.load(given["slopes"] + (head + one) * 4, I32).to(I64))
            code.call(
                "online_softmax", VOID, scores + one * (4 * BLOCK), count, at - given["stop"] + 1,
                given["scale"], given["softcap"], slope.get(), state + one * row_bytes, is_first,
            )  # fmt: skip
        later = code.where(at + BLOCK < given["stop"], at + BLOCK, at)
        code.call(
            "weighted_sum", VOID, n, scores, count, v + at * given["v_stride"], given["v_stride"],
            k + later * given["k_stride"], given["k_stride"], dim_v, state - row, row, row_bytes,
            is_first,
        )  # fmt: skip


def _merged(given: Named, head: Value) -> tuple[Value, ...]:
    """Return the arguments of `head` for one query head."""
    row_bytes = _value_bytes(given) + STATE_BYTES
    row, dim = given["work"] + head * row_bytes, given["head_dim_v"]
    out = given["out"] + head * dim * 4
    state, apart = row + _value_bytes(given), given["n_heads"] * row_bytes
    return row, state, apart, _n_pieces(given), dim, given["sinks"], head, out


def _add_head(module: ir.Module) -> None:
    """Write `head(row, state, apart, n_pieces, head_dim, sinks, head, out)`.

    Merges the pieces of a head. The first has its values at `row` and its state at `state`; the
    next ones follow `apart` bytes on.
    """
    code, (row, state, apart, n_pieces, dim, sinks, head, out) = function(module, "head", 8)
    code.builder.function.linkage = "internal"
    zero, least = code.constant(F32, 0.0), code.constant(F32, MINUS_INFINITY)
    top, sink = code.variable(least), code.variable(least)
    with code.when(sinks.differs(0)):
        sink.set(code.load(sinks + head * 4, F32))
        top.set(sink.get())
    with code.loop(code.number(0), n_pieces) as n:
        top.set(code.maximum(top.get(), code.load(state + n * apart + LARGEST, F32)))
    base = code.where(top.get() > least, top.get(), zero)
    total = code.variable(maths.exp(code, sink.get() - base))
    with code.loop(code.number(0), n_pieces) as n:
        place = state + n * apart
        factor = maths.exp(code, code.load(place + LARGEST, F32) - base)
        code.store(factor, place + FACTOR)
        total.set(code.fma(code.load(place + SUM, F32), factor, total.get()))
    inverse = code.constant(F32, 1.0) / total.get()

    def finish(lanes: SimdLanes) -> None:
        result = code.variable(code.constant(FLOATS, 0.0))
        with code.loop(code.number(0), n_pieces) as n:
            factor = code.splat(code.load(state + n * apart + FACTOR, F32))
            values = code.load(row + n * apart + lanes.index * 4, FLOATS)
            result.set(code.fma(values, factor, result.get()))
        lanes.store(result.get() * code.splat(inverse), out)

    for_each_vector(code, dim, finish)
    code.builder.ret_void()
