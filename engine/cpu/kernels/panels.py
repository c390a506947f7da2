"""Activations as the products read them: whole numbers in blocks of 32, with scales and sums.

Tokens go in groups that are multiplied at once. A group of m tokens is a panel; for each block of
32 columns it holds m × 32 bytes, m pairs of scales for 16 of them, m sums of 32 numbers (of what
the bytes stand for), m pairs of sums of 16, all F32. So a panel is read from front to back, and
each token takes equally many bytes per block in whatever group it is.

An activation is one signed byte, or two where a small error can have large consequences: where a
router sends tokens to experts. Then m × 32 bytes that count 255 each stand before those that count
1; both are within ±127, so that the same instructions multiply them.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from engine.cpu.kernels.isa import Isa
from engine.cpu.kernels.parallel_for import add_kernel, ceil_div, piece
from engine.cpu.kernels.team import add_run
from engine.cpu.kernels.values import F32, FLOATS, I8, INTS, VOID, Value, function, vector
from engine.quants.extent import token_bytes
from engine.quants.layout import BLOCK

BASE = 255
"""What the first of two bytes counts."""

LARGEST = {1: 127, 2: 127 * BASE + 127}
"""The largest whole number, by the bytes of each."""

TINY = 2.0**-100
"""Blocks of smaller numbers count as zeros; 127 divided by them might be infinite."""

ROUNDER, ROUNDER_BITS = 1.5 * 2.0**23, 0x4B400000
"""A float whose last bit counts 1, and its bits: adding it rounds to the nearest, ties to even, and
leaves the whole number in the low bits, on all processors alike."""


@dataclass(frozen=True, slots=True)
class PanelOffsets:
    """Offsets in a block of `n_tokens` tokens."""

    n_tokens: int
    x_bytes: int

    @property
    def n_bytes(self) -> int:
        return self.n_tokens * token_bytes(self.x_bytes)

    def numbers(self, token: int, part: int = 0) -> int:
        return (part * self.n_tokens + token) * BLOCK

    def scale(self, token: int, half: int) -> int:
        return self._behind(0) + 8 * token + 4 * half

    def sum(self, token: int) -> int:
        return self._behind(8) + 4 * token

    def half_sum(self, token: int, half: int) -> int:
        return self._behind(12) + 8 * token + 4 * half

    def _behind(self, n_bytes: int) -> int:
        """Where so many bytes of each token lie behind its numbers."""
        return self.n_tokens * (self.x_bytes * BLOCK + n_bytes)


def quantised_bytes(n_tokens: int, n_blocks: int, x_bytes: int = 1) -> int:
    """Memory for the panels of some tokens."""
    return n_tokens * n_blocks * token_bytes(x_bytes)


ARGUMENTS = ("x", "x_stride", "n_tokens", "n_blocks", "panels")
"""Of a quantisation: x is F32, (n_tokens, 32 × n_blocks), with rows `x_stride` bytes apart."""


def build(module: ir.Module, isa: Isa, x_bytes: int = 1) -> None:
    """`quantise(team, *ARGUMENTS)`; few tokens are done by the caller alone."""
    add_run(module)
    add_some_tokens(module, isa, x_bytes)
    with piece(module, "quantise", ARGUMENTS) as (code, given, index):
        first, stride = index * isa.n_tokens, given["x_stride"]
        n = code.least(given["n_tokens"] - first, code.number(isa.n_tokens))
        goal = given["panels"] + first * given["n_blocks"] * token_bytes(x_bytes)
        code.call(
            "some_tokens", VOID, given["x"] + first * stride, stride, n, given["n_blocks"], goal
        )
    add_kernel(module, "quantise", ARGUMENTS, lambda _, g: ceil_div(g["n_tokens"], isa.n_tokens))


def add_some_tokens(module: ir.Module, isa: Isa, x_bytes: int = 1) -> None:
    """`some_tokens(x, x_stride, n, n_blocks, panels)`: n ≤ `isa.n_tokens`, in one panel or more."""
    _add_token(module, x_bytes)
    code, (x, stride, n, n_blocks, panels) = function(module, "some_tokens", 5)
    code.builder.function.linkage = "internal"
    token = code.variable(code.number(0))

    def group(size: int) -> None:
        first = token.get()
        with code.loop(code.number(0), code.number(size)) as t:
            row, panel = x + (first + t) * stride, panels + first * n_blocks * token_bytes(x_bytes)
            code.call("token", VOID, row, n_blocks, panel, code.number(size), t)
        token.set(first + size)

    size = isa.n_tokens
    while size:
        with code.when((n & size) > 0):
            group(size)
        size //= 2
    code.builder.ret_void()


def _add_token(module: ir.Module, x_bytes: int = 1) -> None:
    """`token(x, n_blocks, panel, n, t)`: token t of a group of n."""
    code, (x, n_blocks, panel, n, t) = function(module, "token", 5)
    code.builder.function.linkage = "internal"
    with code.loop(code.number(0), n_blocks) as index:
        at = panel + index * n * token_bytes(x_bytes)
        numbers, behind = at + t * BLOCK, at + n * (x_bytes * BLOCK)
        sums = []
        for half in range(2):
            values = code.load(x + index * (4 * BLOCK) + 64 * half, FLOATS)
            whole, scale = _rounded(values, LARGEST[x_bytes])
            for part, bytes_ in enumerate(_bytes(whole, x_bytes)):
                code.store(bytes_, numbers + n * (part * BLOCK) + 16 * half)
            code.store(scale, behind + t * 8 + 4 * half)
            sums.append(code.reduced("add", _integers(whole)).to(F32) * scale)
            code.store(sums[half], behind + n * 12 + t * 8 + 4 * half)
        code.store(sums[0] + sums[1], behind + n * 8 + t * 4)
    code.builder.ret_void()


def _rounded(values: Value, largest: int) -> tuple[Value, Value]:
    """The nearest whole numbers within ±largest on a common scale (as `_whole` gives them)."""
    code = values.code
    size = code.reduced("max", code.unary("fabs", values))
    inverse = code.constant(F32, float(largest)) / size
    inverse = code.where(size < TINY, code.constant(F32, 0.0), inverse)
    scale = size * (1 / largest) + (size - size)  # NaN where the largest is infinite
    return _whole(values * code.spread(inverse)), scale


def _whole(values: Value) -> Value:
    """The nearest whole numbers plus `ROUNDER`, ties to even."""
    return values + ROUNDER


def _integers(whole: Value) -> Value:
    """What `_whole` gave, as integers."""
    return whole.bits(INTS) - ROUNDER_BITS


def _bytes(whole: Value, x_bytes: int = 1) -> list[Value]:
    """Whole numbers as one or two signed bytes each, the one that counts more first."""
    kind = vector(I8)
    if x_bytes == 1:
        return [_integers(whole).to(kind)]
    high = _integers(_whole((whole - ROUNDER) * (1 / BASE)))
    return [high.to(kind), (_integers(whole) - high * BASE).to(kind)]
