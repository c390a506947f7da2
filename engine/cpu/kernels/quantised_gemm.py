"""GEMV and GEMM with quantised matrices: integer dot products within blocks, F32 sums across them.

Within a block of 32 columns (or a sub-block of 16), weights are small integers q on a scale, and
activations are bytes on a scale d, so that `Σ w x = scale × d × Σ q x - minimum × Σ x`: an exact
integer sum and two floating-point steps. All further rounding is F32's. A token's bits do not
depend on the tokens computed with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from engine.cpu.kernels.isa import Isa
from engine.cpu.kernels.panels import PanelOffsets
from engine.cpu.kernels.parallel_for import Named, add_kernel, ceil_div, piece
from engine.cpu.kernels.team import add_run
from engine.cpu.kernels.values import (
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    INTS,
    LINE,
    VOID,
    Code,
    Value,
    Variable,
    function,
    vector,
)
from engine.quants.extent import panel_block_bytes
from engine.quants.layout import BLOCK, SUPER, TILE, Layout

AHEAD = 16384
"""Distance at which a plane's weights are prefetched, in bytes."""

LINE_COLUMNS = 4
"""Columns of a line of weights."""

BYTES, HALVES = vector(I8, TILE), vector(I16, TILE)


@dataclass(frozen=True, slots=True)
class TileAddresses:
    """Addresses of one block of 16 rows in each plane.

    Attributes:
        low: low bits of the codes.
        high: high bits of the codes.
        scales: scales, and minima where there are any.
        supers: F16 factors of the scales.
    """

    low: Value
    high: Value
    scales: Value
    supers: Value


class TileReader:
    """Decodes one block of 16 rows from the planes."""

    def __init__(self, code: Code, isa: Isa, layout: Layout) -> None:
        self.code = code
        self.isa = isa
        self.layout = layout

    def lines(self, tile: TileAddresses, *, ahead: bool) -> list[Value]:
        """Decode the eight lines of a block: each 16 rows × 4 columns, as i32 of four bytes.

        Args:
            tile: addresses of the block.
            ahead: whether to prefetch later blocks.
        """
        layout, code = self.layout, self.code
        if ahead:
            for at in range(0, layout.low_bytes, 64):
                code.prefetch(tile.low + (AHEAD + at))
        per_line = 8 // layout.low
        stored = [code.load(tile.low + 64 * n, INTS) for n in range(8 // per_line)]
        step = 8 // per_line if layout.low == 4 else 1
        lines = []
        for line in range(8):
            source, place = (
                (line % step, line // step) if layout.low == 4 else divmod(line, per_line)
            )
            lines.append(self._part(stored[source], layout.low, place * layout.low))
        if layout.high:
            lines = self._with_high(lines, tile)
        if layout.table:
            lines = [self._looked_up(line) for line in lines]
        elif layout.low == 8 and not self.isa.signed_weights:
            lines = [line ^ 0x80808080 for line in lines]
        return lines

    def _part(self, stored: Value, n_bits: int, shift: int) -> Value:
        """Extract `n_bits` bits of every byte, from bit `shift` on."""
        if n_bits == 8:
            return stored
        mask = ((1 << n_bits) - 1) * 0x01010101
        return ((stored >> shift) if shift else stored) & mask

    def _with_high(self, lines: list[Value], tile: TileAddresses) -> list[Value]:
        """Put the high bits of the codes above the low bits in `lines`."""
        n_bits, low = self.layout.high, self.layout.low
        per_line = 8 // n_bits
        stored = [self.code.load(tile.high + 64 * n, INTS) for n in range(n_bits)]
        result = []
        for number, line in enumerate(lines):
            source, place = divmod(number, per_line)
            mask = (((1 << n_bits) - 1) << low) * 0x01010101
            shift = low - place * n_bits
            bits = stored[source] << shift if shift >= 0 else stored[source] >> -shift
            result.append(line | (bits & mask))
        return result

    def _looked_up(self, line: Value) -> Value:
        """Replace codes by the values of the layout's table."""
        table = [value + self.zero_point for value in self.layout.table]
        table = [value - 256 if value > 127 else value for value in table]
        return self.isa.table_lookup(self.code, table, line.bitcast(LINE)).bitcast(INTS)

    @property
    def zero_point(self) -> int:
        """Number to subtract from the bytes of `lines`."""
        if self.isa.signed_weights or self.layout.zero:
            return self.layout.zero
        if self.layout.table:
            return -min(self.layout.table)
        return 128 if self.layout.low == 8 else 0

    @property
    def largest_weight(self) -> int:
        """Argument `largest` of `Isa.dots`."""
        layout = self.layout
        if not layout.table and layout.low < 8:
            return int((1 << (layout.low + layout.high)) - 1)
        if not self.isa.signed_weights:
            return 255
        return -max(map(abs, layout.table), default=128)

    def scales(self, tile: TileAddresses) -> tuple[list[Value], list[Value]]:
        """Load the scales of the sub-blocks and the factors of Σ x, in F32 for 16 rows.

        The second list is empty where no multiple of Σ x is added.
        """
        layout, code = self.layout, self.code
        if layout.scale == "f16_min":
            scale, minimum = (
                self.isa.f16_to_f32(code, code.load(tile.scales + at, HALVES)) for at in (0, 32)
            )
            return [scale], [minimum]
        if layout.has_supers:
            scales, added = self._super_scales(tile)
        else:
            scales, added = [self._own_scale(tile, n) for n in range(BLOCK // layout.sub)], []
        if self.zero_point:
            added = [scale * float(-self.zero_point) for scale in scales]
        return scales, added

    def _own_scale(self, tile: TileAddresses, sub: int) -> Value:
        """Load a sub-block's scale, of a type without factors: F16, F32 or an exponent."""
        code = self.code
        if self.layout.scale == "f16":
            return self.isa.f16_to_f32(code, code.load(tile.scales + 32 * sub, HALVES))
        if self.layout.scale == "f32":
            return code.load(tile.scales + 64 * sub, FLOATS)
        exponent = code.load(tile.scales + 16 * sub, BYTES).to(INTS, signed=False)
        tiny = code.constant(INTS, 0x00200000) << exponent
        return code.where(exponent < 2, tiny, (exponent - 1) << 23).bitcast(FLOATS)

    def _super_scales(self, tile: TileAddresses) -> tuple[list[Value], list[Value]]:
        """Load the scales and the negated minima (if any) of the sub-blocks, times F16 factors."""
        layout, code = self.layout, self.code
        subs = range(BLOCK // layout.sub)
        factor = self.isa.f16_to_f32(code, code.load(tile.supers, HALVES))
        stored = [code.load(tile.scales + 16 * n, BYTES) for n in subs]
        if layout.scale == "super":
            signed = layout.signed_scale
            return [factor * s.to(INTS, signed=signed).to(FLOATS) for s in stored], []
        minimum = self.isa.f16_to_f32(code, code.load(tile.supers + 32, HALVES)) * -1.0
        if layout.scale == "super_nibbles":
            wide = [s.to(INTS, signed=False) for s in stored]
            scales, minima = [w & 15 for w in wide], [w >> 4 for w in wide]
        else:
            scales = [s.to(INTS, signed=False) for s in stored]
            at = tile.scales + 16 * len(subs)
            minima = [code.load(at + 16 * n, BYTES).to(INTS, signed=False) for n in subs]
        return [factor * s.to(FLOATS) for s in scales], [minimum * m.to(FLOATS) for m in minima]


def add_block(
    reader: TileReader,
    tile: TileAddresses,
    panel: Value,
    offsets: PanelOffsets,
    sums: list[Variable],
) -> None:
    """Add the products of one block, 16 rows × 32 columns, with a panel's tokens to their sums."""
    code = reader.code
    lines = reader.lines(tile, ahead=len(sums) == 1)
    scales, added = reader.scales(tile)
    first, second = (_half_sums(reader, lines, panel, offsets, half) for half in range(2))
    for token, total in enumerate(sums):
        d = [code.splat(code.load(panel + offsets.scale(token, half), F32)) for half in range(2)]
        if len(scales) == 1:
            both = code.fma(second[token], d[1], first[token] * d[0])
            total.set(code.fma(scales[0], both, total.get()))
        else:
            total.set(code.fma(scales[0], first[token] * d[0], total.get()))
            total.set(code.fma(scales[1], second[token] * d[1], total.get()))
        for sub, number in enumerate(added):
            place = offsets.sum(token) if len(added) == 1 else offsets.half_sum(token, sub)
            x_sum = code.splat(code.load(panel + place, F32))
            total.set(code.fma(number, x_sum, total.get()))


def _half_sums(
    reader: TileReader, lines: list[Value], panel: Value, offsets: PanelOffsets, half: int
) -> list[Value]:
    """Return the integer dot products of 16 rows × 16 columns with each token, as F32."""
    code = reader.code
    lines = lines[4 * half : 4 * half + 4]
    weights = [line.bitcast(LINE) for line in lines]
    totals: list[Value] = []
    for part in range(offsets.x_bytes):
        at = [panel + (offsets.numbers(t, part) + 16 * half) for t in range(offsets.n_tokens)]
        x = [[code.load(a + LINE_COLUMNS * n, I32) for n in range(4)] for a in at]
        sums = reader.isa.dots(code, weights, x, reader.largest_weight)
        if totals:
            sums = [(t << 8) - t + s for t, s in zip(totals, sums, strict=True)]  # t × BASE + s
        totals = sums
    return [total.to(FLOATS) for total in totals]


def add_tile(module: ir.Module, isa: Isa, layout: Layout, n_tokens: int, x_bytes: int = 1) -> str:
    """Write `tile_m(planes, n_blocks, skip, panel, out, out_stride)`: 16 rows times m tokens.

    Token t's results go to `out + t × out_stride`, 16 F32 each. Returns the function's name.
    """
    name = f"tile_{n_tokens}"
    code, (planes, n_blocks, skip, panel, out, stride) = function(module, name, 6)
    code.builder.function.linkage = "internal"
    reader = TileReader(code, isa, layout)
    high, scales, supers = layout.starts(planes, n_blocks)
    sums = [code.variable(code.constant(FLOATS, 0.0)) for _ in range(n_tokens)]
    offsets = PanelOffsets(n_tokens, x_bytes)

    def add(block: Value, factor: Value) -> None:
        tile = TileAddresses(
            planes + block * layout.low_bytes, high + block * layout.high_bytes,
            scales + block * layout.scale_bytes, factor,
        )  # fmt: skip
        add_block(reader, tile, panel + block * offsets.n_bytes, offsets, sums)

    if layout.has_supers:
        n_super = (n_blocks + skip + (SUPER - 1)) // SUPER
        with code.loop(code.number(0), n_super) as index:
            first, last = index * SUPER - skip, index * SUPER - skip + SUPER
            first = code.where(first < 0, code.number(0), first)
            last = code.where(last > n_blocks, n_blocks, last)
            with code.loop(first, last) as block:
                add(block, supers + index * layout.super_bytes)
    else:
        with code.loop(code.number(0), n_blocks) as block:
            add(block, supers)
    for token, total in enumerate(sums):
        code.store(total.get(), out + stride * token)
    code.builder.ret_void()
    return name


ARGUMENTS = (
    "planes", "tile_bytes", "n_blocks", "skip", "panels", "n_tokens", "out", "out_stride", "n_rows",
    "n_tile", "tiles_per_piece", "tokens_per_pass",
)  # fmt: skip
"""Arguments of the kernel. `out` is (n_tokens, n_rows) F32 with rows `out_stride` bytes apart. A
piece is `tiles_per_piece` tiles times up to `tokens_per_pass` tokens, whose panels stay in a core's
cache; that number is a multiple of `Isa.tile_tokens`."""


def build(module: ir.Module, isa: Isa, layout: Layout, x_bytes: int = 1) -> None:
    """Write `multiply(team, *ARGUMENTS)` for matrices of one layout."""
    add_run(module)
    add_rows(module, isa, layout, x_bytes)
    with piece(module, "multiply", ARGUMENTS) as (code, given, index):
        _emit_piece(code, given, index, x_bytes)
    add_kernel(module, "multiply", ARGUMENTS, _n_pieces)


def _sizes(isa: Isa) -> list[int]:
    """Return the numbers of tokens of a panel, largest first."""
    return [1 << n for n in reversed(range(isa.tile_tokens.bit_length()))]


def _n_runs(given: Named) -> Value:
    """Return the number of pieces that the tiles are split into."""
    return ceil_div(given["n_tile"], given["tiles_per_piece"])


def _n_pieces(code: Code, given: Named) -> Value:
    return _n_runs(given) * ceil_div(given["n_tokens"], given["tokens_per_pass"])


def _emit_piece(code: Code, given: Named, index: Value, x_bytes: int) -> None:
    """Write a piece: some tiles times some tokens."""
    n_runs = _n_runs(given)
    first_tile = index % n_runs * given["tiles_per_piece"]
    last_tile = code.min_signed(first_tile + given["tiles_per_piece"], given["n_tile"])
    first_token = index // n_runs * given["tokens_per_pass"]
    last_token = code.min_signed(first_token + given["tokens_per_pass"], given["n_tokens"])
    panels = given["panels"] + first_token * given["n_blocks"] * panel_block_bytes(x_bytes)
    out = given["out"] + first_token * given["out_stride"]
    with code.loop(first_tile, last_tile) as tile:
        rows_left = given["n_rows"] - tile * TILE
        code.call(
            "rows", VOID, given["planes"] + tile * given["tile_bytes"], given["n_blocks"],
            given["skip"], panels, last_token - first_token, out + tile * (4 * TILE),
            given["out_stride"], rows_left,
        )  # fmt: skip


def add_rows(module: ir.Module, isa: Isa, layout: Layout, x_bytes: int = 1) -> None:
    """Write `rows(planes, n_blocks, skip, panels, n_tokens, out, out_stride, rows_left)`: one tile.

    Computes all panels' tokens; if fewer than 16 rows are left, only those are written to `out`.
    """
    sizes = _sizes(isa)
    for size in sizes:
        add_tile(module, isa, layout, size, x_bytes)
    code, (planes, n_blocks, skip, panels, n_tokens, out, stride, left) = function(
        module, "rows", 8
    )
    code.builder.function.linkage = "internal"
    buffer = Value(code, code.builder.ptrtoint(code.builder.alloca(FLOATS, sizes[0]), I64))
    is_whole = left >= TILE
    goal = code.where(is_whole, out, buffer)
    goal_stride = code.where(is_whole, stride, code.number(4 * TILE))
    panel, done = code.variable(panels), code.variable(code.number(0))

    def group(size: int) -> None:
        token = done.get()
        goal_now = code.where(is_whole, goal + token * stride, buffer)
        code.call(f"tile_{size}", VOID, planes, n_blocks, skip, panel.get(), goal_now, goal_stride)
        n_copied = code.where(is_whole, code.number(0), left)
        with (
            code.loop(code.number(0), code.number(size)) as t,
            code.loop(code.number(0), n_copied) as row,
        ):
            number = code.load(buffer + t * (4 * TILE) + row * 4, F32)
            code.store(number, out + (token + t) * stride + row * 4)
        panel.set(panel.get() + n_blocks * (size * panel_block_bytes(x_bytes)))
        done.set(token + size)

    with code.loop(code.number(0), n_tokens // sizes[0]):
        group(sizes[0])
    for size in sizes[1:]:
        with code.when((n_tokens & size) > 0):
            group(size)
    code.builder.ret_void()
