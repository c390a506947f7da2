"""Packs a file's blocks into planes (the same bits, reordered), and F16 and BF16 as int16.

`kernels.packing.block_readers` reads the codes and scales of 32 columns, for each GGML type. Whole
tiles are packed 16 rows at a time, in vectors that contain lines of the planes; partial tiles at a
matrix part's edges are packed row by row.
"""

from __future__ import annotations

from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.loops import Named, add_kernel, ceil_div, piece
from engine.backends.cpu.kernels.language.values import (
    F32,
    I8,
    I16,
    I32,
    INTS,
    LANES,
    Code,
    Value,
    vector,
)
from engine.backends.cpu.kernels.packing.block_readers import (
    BLOCK_READERS,
    BlockReader,
    Columns,
    RowColumns,
    TileColumns,
    transposed,
)
from engine.backends.cpu.kernels.products.float_gemm import FloatWeights
from engine.backends.cpu.kernels.products.int16_panels import (
    BALANCE,
    GROUP_BYTES,
    block_of_int16,
    scale_of,
)
from engine.backends.cpu.kernels.products.panels import TINY
from engine.backends.cpu.kernels.products.tile_reader import BlockGroup
from engine.backends.cpu.kernels.running.thread_pool import add_run
from engine.formats.quants.layout import (
    BLOCK,
    INT16_BLOCK_BYTES,
    INT16_FACTOR_BYTES,
    LAYOUTS,
    SUPER,
    TILE,
    Layout,
)

Interval = tuple[Value, Value]
"""Start and end of a range of rows or blocks."""

ARGUMENTS = (
    "raw", "row_bytes", "n_rows", "goal_row", "first", "n_blocks", "planes", "tile_bytes",
)  # fmt: skip
"""The kernel's arguments. `raw` is the address of the first row, with rows `row_bytes` apart; in
each, `n_blocks` blocks of 32 columns are packed, starting at block `first`. The first row becomes
row `goal_row` in the planes; tiles are `tile_bytes` apart."""


def build(module: ir.Module, type_number: int) -> None:
    """Emit `pack(pool, *ARGUMENTS)`; other rows of the tiles stay unchanged."""
    add_run(module)
    with piece(module, "pack", ARGUMENTS) as (code, given, index):
        _emit_tile(code, LAYOUTS[type_number], BLOCK_READERS[type_number], given, index)
    add_kernel(
        module, "pack", ARGUMENTS, lambda _, g: ceil_div(g["goal_row"] % TILE + g["n_rows"], TILE)
    )


def _emit_tile(code: Code, layout: Layout, source: BlockReader, given: Named, index: Value) -> None:
    """Emit a piece: one tile's rows; piece 0 is the tile that contains row `goal_row`."""
    number = given["goal_row"] // TILE + index
    begin = number * TILE - given["goal_row"]  # the tile's first row, as an index in `raw`
    packer = TilePacker(code, layout, source, given, number, begin)
    is_whole = (begin >= 0) & (given["n_rows"] >= begin + TILE)
    with code.if_else(is_whole) as (whole, part):
        with whole:
            packer.emit_whole()
        with part:
            first = code.where(begin < 0, code.number(0), begin)
            end = code.min_signed(given["n_rows"], begin + TILE)
            packer.emit_rows((first, end), (code.number(0), given["n_blocks"]))
            packer.emit_supers_of_rows((first, end))


class TilePacker:
    """Generates the code that packs one tile.

    Args:
        source: reader for the file's blocks.
        given: the kernel's arguments.
        number: index of the tile in the planes.
        begin: index of the tile's first row in `raw`.
    """

    def __init__(
        self, code: Code, layout: Layout, source: BlockReader, given: Named, number: Value,
        begin: Value,
    ) -> None:  # fmt: skip
        self._code = code
        self._layout = layout
        self._source = source
        self._begin = begin
        self._raw, self._row_bytes = given["raw"], given["row_bytes"]
        self._first, self._n_blocks = given["first"], given["n_blocks"]
        self._tile = given["planes"] + number * given["tile_bytes"]
        self._skip = self._first % SUPER
        self._n_groups = ceil_div(self._n_blocks + self._skip, SUPER)

    def emit_whole(self) -> None:
        """Pack all rows: first the file's whole blocks, then the remaining columns row by row."""
        code, n, first = self._code, self._source.n_blocks, self._first
        end = first + self._n_blocks
        begin_whole = code.min_signed(ceil_div(first, n) * n, end)
        end_whole = end // n * n
        end_whole = code.where(end_whole < begin_whole, begin_whole, end_whole)
        with code.loop(begin_whole // n, end_whole // n) as number:
            columns = self._whole_block(number)
            for index in range(n):
                self._put(columns.at(index), number * n + index - first)
        if n > 1:
            rows = self._begin, self._begin + TILE
            self.emit_rows(rows, (code.number(0), begin_whole - first))
            self.emit_rows(rows, (end_whole - first, self._n_blocks))
        if self._source.supers:
            with code.loop(code.number(0), self._n_groups) as number:
                self._put_super(self._whole_block(self._first // SUPER + number), number)

    def _whole_block(self, number: Value) -> TileColumns:
        at = self._raw + self._begin * self._row_bytes + number * self._source.type_size
        rows = [at + self._row_bytes * row for row in range(TILE)]
        return TileColumns(self._code, rows, self._source.type_size)

    def emit_rows(self, rows: Interval, blocks: Interval) -> None:
        """Pack a range of rows, and in them a range of blocks of 32 columns."""
        source = self._source
        with self._code.loop(*rows) as row, self._code.loop(*blocks) as block:
            whole = self._first + block
            at = self._raw + row * self._row_bytes + whole // source.n_blocks * source.type_size
            here = RowColumns(self._code, at, whole % source.n_blocks)
            self._put(here, block, row - self._begin)

    def emit_supers_of_rows(self, rows: Interval) -> None:
        """Pack super-block factors for a range of rows."""
        if not self._source.supers:
            return
        code, size = self._code, self._source.type_size
        with code.loop(*rows) as row, code.loop(code.number(0), self._n_groups) as number:
            at = self._raw + row * self._row_bytes + (self._first // SUPER + number) * size
            here = RowColumns(code, at, code.number(0))
            self._put_super(here, number, row - self._begin)

    def _put(self, here: Columns, block: Value, row: Value | int = 0) -> None:
        layout, source = self._layout, self._source
        group = BlockGroup.of(block, self._n_blocks, self._skip)
        places = group.places(layout, self._tile, block)
        low = source.low(here)
        if layout.low == 4 and low.kind.count in (BLOCK, BLOCK * TILE):
            n = low.kind.count // 2
            low = low.shuffle(range(n)) | (low.shuffle(range(n, 2 * n)) << 4)
        _store_lines(low, 2 if layout.low == 2 else 8, places.low + row * 4)
        if source.high is not None:
            _store_lines(source.high(here), layout.high, places.high + row * 4)
        kind = {"f32": I32, "f16": I16, "f16_min": I16}.get(layout.scale, I8)
        size = kind.width // 8
        for part, number in enumerate(source.scales(here)):
            _store_numbers(number, kind, places.scales + part * size * TILE + row * size)

    def _put_super(self, here: Columns, number: Value, row: Value | int = 0) -> None:
        group = BlockGroup.at(number, self._n_blocks, self._skip)
        goal = group.places(self._layout, self._tile, group.first).supers + row * 2
        for part, offset in enumerate(self._source.supers):
            _store_numbers(here.number(offset, 2), I16, goal + part * 2 * TILE)


def _store_lines(codes: Value, n_bits: int, goal: Value) -> None:
    """Store codes of `n_bits` bits, 8 / n_bits lines in each stored line.

    Args:
        codes: codes for one row, four bytes per line, or for all rows, 64 bytes per line.
    """
    size = LANES if codes.kind.count > BLOCK else 1
    words, per_line = codes.bitcast(vector(I32, codes.kind.count // 4)), 8 // n_bits
    lines = [
        words.shuffle(range(at, at + size)) if size > 1 else words[at]
        for at in range(0, words.kind.count, size)
    ]
    for n, at in enumerate(range(0, len(lines), per_line)):
        line = lines[at]
        for place in range(1, per_line):
            line = line | (lines[at + place] << (place * n_bits))
        codes.code.store(line, goal + 64 * n)


def _store_numbers(numbers: Value, kind: ir.IntType, goal: Value) -> None:
    goal_kind = vector(kind) if isinstance(numbers.kind, ir.VectorType) else kind
    numbers.code.store(numbers if numbers.kind == goal_kind else numbers.to(goal_kind), goal)


INT16_KINDS = {1: "f16", 30: "bf16"}
"""Kernel names for the types that are packed as int16, by GGML type id."""

EXPONENT = 0x7F80_0000
"""Exponent bits of an F32; masking a positive number with them yields a power of two."""


LINE_BYTES = 64
"""Size in bytes of a row's block as int16, and of two columns in all of a tile's rows."""

BUFFER_ROW = SUPER * LINE_BYTES
"""Size in bytes of a row's group as int16."""


def build_int16(module: ir.Module, isa: Isa, type_number: int) -> None:
    """Emit `pack(pool, *ARGUMENTS)` for F16 and BF16; other rows of the tiles stay unchanged.

    For all rows, a group of columns is rounded into a buffer, from which whole lines are written.
    """
    add_run(module)
    weights = FloatWeights(isa, INT16_KINDS[type_number])
    with piece(module, "pack", ARGUMENTS) as (code, given, index):
        number = given["goal_row"] // TILE + index
        begin = number * TILE - given["goal_row"]  # the tile's first row, as an index in `raw`
        first = code.where(begin < 0, code.number(0), begin)
        end = code.min_signed(given["n_rows"], begin + TILE)
        tile = given["planes"] + number * given["tile_bytes"]
        words = code.stack_buffer(INTS, TILE * SUPER)
        with code.loop(code.number(0), given["n_blocks"], SUPER) as block:
            n_blocks = code.min_signed(given["n_blocks"] - block, code.number(SUPER))
            group = tile + block // SUPER * GROUP_BYTES
            goal = group + INT16_FACTOR_BYTES
            with code.loop(first, end) as row:
                raw = given["raw"] + row * given["row_bytes"] + block * (2 * BLOCK)
                place = row - begin
                factor = _emit_row(code, weights, raw, n_blocks, words + place * BUFFER_ROW)
                code.store(factor, group + place * 4)
            is_whole = (end - first).equals(TILE)
            with code.loop(code.number(0), code.where(is_whole, n_blocks, code.number(0))) as index:
                _emit_block(code, words + index * LINE_BYTES, goal + index * INT16_BLOCK_BYTES)
            with code.loop(first, code.where(is_whole, first, end)) as row:
                place = row - begin
                _emit_column(code, words + place * BUFFER_ROW, n_blocks, goal + place * 4)
    add_kernel(
        module, "pack", ARGUMENTS, lambda _, g: ceil_div(g["goal_row"] % TILE + g["n_rows"], TILE)
    )


def _emit_row(
    code: Code, weights: FloatWeights, raw: Value, n_blocks: Value, words: Value
) -> Value:
    """Round a group of columns in one row to int16; return their factor."""

    def half(index: Value) -> Value:
        return weights.load(code, raw + index * 32)

    size, relative = scale_of(code, half, code.number(0), n_blocks * 2)
    zero, one = (code.constant(F32, number) for number in (0.0, 1.0))
    steps = ((relative / size).bitcast(I32) & EXPONENT).bitcast(F32)
    steps, factor = (
        code.where(size < TINY, zero, number)
        for number in (
            steps,
            one / steps * BALANCE + (size - size),
        )  # NaN if the size is infinite or NaN
    )
    with code.loop(code.number(0), n_blocks) as block:
        halves = [half(block * 2 + k) * code.splat(steps) for k in range(2)]
        code.store(block_of_int16(factor, *halves), words + block * LINE_BYTES)
    return factor


def _emit_block(code: Code, words: Value, goal: Value) -> None:
    """Store a block of all 16 rows, two columns per line."""
    kind = vector(I32, 4)
    for part in range(0, LINE_BYTES, 16):
        rows = [code.load(words + (row * BUFFER_ROW + part), kind) for row in range(TILE)]
        for pair, line in enumerate(transposed(rows)):
            code.store(line, goal + (part // 4 + pair) * LINE_BYTES)


def _emit_column(code: Code, words: Value, n_blocks: Value, goal: Value) -> None:
    with code.loop(code.number(0), n_blocks * (BLOCK // 2)) as pair:
        code.store(code.load(words + pair * 4, I32), goal + pair * LINE_BYTES)
