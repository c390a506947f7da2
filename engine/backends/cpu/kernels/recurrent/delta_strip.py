"""A strip of a delta net's state: some columns of one head, over the tokens of a block.

The strip is copied to memory that stays in the core's cache and is visited once for each token. The
visit adds what the token writes, reads the output, applies the next token's decay and reads what
its key holds. Sums over the rows go from the first to the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.loops import SimdLanes
from engine.backends.cpu.kernels.language.values import (
    F32,
    FLOATS,
    LANES,
    VOID,
    Code,
    Value,
    function,
)

ARGUMENTS = (
    "keys", "queries", "decays", "key_bytes", "betas", "n_token", "n_key", "v", "v_stride", "out",
    "out_stride", "state", "goal", "state_stride", "n_left", "held",
)  # fmt: skip
"""Arguments of the function. keys, queries: unit vectors of n_key F32, `key_bytes` from token to
token. decays: a factor for each token or, by channel, as many as a key has, as far apart as keys.
betas: a factor for each token. v and out: the strip's columns for the first token; state and goal:
those of the first row before and behind the tokens. Strides are in bytes. n_left: number of columns
up to the state's last one. held: memory for n_key rows of the strip."""

ROWS = 4
"""Number of rows that the body of a loop visits."""

Visit = Callable[[Value], None]
"""Function that writes the visit of the row with some number."""


def columns_of(isa: Isa) -> int:
    """Return the number of columns of a strip, all of whose sums fit in registers."""
    return (2 if isa.register_bytes == 4 * LANES else 1) * LANES


def add_strip(module: ir.Module, isa: Isa, *, by_channel: bool) -> None:
    """Write `strip(*ARGUMENTS)`.

    Args:
        by_channel: whether each row decays by a factor of its own.
    """
    columns = columns_of(isa)
    for is_whole in (True, False):
        code, values = function(module, _part(is_whole=is_whole), len(ARGUMENTS))
        code.builder.function.linkage = "internal"
        _Strip(code, values, columns, by_channel=by_channel, is_whole=is_whole).emit()
        code.builder.ret_void()
    code, values = function(module, "strip", len(ARGUMENTS))
    code.builder.function.linkage = "internal"
    with code.if_else(values[ARGUMENTS.index("n_left")] >= columns) as branches:
        for branch, is_whole in zip(branches, (True, False), strict=True):
            with branch:
                code.call(_part(is_whole=is_whole), VOID, *values)
    code.builder.ret_void()


def _part(*, is_whole: bool) -> str:
    return "whole_strip" if is_whole else "partial_strip"


class _Strip:
    """The code of one strip.

    Args:
        values: values of `ARGUMENTS`.
        is_whole: whether the state has all columns of the strip.
    """

    def __init__(
        self, code: Code, values: list[Value], columns: int, *, by_channel: bool, is_whole: bool
    ) -> None:
        self._code = code
        self._given = dict(zip(ARGUMENTS, values, strict=True))
        self._by_channel = by_channel
        self._row_bytes = 4 * columns
        left = self._given["n_left"]
        self._lanes = [
            SimdLanes(code, code.number(at), None if is_whole else left - at)
            for at in range(0, columns, LANES)
        ]
        zero = code.constant(FLOATS, 0.0)
        self._factor = code.variable(zero)
        self._seen, self._out, self._written = (
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
            self._each_row(lambda row: self._go_on(row, token))
            self._store_out(token)
        self._set_written(last)
        self._each_row(lambda row: self._end(row, last))
        self._store_out(last)

    def _each_row(self, visit: Visit) -> None:
        """Write a loop over the rows; clears the sums first."""
        code, n = self._code, self._given["n_key"]
        for total in (*self._seen, *self._out):
            total.set(code.constant(FLOATS, 0.0))
        whole = n - n % ROWS
        with code.loop(code.number(0), whole, ROWS) as row:
            for extra in range(ROWS):
                visit(row + extra)
        with code.loop(whole, n) as row:
            visit(row)

    def _begin(self, row: Value) -> None:
        state = self._given["state"] + row * self._given["state_stride"]
        vectors = [lanes.load(state) for lanes in self._lanes]
        self._decay(row, self._code.number(0), vectors)

    def _go_on(self, row: Value, token: Value) -> None:
        self._decay(row, token + 1, self._write(row, token))

    def _end(self, row: Value, token: Value) -> None:
        goal = self._given["goal"] + row * self._given["state_stride"]
        for lanes, vector in zip(self._lanes, self._write(row, token), strict=True):
            lanes.store(vector, goal)

    def _write(self, row: Value, token: Value) -> list[Value]:
        """Return a row with what a token writes, and read the output from it."""
        code = self._code
        key, query = (self._number(name, row, token) for name in ("keys", "queries"))
        vectors = []
        for n, (written, total) in enumerate(zip(self._written, self._out, strict=True)):
            vector = code.fma(key, written.get(), code.load(self._place(n, row), FLOATS))
            total.set(code.fma(query, vector, total.get()))
            vectors.append(vector)
        return vectors

    def _decay(self, row: Value, token: Value, vectors: Sequence[Value]) -> None:
        """Keep a row, decayed for a token, and read what the token's key holds."""
        code, key = self._code, self._number("keys", row, token)
        factor = self._number("decays", row, token) if self._by_channel else self._factor.get()
        for n, (vector, total) in enumerate(zip(vectors, self._seen, strict=True)):
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
        """Set what a token writes: `β (v - what its key holds)`."""
        v = self._given["v"] + token * self._given["v_stride"]
        self._prefetch(v, self._given["v_stride"])
        beta = self._of_token("betas", token)
        for lanes, seen, written in zip(self._lanes, self._seen, self._written, strict=True):
            written.set(beta * (lanes.load(v) - seen.get()))

    def _store_out(self, token: Value) -> None:
        out = self._given["out"] + token * self._given["out_stride"]
        self._prefetch(out, self._given["out_stride"])
        for lanes, total in zip(self._lanes, self._out, strict=True):
            lanes.store(total.get(), out)

    def _prefetch(self, row: Value, stride: Value) -> None:
        """Prefetch the strip's columns for the next token: another page of memory."""
        for lanes in self._lanes:
            self._code.prefetch(row + stride + lanes.index * 4)
