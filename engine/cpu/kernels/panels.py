"""Panels: activations quantised and packed for the products, in blocks of 32 columns.

Tokens are multiplied in groups; a group of m tokens is packed into one panel. For each block of 32
columns a panel holds m × 32 bytes, then, all F32: m pairs of scales (one for each 16 columns), m
sums of 32 dequantised numbers, m pairs of sums of 16. So a panel is read from front to back, and a
token takes equally many bytes per block in a group of any size.

An activation is one signed byte, or two where a small error can have large consequences: in models
whose router sends tokens to experts. Then m × 32 high bytes, worth 255 each, stand before the low
bytes; both are within ±127, so that the same instructions multiply them.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from engine.cpu.kernels.isa import Isa
from engine.cpu.kernels.parallel_for import add_kernel, ceil_div, piece
from engine.cpu.kernels.team import add_run
from engine.cpu.kernels.values import F32, FLOATS, I8, INTS, VOID, Value, function, vector
from engine.quants.extent import panel_block_bytes
from engine.quants.layout import BLOCK

BASE = 255
"""Value of the high byte's unit, where an activation has two bytes."""

LARGEST = {1: 127, 2: 127 * BASE + 127}
"""Largest quantised activation, by its number of bytes."""

TINY = 2.0**-100
"""Size below which numbers are quantised to zero; 127 divided by them might be infinite."""

ROUNDER, ROUNDER_BITS = 1.5 * 2.0**23, 0x4B400000
"""A float whose last bit is worth 1, and its bits. Adding it rounds to the nearest integer, ties to
even, and leaves the integer in the low bits, on all processors alike."""


@dataclass(frozen=True, slots=True)
class PanelOffsets:
    """Byte offsets in one block of a panel.

    Attributes:
        n_tokens: number of tokens of the panel.
        x_bytes: number of bytes of an activation, 1 or 2.
    """

    n_tokens: int
    x_bytes: int

    @property
    def n_bytes(self) -> int:
        """Size of a block, in bytes."""
        return self.n_tokens * panel_block_bytes(self.x_bytes)

    def numbers(self, token: int, part: int = 0) -> int:
        """Return the offset of a token's bytes; part 0 is the high bytes where there are two."""
        return (part * self.n_tokens + token) * BLOCK

    def scale(self, token: int, half: int) -> int:
        """Return the offset of the scale of 16 columns."""
        return self._after_numbers(0) + 8 * token + 4 * half

    def sum(self, token: int) -> int:
        """Return the offset of the sum of 32 columns."""
        return self._after_numbers(8) + 4 * token

    def half_sum(self, token: int, half: int) -> int:
        """Return the offset of the sum of 16 columns."""
        return self._after_numbers(12) + 8 * token + 4 * half

    def _after_numbers(self, n_bytes: int) -> int:
        """Return the offset of what follows the numbers and `n_bytes` more of each token."""
        return self.n_tokens * (self.x_bytes * BLOCK + n_bytes)


def quantised_bytes(n_tokens: int, n_blocks: int, x_bytes: int = 1) -> int:
    """Return the size of the panels of `n_tokens` tokens, in bytes."""
    return n_tokens * n_blocks * panel_block_bytes(x_bytes)


ARGUMENTS = ("x", "x_stride", "n_tokens", "n_blocks", "panels")
"""Arguments of the kernel: x is F32, (n_tokens, 32 × n_blocks), with rows `x_stride` bytes apart;
`panels` is the address of `quantised_bytes`."""


def build(module: ir.Module, isa: Isa, x_bytes: int = 1) -> None:
    """Write `quantise(team, *ARGUMENTS)`; the calling thread packs one panel's tokens alone."""
    add_run(module)
    add_pack_tokens(module, isa, x_bytes)
    with piece(module, "quantise", ARGUMENTS) as (code, given, index):
        first, stride = index * isa.tile_tokens, given["x_stride"]
        n = code.min_signed(given["n_tokens"] - first, code.number(isa.tile_tokens))
        goal = given["panels"] + first * given["n_blocks"] * panel_block_bytes(x_bytes)
        code.call(
            "pack_tokens", VOID, given["x"] + first * stride, stride, n, given["n_blocks"], goal
        )
    add_kernel(module, "quantise", ARGUMENTS, lambda _, g: ceil_div(g["n_tokens"], isa.tile_tokens))


def add_pack_tokens(module: ir.Module, isa: Isa, x_bytes: int = 1) -> None:
    """Write `pack_tokens(x, x_stride, n, n_blocks, panels)`: packs up to `isa.tile_tokens` tokens.

    One panel for each bit set in n, the largest first.
    """
    _add_pack_token(module, x_bytes)
    code, (x, stride, n, n_blocks, panels) = function(module, "pack_tokens", 5)
    code.builder.function.linkage = "internal"
    token = code.variable(code.number(0))

    def group(size: int) -> None:
        first = token.get()
        with code.loop(code.number(0), code.number(size)) as t:
            row = x + (first + t) * stride
            panel = panels + first * n_blocks * panel_block_bytes(x_bytes)
            code.call("pack_token", VOID, row, n_blocks, panel, code.number(size), t)
        token.set(first + size)

    size = isa.tile_tokens
    while size:
        with code.when((n & size) > 0):
            group(size)
        size //= 2
    code.builder.ret_void()


def _add_pack_token(module: ir.Module, x_bytes: int = 1) -> None:
    """Write `pack_token(x, n_blocks, panel, n, t)`: packs token t of a panel of n."""
    code, (x, n_blocks, panel, n, t) = function(module, "pack_token", 5)
    code.builder.function.linkage = "internal"
    with code.loop(code.number(0), n_blocks) as index:
        at = panel + index * n * panel_block_bytes(x_bytes)
        numbers, behind = at + t * BLOCK, at + n * (x_bytes * BLOCK)
        sums = []
        for half in range(2):
            values = code.load(x + index * (4 * BLOCK) + 64 * half, FLOATS)
            whole, scale = _rounded(values, LARGEST[x_bytes])
            for part, bytes_ in enumerate(_bytes(whole, x_bytes)):
                code.store(bytes_, numbers + n * (part * BLOCK) + 16 * half)
            code.store(scale, behind + t * 8 + 4 * half)
            sums.append(code.reduce("add", _integers(whole)).to(F32) * scale)
            code.store(sums[half], behind + n * 12 + t * 8 + 4 * half)
        code.store(sums[0] + sums[1], behind + n * 8 + t * 4)
    code.builder.ret_void()


def _rounded(values: Value, largest: int) -> tuple[Value, Value]:
    """Quantise 16 numbers to integers within ±largest, as `_whole` returns them, and a scale."""
    code = values.code
    size = code.reduce("max", code.unary("fabs", values))
    inverse = code.constant(F32, float(largest)) / size
    inverse = code.where(size < TINY, code.constant(F32, 0.0), inverse)
    scale = size * (1 / largest) + (size - size)  # NaN where the largest is infinite
    return _whole(values * code.splat(inverse)), scale


def _whole(values: Value) -> Value:
    """Return the nearest integers, ties to even, with `ROUNDER` added."""
    return values + ROUNDER


def _integers(whole: Value) -> Value:
    """Convert a result of `_whole` to integers."""
    return whole.bitcast(INTS) - ROUNDER_BITS


def _bytes(whole: Value, x_bytes: int = 1) -> list[Value]:
    """Split a result of `_whole` into signed bytes: one each, or the high ones and the low ones."""
    kind = vector(I8)
    if x_bytes == 1:
        return [_integers(whole).to(kind)]
    high = _integers(_whole((whole - ROUNDER) * (1 / BASE)))
    return [high.to(kind), (_integers(whole) - high * BASE).to(kind)]
