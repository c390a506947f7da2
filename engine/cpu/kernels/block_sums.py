"""Sums over a block of 16 rows × 32 columns of quantised weights, for a panel's tokens."""

from __future__ import annotations

from collections.abc import Sequence

from engine.cpu.kernels.panels import PanelOffsets
from engine.cpu.kernels.tile_reader import TileReader
from engine.cpu.kernels.values import F32, FLOATS, I32, LINE, Code, Value, Variable

LINE_COLUMNS = 4
"""Columns of a line of weights."""

Factors = tuple[Sequence[Value], Sequence[Value]]
"""Scales of a block and factors of Σ x, see `TileReader.scales`."""


def add_block(
    reader: TileReader,
    lines: Sequence[Value],
    factors: Factors,
    panel: Value,
    offsets: PanelOffsets,
    sums: Sequence[Variable],
) -> None:
    """Add the products of one block with a panel's tokens to their sums.

    Args:
        lines: weights of the block, see `TileReader.lines`.
    """
    first, second = (_half_sums(reader, lines, panel, offsets, half) for half in range(2))
    for token, total in enumerate(sums):
        halves = first[token], second[token]
        _add_products(reader.code, total, halves, factors, panel, offsets, token)


def _half_sums(
    reader: TileReader, lines: Sequence[Value], panel: Value, offsets: PanelOffsets, half: int
) -> list[Value]:
    """Return the integer dot products of 16 rows × 16 columns with each token, as F32."""
    code = reader.code
    weights = [line.bitcast(LINE) for line in lines[4 * half : 4 * half + 4]]
    totals: list[Value] = []
    for part in range(offsets.x_bytes):
        at = [panel + (offsets.numbers(t, part) + 16 * half) for t in range(offsets.n_tokens)]
        x = [[code.load(a + LINE_COLUMNS * n, I32) for n in range(4)] for a in at]
        sums = reader.isa.dots(code, weights, x, reader.largest_weight)
        if totals:
            sums = [(t << 8) - t + s for t, s in zip(totals, sums, strict=True)]  # t × BASE + s
        totals = sums
    return [total.to(FLOATS) for total in totals]


def _add_products(
    code: Code,
    total: Variable,
    halves: Sequence[Value],
    factors: Factors,
    panel: Value,
    offsets: PanelOffsets,
    token: int,
) -> None:
    """Add the products of a token with a block of 16 rows × 32 columns to the rows' sums.

    Args:
        halves: integer dot products with 16 columns each, as F32.
        panel: address of the block in the token's panel.
    """
    scales, added = factors
    first, second = halves
    d = [code.splat(code.load(panel + offsets.scale(token, half), F32)) for half in range(2)]
    if len(scales) == 1:
        both = code.fma(second, d[1], first * d[0])
        total.set(code.fma(scales[0], both, total.get()))
    else:
        total.set(code.fma(scales[0], first * d[0], total.get()))
        total.set(code.fma(scales[1], second * d[1], total.get()))
    for sub, number in enumerate(added):
        place = offsets.sum(token) if len(added) == 1 else offsets.half_sum(token, sub)
        x_sum = code.splat(code.load(panel + place, F32))
        total.set(code.fma(number, x_sum, total.get()))
