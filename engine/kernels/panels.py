"""Activations as the products read them: signed bytes in blocks of 32, with a scale and sums.

Tokens go in groups that are multiplied at once. A group of m tokens is a panel; for each block of
32 columns it holds m × 32 bytes, m scales, m sums of 32 numbers (of what the bytes stand for), m
pairs of sums of 16, all F32. So a panel is read from front to back, and each token takes 48 bytes
per block in whatever group it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from engine.kernels.isa import Isa
from engine.kernels.layout import BLOCK
from engine.kernels.team import add_run
from engine.kernels.values import F32, FLOATS, I8, INTS, VOID, function, vector

TOKEN_BYTES = BLOCK + 4 + 4 + 8
"""Of one block of one token."""

LARGEST = 127

TINY = 2.0**-100
"""Blocks of smaller numbers count as zeros; 127 divided by them might be infinite."""

ROUNDER, ROUNDER_BITS = 1.5 * 2.0**23, 0x4B400000
"""A float whose last bit counts 1, and its bits: adding it rounds to the nearest, ties to even, and
leaves the whole number in the low bits, on all processors alike."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Offsets in a block of `n_tokens` tokens."""

    n_tokens: int

    @property
    def n_bytes(self) -> int:
        return self.n_tokens * TOKEN_BYTES

    def numbers(self, token: int) -> int:
        return token * BLOCK

    def scale(self, token: int) -> int:
        return self.n_tokens * BLOCK + 4 * token

    def sum(self, token: int) -> int:
        return self.n_tokens * (BLOCK + 4) + 4 * token

    def half_sum(self, token: int, half: int) -> int:
        return self.n_tokens * (BLOCK + 8) + 8 * token + 4 * half


def quantised_bytes(n_tokens: int, n_blocks: int) -> int:
    """Memory for the panels of some tokens."""
    return n_tokens * n_blocks * TOKEN_BYTES


ARGUMENTS = ("x", "x_stride", "n_tokens", "n_blocks", "panels")
"""Of a quantisation: x is F32, (n_tokens, 32 × n_blocks), with rows `x_stride` bytes apart."""


def build(module: ir.Module, isa: Isa) -> None:
    """`quantise(team, *ARGUMENTS)`; few tokens are done by the caller alone."""
    add_run(module)
    _add_token(module, isa)
    _add_task(module, isa)
    code, (team, *values) = function(module, "quantise", 1 + len(ARGUMENTS))
    place = code.kept(values)
    n_piece = (values[ARGUMENTS.index("n_tokens")] + (isa.n_tokens - 1)) // isa.n_tokens
    with code.either(n_piece.equals(1)) as (alone, shared):
        with alone:
            code.call("task", VOID, place, code.number(0))
        with shared:
            code.call("run", VOID, team, code.address("task"), place, n_piece)
    code.builder.ret_void()


def _add_task(module: ir.Module, isa: Isa) -> None:
    """`task(arguments, index)`: one full group of tokens, or the smaller ones at the end."""
    code, (place, index) = function(module, "task", 2)
    x, stride, n_tokens, n_blocks, panels = code.listed(place, len(ARGUMENTS))
    token = code.variable(index * isa.n_tokens)
    left = n_tokens - token.get()

    def group(size: int) -> None:
        first = token.get()
        with code.loop(code.number(0), code.number(size)) as t:
            row, panel = x + (first + t) * stride, panels + first * n_blocks * TOKEN_BYTES
            code.call("token", VOID, row, n_blocks, panel, code.number(size), t)
        token.set(first + size)

    with code.either(left >= isa.n_tokens) as (full, partly):
        with full:
            group(isa.n_tokens)
        with partly:
            size = isa.n_tokens // 2
            while size:
                with code.when((left & size) > 0):
                    group(size)
                size //= 2
    code.builder.ret_void()


def _add_token(module: ir.Module, isa: Isa) -> None:
    """`token(x, n_blocks, panel, n, t)`: token t of a group of n."""
    code, (x, n_blocks, panel, n, t) = function(module, "token", 5)
    code.builder.function.linkage = "internal"
    with code.loop(code.number(0), n_blocks) as index:
        at, row = panel + index * n * TOKEN_BYTES, x + index * (4 * BLOCK)
        halves = [code.load(row + 64 * h, FLOATS) for h in range(2)]
        size = code.reduced("max", code.largest(*(code.unary("fabs", half) for half in halves)))
        inverse = code.constant(F32, float(LARGEST)) / size
        inverse = code.where(size < TINY, code.constant(F32, 0.0), inverse)
        scale = size * (1 / LARGEST) + (size - size)  # NaN where the largest is infinite
        sums = []
        for h, half in enumerate(halves):
            numbers = (half * code.spread(inverse) + ROUNDER).bits(INTS) - ROUNDER_BITS
            code.store(numbers.to(vector(I8)), at + t * BLOCK + 16 * h)
            sums.append(code.reduced("add", numbers).to(F32) * scale)
            code.store(sums[h], at + n * (BLOCK + 8) + t * 8 + 4 * h)
        code.store(scale, at + n * BLOCK + t * 4)
        code.store(sums[0] + sums[1], at + n * (BLOCK + 4) + t * 4)
    code.builder.ret_void()
