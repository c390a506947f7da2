"""Panels: activations, quantised and packed for products in blocks of 32 columns.

Every 16 columns of a token share a scale, an integer multiple of the token's unit, so that products
can add up scaled sums as integers. The unit is the token's largest scale divided by 32,767, which
is fine enough.

Tokens are multiplied in groups; a group of m tokens is packed into one panel. For each block of 32
columns, a panel has m × 32 bytes, followed by four-byte numbers: m pairs of -128 × Σ bytes (one per
16 columns), m pairs of scales in units (i32), m sums of 32 activations in units (F32), m units
(F32), m pairs of scales again (F32). So a panel is read from front to back, and the bytes per token
and block do not depend on m. The bytes alternate: four from the first 16 columns, four from the
other 16, and so on. If `Isa.joins_halves`, both scales in units are int16 in a pair's first i32.

An activation is a signed byte, or two bytes where small errors have large consequences: in MoE
models (because of the router), and for the attention values in all models
(`engine.backends.cpu.packing.FINE`). Processors with int16 dot products then use int16
(`products.int16_panels`). On others, m × 32 high bytes, worth 255 each, precede the low bytes; both
are within ±127, so that the same instructions multiply them. All 32 columns of a block then share
a scale: two bytes are precise enough for that, and a block's product is scaled only once.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.values import (
    F32,
    FLOATS,
    I8,
    I32,
    INTS,
    Code,
    Value,
    internal,
    vector,
)
from engine.formats.quants.layout import BLOCK, panel_block_bytes

BASE = 255
"""Value of one unit of the high byte in two-byte activations."""

MAX_NUMBER = {1: 127, 2: 127 * BASE + 127}
"""Largest quantised activation, by its size in bytes."""

MAX_UNITS = 32767
"""Largest scale, in units."""

SUM_FACTOR = 128
"""Offset that makes 8-bit weights positive. To correct the products, stored sums of bytes are
multiplied by it."""

LINE_ORDER = [16 * half + 4 * line + n for line in range(4) for half in range(2) for n in range(4)]
"""Order of a block's columns in a panel."""

TOKEN_BYTES = 8, 8, 4, 4, 8
"""Bytes per token in each part of a panel's block, after the activations."""

TINY = 2.0**-90
"""Tokens with smaller magnitudes are quantised to zero; dividing by them could overflow."""

ROUNDER, ROUNDER_BITS = 1.5 * 2.0**23, 0x4B400000
"""A float whose last bit has the value 1, and its bits. Adding it to a number rounds the number to
the nearest integer, ties to even, and leaves the integer in the low bits."""


@dataclass(frozen=True, slots=True)
class PanelOffsets:
    """Byte offsets in one block of a panel.

    Attributes:
        n_tokens: number of tokens in the panel.
        x_bytes: bytes per activation, 1 or 2.
    """

    n_tokens: int
    x_bytes: int

    @property
    def n_bytes(self) -> int:
        """Size of a block, in bytes."""
        return self.n_tokens * panel_block_bytes(self.x_bytes)

    def numbers(self, token: int, part: int, half: int, line: int) -> int:
        """Return the offset of four of a token's bytes.

        Args:
            part: 0 for the high bytes, if there are two.
            half: 0 for the first 16 columns, 1 for the others.
            line: which four of the 16 columns.
        """
        return (part * self.n_tokens + token) * BLOCK + 8 * line + 4 * half

    def minus_sum(self, token: int, half: int) -> int:
        """Return the offset of -`SUM_FACTOR` times the sum of 16 activations."""
        return self._after_numbers(0) + 8 * token + 4 * half

    def units(self, token: int, half: int) -> int:
        """Return the offset of 16 columns' scale in units, i32."""
        return self._after_numbers(8) + 8 * token + 4 * half

    def sum(self, token: int) -> int:
        """Return the offset of 32 columns' sum in units."""
        return self._after_numbers(16) + 4 * token

    def unit(self, token: int) -> int:
        """Return the offset of the token's unit, which all blocks repeat."""
        return self._after_numbers(20) + 4 * token

    def scale(self, token: int, half: int) -> int:
        """Return the offset of 16 columns' scale, F32."""
        return self._after_numbers(24) + 8 * token + 4 * half

    def _after_numbers(self, n_bytes: int) -> int:
        return self.n_tokens * (self.x_bytes * BLOCK + n_bytes)


def quantised_bytes(n_tokens: int, n_blocks: int, x_bytes: int = 1) -> int:
    """Return the size in bytes of the panels for `n_tokens` tokens."""
    return n_tokens * n_blocks * panel_block_bytes(x_bytes)


def panel_sizes(isa: Isa) -> list[int]:
    """Return the possible panel sizes in tokens, largest first."""
    return [1 << n for n in reversed(range(isa.tile_tokens.bit_length()))]


ARGUMENTS = ("x", "x_stride", "n_tokens", "n_blocks", "skip", "panels")
"""Arguments of a kernel that packs panels: x is F32, (n_tokens, 32 × n_blocks), with rows
`x_stride` bytes apart; `skip` is the number of blocks missing at the start of the weights' first
256 columns; `panels` is the address of a buffer of `quantised_bytes`."""


def add_pack_token(module: ir.Module, isa: Isa, x_bytes: int) -> None:
    """Emit `pack_token(x, n_blocks, skip, panel, n, t, first, last)`.

    Packs the blocks from `first` to `last` for token t in a panel of n tokens.
    """
    code, (x, n_blocks, _, panel, n, t, first, last) = internal(module, "pack_token", 8)
    largest = _largest(code, x, n_blocks)
    steps, unit = _steps_and_unit(code, largest, MAX_NUMBER[x_bytes])
    with code.loop(first, last) as index:
        at = panel + index * n * panel_block_bytes(x_bytes)
        numbers, others = at + t * BLOCK, at + n * (x_bytes * BLOCK)
        columns = [code.load(x + index * (4 * BLOCK) + 64 * half, FLOATS) for half in range(2)]
        sizes = [size_bits(column) for column in columns]
        if x_bytes > 1:
            sizes = [code.maximum(*sizes)] * 2
        halves = [
            _rounded(column, size, steps, MAX_NUMBER[x_bytes])
            for column, size in zip(columns, sizes, strict=True)
        ]
        parts = zip(*(_bytes(whole, x_bytes) for whole, _ in halves), strict=True)
        for part, (first, second) in enumerate(parts):
            code.store(first.shuffle(LINE_ORDER, second), numbers + n * (part * BLOCK))
        total = code.constant(F32, 0.0)
        for half, (whole, units) in enumerate(halves):
            added, scale = code.reduce("add", _integers(whole)), units.to(F32)
            code.store(added * -SUM_FACTOR, others + t * 8 + 4 * half)
            code.store(scale, others + n * 24 + t * 8 + 4 * half)
            total = code.fma(added.to(F32), scale, total)
            if not isa.joins_halves:
                code.store(units, others + n * 8 + t * 8 + 4 * half)
        if isa.joins_halves:
            code.store(halves[0][1] | (halves[1][1] << 16), others + n * 8 + t * 8)
        code.store(total, others + n * 16 + t * 4)
        code.store(unit, others + n * 20 + t * 4)
    code.builder.ret_void()


def _largest(code: Code, x: Value, n_blocks: Value) -> Value:
    """Return the largest magnitude of a token's activations; NaN if any is NaN."""
    most = code.variable(code.constant(INTS, 0))
    with code.loop(code.number(0), n_blocks * 2) as half:
        values = code.load(x + half * 64, FLOATS)
        most.set(code.maximum(most.get(), size_bits(values)))
    return code.reduce("max", most.get()).bitcast(F32)


def size_bits(values: Value) -> Value:
    """Return the bits of the magnitudes of floats.

    As integers they have the same order (with NaN largest) but compare faster.
    """
    return values.bitcast(INTS) & 0x7FFFFFFF


def _steps_and_unit(code: Code, size: Value, largest: int) -> tuple[Value, Value]:
    """Return a token's scale in units per magnitude, and its unit.

    Args:
        size: largest magnitude of the token's activations.
        largest: largest quantised activation.
    """
    steps = code.constant(F32, float(MAX_UNITS)) / size
    steps = code.where(size < TINY, code.constant(F32, 0.0), steps)
    return steps, size * (1 / (largest * MAX_UNITS)) + (size - size)  # NaN if size is infinite


def _rounded(values: Value, sizes: Value, steps: Value, largest: int) -> tuple[Value, Value]:
    """Quantise 16 numbers to integers within ±largest.

    Args:
        sizes: bits of 16 magnitudes, the largest of which determines the scale.
        steps: see `_steps_and_unit`.

    Returns:
        The integers, as returned by `_whole`, and the scale in units: i32, at least 1.
    """
    code = values.code
    units = _integers(_whole(code.reduce("max", sizes).bitcast(F32) * steps)) + 1
    units = code.min_signed(units, code.constant(I32, MAX_UNITS))
    units = code.where(units < 1, code.constant(I32, 1), units)  # NaN
    inverse = steps * float(largest) / units.to(F32)
    return _whole(values * code.splat(inverse)), units


def _whole(values: Value) -> Value:
    """Round to the nearest integers, ties to even; `ROUNDER` remains added to them."""
    return values + ROUNDER


def _integers(whole: Value) -> Value:
    """Convert a result of `_whole` to integers."""
    return whole.bitcast(INTS if isinstance(whole.kind, ir.VectorType) else I32) - ROUNDER_BITS


def _bytes(whole: Value, x_bytes: int = 1) -> list[Value]:
    """Split a result of `_whole` into signed bytes: one byte, or a high and a low one."""
    kind = vector(I8)
    if x_bytes == 1:
        return [_integers(whole).to(kind)]
    high = _integers(_whole((whole - ROUNDER) * (1 / BASE)))
    return [high.to(kind), (_integers(whole) - high * BASE).to(kind)]
