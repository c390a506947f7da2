"""Dequantises rows from planes, for embedding lookups and torch's matrix products.

Rounds as in `formats.quants`: scale × q, then the minimum. So F32 rows have the same bits as the
dequantised file.
"""

from __future__ import annotations

from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.loops import Named, add_kernel, piece
from engine.backends.cpu.kernels.language.values import (
    F32,
    FLOATS,
    I64,
    INTS,
    LANES,
    Code,
    Value,
    transposed,
    vector,
)
from engine.backends.cpu.kernels.products.tile_reader import BlockGroup, TileReader
from engine.backends.cpu.kernels.running.thread_pool import add_run
from engine.formats.quants.layout import BLOCK, TILE, BlockPlaces, Layout

LOOKUP = ("planes", "tile_bytes", "n_blocks", "skip", "n_rows", "ids", "n_ids", "out", "out_stride")
"""Arguments of `lookup`. ids are 64-bit row indices; out is F32, (n_ids, 32 × n_blocks), with rows
`out_stride` bytes apart; rows for ids out of range are zeros."""

BF16_ROWS = ("planes", "tile_bytes", "n_blocks", "skip", "first_tile", "n_tile", "out")
"""Arguments of `bf16_rows`. out is BF16, (16 × n_tile, 32 × n_blocks), contiguous, rounded to
nearest."""


def build(module: ir.Module, isa: Isa, layout: Layout) -> None:
    """Emit `lookup(pool, *LOOKUP)` and `bf16_rows(pool, *BF16_ROWS)`."""
    reader = TileReader(isa, layout)
    add_run(module)
    with piece(module, "lookup", LOOKUP) as (code, given, index):
        _emit_lookup(code, reader, given, index)
    with piece(module, "bf16_rows", BF16_ROWS) as (code, given, index):
        _emit_bf16(code, reader, given, index)
    add_kernel(module, "lookup", LOOKUP, lambda _, given: given["n_ids"])
    add_kernel(module, "bf16_rows", BF16_ROWS, lambda _, given: given["n_tile"])


def _columns(reader: TileReader, places: BlockPlaces) -> list[Value]:
    layout = reader.layout
    scales, added = reader.scales(places)
    columns = []
    is_signed = reader.isa.signed_weights and (bool(layout.table) or layout.low == 8)
    for number, line in enumerate(reader.lines(places)):
        sub = number * len(scales) // 8
        for n in range(4):
            byte = line.bitcast(vector(line.kind.element, TILE)) >> (8 * n)
            whole = byte.to(BYTES).to(INTS) if is_signed else (byte & 255) - reader.offset
            value = whole.to(FLOATS) * scales[sub]
            columns.append(value + added[sub] if layout.has_minimum else value)
    return columns


def _emit_lookup(code: Code, reader: TileReader, given: Named, index: Value) -> None:
    layout = reader.layout
    planes, tile_bytes, n_blocks, skip, n_rows, ids, _, out, stride = given.values()
    row = code.load(ids + index * 8, I64)
    with code.when((row < 0) | (row >= n_rows)):
        nothing = code.constant(FLOATS, 0.0)
        with code.loop(code.number(0), n_blocks * BLOCK, LANES) as column:
            code.store(nothing, out + index * stride + column * 4)
        code.builder.ret_void()
    start, lane = planes + row // TILE * tile_bytes, row % TILE
    buffer = code.stack_buffer(FLOATS, BLOCK)
    with code.loop(code.number(0), n_blocks) as block:
        places = BlockGroup.of(block, n_blocks, skip).places(layout, start, block)
        for n, column in enumerate(_columns(reader, places)):
            code.store(column, buffer + 64 * n)
        goal = out + index * stride + block * (4 * BLOCK)
        for n in range(BLOCK):
            code.store(code.load(buffer + 64 * n + lane * 4, F32), goal + 4 * n)


def _emit_bf16(code: Code, reader: TileReader, given: Named, index: Value) -> None:
    layout = reader.layout
    planes, tile_bytes, n_blocks, skip, first, _, out = given.values()
    start = planes + (first + index) * tile_bytes
    row_bytes = n_blocks * (2 * BLOCK)
    goal = out + index * row_bytes * TILE
    with code.loop(code.number(0), n_blocks) as block:
        columns = _columns(
            reader, BlockGroup.of(block, n_blocks, skip).places(layout, start, block)
        )
        pairs = [_bf16_pair(*columns[n : n + 2]) for n in range(0, BLOCK, 2)]
        for row, numbers in enumerate(transposed(pairs)):
            code.store(numbers, goal + row_bytes * row + block * (2 * BLOCK))


def _bf16_pair(first: Value, second: Value) -> Value:
    """Round two columns to BF16, ties to even; the first is in the lower half of each i32."""
    low, high = (rounded_bf16(v) for v in (first, second))
    return (low >> 16) | (high & -65536)


def rounded_bf16(value: Value) -> Value:
    """Round floats to BF16, in the upper halves of i32; NaN may become infinity."""
    bits = value.bitcast(vector(INTS.element, value.kind.count))
    return bits + ((bits >> 16) & 1) + 0x7FFF


BYTES = vector(ir.IntType(8), TILE)
