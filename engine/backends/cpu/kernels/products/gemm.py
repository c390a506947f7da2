"""GEMV and GEMM with tiled matrices: one loop nest for all weight and activation types.

Weights are stored in tiles of 16 rows, activations in panels of tokens (`panels`, `int16_panels`).
`Operands` (in `quantised_gemm` and `int16_gemm`) define how both are read and multiplied, and how a
sum becomes a result. The nest:

    piece             some tiles times some tokens; threads take one piece after another
      groups          four tiles times many tokens: weights are unpacked once for all tokens
        group         256 columns: unpack them, then
          panel         a panel's tokens, two tiles at a time where that helps
            block         32 columns, in registers
      tile            remaining tokens, or small batches: weights are unpacked for each panel

L1 holds one group from each of four unpacked tiles, and the part of a panel that they multiply; the
tokens' sums are on the stack. The result's row stride is often one at which elements evict each
other from the caches, so a panel's results are written as soon as they are complete, to addresses
prefetched shortly before. Products are always added in column order, so a token's bits do not
depend on the other tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.loops import Named, add_kernel, ceil_div, piece
from engine.backends.cpu.kernels.language.values import (
    FLOATS,
    LANES,
    LINE,
    VOID,
    Code,
    Value,
    Variable,
    internal,
)
from engine.backends.cpu.kernels.products.panels import panel_sizes
from engine.backends.cpu.kernels.products.tile_reader import BlockGroup, for_each_group
from engine.backends.cpu.kernels.running.thread_pool import add_run
from engine.formats.quants.layout import LINE_BYTES, TILE

ARGUMENTS = (
    "planes", "tile_bytes", "n_blocks", "skip", "panels", "n_tokens", "out", "out_stride", "n_rows",
    "n_tile", "tiles_per_piece", "tokens_per_pass",
)  # fmt: skip
"""The kernel's arguments. `out` is (n_tokens, n_rows), F32, with rows `out_stride` bytes apart. A
piece is `tiles_per_piece` tiles times up to `tokens_per_pass` tokens (a multiple of
`Isa.tile_tokens`), whose panels fit in the last-level cache."""

VECTOR_BYTES = 4 * LANES
"""Size in bytes of 16 sums, or of any other vector with one number per row."""

MIN_PANELS = 2
"""Minimum number of full panels for sharing unpacked weights."""

MAX_PANELS = 64
"""Largest number of panels whose sums are on the stack simultaneously."""

MAX_TILES = 4
"""Largest number of tiles unpacked at a time."""

AHEAD_PANELS = 2
"""Prefetch distance for results, in panels; this few stay cached even if they share cache sets."""


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Prefetch of the next weight group's cache lines, for several tiles.

    Attributes:
        place: address of the first tile's next group.
        tile_bytes: bytes from one tile to the next.
        first, last: range of the lines.
    """

    place: Value
    tile_bytes: Value
    first: Value
    last: Value

    def emit(self, n_tiles: Value) -> None:
        """Prefetch all lines for the first `n_tiles` tiles."""
        code = self.place.code
        with code.loop(code.number(0), n_tiles) as tile, code.loop(self.first, self.last) as line:
            code.prefetch(self.place + tile * self.tile_bytes + line * LINE_BYTES, cache=2)

    def emit_part(self, block: Value, n_blocks: Value, n_tiles: int = 1) -> None:
        """Prefetch a block's share of the lines, given the block's index in the group.

        The prefetches are spread because a core stalls when too many cache misses are pending.
        """
        code, step = self.place.code, ceil_div(self.last - self.first, n_blocks)
        begin = self.first + block * step
        with code.loop(begin, code.min_signed(begin + step, self.last)) as line:
            for tile in range(n_tiles):
                at = self.place + self.tile_bytes * tile
                code.prefetch(at + line * LINE_BYTES, cache=2)


def _nothing(_: Value) -> None:
    """Emit no code."""


@dataclass(frozen=True, slots=True)
class Products:
    """Products of one column group, for some tiles and some of a panel's tokens.

    Attributes:
        code: builder of the function.
        tiles: address of each tile's (unpacked) group.
        panel: address of the group's first block in the panel.
        n_blocks: number of blocks in the group.
        size: number of tokens in the panel.
        tokens: the tokens to multiply.
        sums: running sum for each tile and each of `tokens`.
        each_block: emits additional code for each block, given the block's index in the group.
    """

    code: Code
    tiles: Sequence[Value]
    panel: Value
    n_blocks: Value
    size: int
    tokens: range
    sums: Sequence[Sequence[Variable]]
    each_block: Callable[[Value], None] = _nothing


class Operands(ABC):
    """A combination of weight and activation types: how they are read, multiplied and finished.

    Attributes:
        isa: instruction set.
        block_bytes: bytes per token in a panel's block of 32 columns.
        group_bytes: bytes per tile in a group of 256 columns, for prefetching.
        unpacked_bytes: size of an unpacked group; 0 if groups are multiplied in place.
        unpack_tokens: number of tokens whose products take as long as unpacking; determines how
            much of the next weights is prefetched during unpacking.
        panel_sizes: sizes, in tokens, of panels that share unpacked weights; largest first.
        tile_sizes: sizes, in tokens, of panels that unpack weights themselves; largest first.
        widths: how many tiles may be multiplied at a time, largest first. If the last is 2, an odd
            tile is multiplied together with the memory after it, and those results are dropped.
        spreads_prefetch: whether blocks share the prefetches; otherwise they precede the panel.
    """

    unpacked_bytes: int = 0
    unpack_tokens: ClassVar[int] = 0
    spreads_prefetch: ClassVar[bool] = False
    widths: Sequence[int] = (2, 1)

    def __init__(self, isa: Isa, block_bytes: int, group_bytes: int) -> None:
        self.isa = isa
        self.block_bytes = block_bytes
        self.group_bytes = group_bytes
        self.panel_sizes: Sequence[int] = (isa.tile_tokens,)
        self.tile_sizes: Sequence[int] = panel_sizes(isa)

    def n_grouped(self, code: Code, n_tokens: Value) -> Value:
        """Return the number of leading tokens that share unpacked weights."""
        n_panels = n_tokens // self.isa.tile_tokens
        return code.where(n_panels < MIN_PANELS, code.number(0), n_panels) * self.isa.tile_tokens

    @abstractmethod
    def group(self, tile: Value, group: BlockGroup) -> Value:
        """Return the address of a group, given its tile's address."""

    def unpack(self, tile: Value, group: BlockGroup, goal: Value, ahead: Prefetch) -> None:
        """Unpack a group to an address; called only if `unpacked_bytes` is not 0."""
        raise NotImplementedError

    @abstractmethod
    def multiply_tile(self, code: Code, tile: Value, group: BlockGroup, products: Products) -> None:
        """Emit the products of a packed group in `products.tiles[0]`."""

    @property
    @abstractmethod
    def steps(self) -> Mapping[str, Callable[[Products], None]]:
        """Functions that emit products of unpacked groups, by name.

        Each emits a separate function, so that its values fit in the registers.
        """

    def tokens_at_once(self, size: int, width: int) -> int:
        """Return how many tokens' sums fit in the registers, for `width` tiles."""
        del width
        return size

    def result(self, total: Value, panel: Value, size: int, token: int) -> Value:
        """Convert a token's sum to its result; `panel` is the address of any group in its panel."""
        del panel, size, token
        return total


def build(module: ir.Module, operands: Operands) -> None:
    """Emit `multiply(pool, *ARGUMENTS)`."""
    add_run(module)
    add_rows(module, operands)
    with piece(module, "multiply", ARGUMENTS) as (code, given, index):
        _emit_piece(code, given, index, operands.block_bytes)
    add_kernel(module, "multiply", ARGUMENTS, _n_pieces)


def _n_runs(given: Named) -> Value:
    return ceil_div(given["n_tile"], given["tiles_per_piece"])


def _n_pieces(code: Code, given: Named) -> Value:
    return _n_runs(given) * ceil_div(given["n_tokens"], given["tokens_per_pass"])


def _emit_piece(code: Code, given: Named, index: Value, block_bytes: int) -> None:
    n_runs = _n_runs(given)
    first_tile = index % n_runs * given["tiles_per_piece"]
    last_tile = code.min_signed(first_tile + given["tiles_per_piece"], given["n_tile"])
    first_token = index // n_runs * given["tokens_per_pass"]
    last_token = code.min_signed(first_token + given["tokens_per_pass"], given["n_tokens"])
    panels = given["panels"] + first_token * given["n_blocks"] * block_bytes
    out = given["out"] + first_token * given["out_stride"] + first_tile * (4 * TILE)
    code.call(
        "rows", VOID, given["planes"] + first_tile * given["tile_bytes"], given["tile_bytes"],
        given["n_blocks"], given["skip"], panels, last_token - first_token, out,
        given["out_stride"], row_count(code, given, first_tile, last_tile),
    )  # fmt: skip


def row_count(code: Code, given: Named, first_tile: Value, last_tile: Value) -> Value:
    """Return the number of rows in some tiles; a matrix's last tile may have fewer than 16."""
    return code.min_signed(last_tile * TILE, given["n_rows"]) - first_tile * TILE


def add_rows(module: ir.Module, operands: Operands) -> None:
    """Emit `rows(planes, tile_bytes, n_blocks, skip, panels, n_tokens, out, out_stride, n_rows)`.

    Multiplies the tokens of all panels by some rows, starting at a tile's first row.
    """
    _add_groups(module, operands)
    _add_tiles(module, operands)
    code, values = internal(module, "rows", 9)
    planes, tile_bytes, n_blocks, skip, panels, n_tokens, out, stride, n_rows = values
    n_done = operands.n_grouped(code, n_tokens)
    n_tile = ceil_div(n_rows, TILE)
    with code.when(n_done > 0), code.loop(code.number(0), n_tile, MAX_TILES) as tile:
        n_tiles = code.min_signed(n_tile - tile, code.number(MAX_TILES))
        code.call(
            "groups", VOID, planes + tile * tile_bytes, tile_bytes, n_tiles, n_blocks, skip, panels,
            n_done, out + tile * (4 * TILE), stride, n_rows - tile * TILE,
        )  # fmt: skip
    remaining = panels + n_done * n_blocks * operands.block_bytes
    with code.when(n_done < n_tokens), code.loop(code.number(0), n_tile) as tile:
        code.call(
            "tiles", VOID, planes + tile * tile_bytes, n_blocks, skip, remaining, n_tokens - n_done,
            out + n_done * stride + tile * (4 * TILE), stride, n_rows - tile * TILE,
        )  # fmt: skip
    code.builder.ret_void()


def _add_tiles(module: ir.Module, operands: Operands) -> None:
    """Emit `tiles(planes, n_blocks, skip, panels, n_tokens, out, out_stride, n)`: one tile.

    It unpacks weights for each panel; n is the number of remaining rows.
    """
    for size in operands.tile_sizes:
        _add_tile(module, operands, size)
    code, (planes, n_blocks, skip, panels, n_tokens, out, stride, n) = internal(module, "tiles", 8)
    panel, done = code.variable(panels), code.variable(code.number(0))
    for size in operands.tile_sizes:
        with code.when((n_tokens & size) > 0):
            goal = out + done.get() * stride
            code.call(f"tile_{size}", VOID, planes, n_blocks, skip, panel.get(), goal, stride, n)
            panel.set(panel.get() + n_blocks * (size * operands.block_bytes))
            done.set(done.get() + size)
    code.builder.ret_void()


def _add_tile(module: ir.Module, operands: Operands, size: int) -> None:
    """Emit `tile_m(planes, n_blocks, skip, panel, out, out_stride, n)`: n rows times m tokens."""
    code, values = internal(module, f"tile_{size}", 7)
    planes, n_blocks, skip, panel, out, stride, n = values
    sums = [code.variable(code.constant(FLOATS, 0.0)) for _ in range(size)]

    def multiply(group: BlockGroup) -> None:
        here = panel + group.first * (size * operands.block_bytes)
        n_here, tiles = group.last - group.first, [operands.group(planes, group)]
        products = Products(code, tiles, here, n_here, size, range(size), [sums])
        operands.multiply_tile(code, planes, group, products)

    for_each_group(code, n_blocks, skip, multiply)
    totals = [total.get() for total in sums]
    _write(operands, totals, panel, out, stride, n)
    code.builder.ret_void()


def _write(
    operands: Operands, totals: Sequence[Value], panel: Value, out: Value, stride: Value, n: Value
) -> None:
    code, size = panel.code, len(totals)
    results = [operands.result(total, panel, size, token) for token, total in enumerate(totals)]
    with code.if_else(n >= TILE) as (whole, part):
        with whole:
            for token, values in enumerate(results):
                code.store(values, out + stride * token)
        with part:
            for token, values in enumerate(results):
                code.store_part(values, out + stride * token, n)


def _add_groups(module: ir.Module, operands: Operands) -> None:
    """Emit `groups(planes, tile_bytes, n_tile, n_blocks, skip, panels, n_tokens, out, …)`.

    Multiplies up to `MAX_TILES` tiles by all panels' tokens, and prefetches some of the next
    group's weights with each panel. The other arguments are the result's row stride in bytes and
    the number of rows to write.
    """
    unpacked_bytes = operands.unpacked_bytes
    if unpacked_bytes:
        _add_unpack(module, operands)
    for size in operands.panel_sizes:
        _add_panel(module, operands, size)
    code, values = internal(module, "groups", 10)
    planes, tile_bytes, n_tile, n_blocks, skip, panels, n_tokens, out, stride, n = values
    largest, *others = operands.panel_sizes
    most = MAX_PANELS * largest
    n_lines = code.number(-(-operands.group_bytes // LINE_BYTES))
    unpacked = code.stack_buffer(LINE, MAX_TILES * unpacked_bytes // VECTOR_BYTES)
    sums = code.stack_buffer(FLOATS, most * MAX_TILES)
    with code.loop(code.number(0), n_tokens, most) as begin:
        count = code.min_signed(n_tokens - begin, code.number(most))

        def lines(first: Value, n: int) -> tuple[Value, Value]:
            """Return the range of lines to prefetch during n tokens' products."""
            total = count + operands.unpack_tokens
            return first * n_lines // total, (first + n) * n_lines // total

        def multiply(group: BlockGroup) -> None:
            first, last = group.first, group.last
            next_group = code.where(
                last.equals(n_blocks), planes + n_tile * tile_bytes,
                operands.group(planes, BlockGroup(group.index + 1, last, last)),
            )  # fmt: skip
            weights = operands.group(planes, group), tile_bytes
            if unpacked_bytes:
                weights = unpacked, code.number(unpacked_bytes)
                prefetched = lines(code.number(0), operands.unpack_tokens)
                with code.loop(code.number(0), n_tile) as tile:
                    at, goal = tile * tile_bytes, unpacked + tile * unpacked_bytes
                    code.call(
                        "unpack", VOID, planes + at, group.index, first, last, goal, next_group +
                        at, *prefetched,
                    )  # fmt: skip

            def add(size: int, token: Value) -> None:
                code.call(
                    f"panel_{size}", VOID, *weights, n_tile,
                    panels + (begin + token) * n_blocks * operands.block_bytes, first, last,
                    n_blocks, sums + token * (MAX_TILES * VECTOR_BYTES),
                    out + (begin + token) * stride, stride, n, next_group, tile_bytes,
                    *lines(token + operands.unpack_tokens, size),
                )  # fmt: skip

            n_whole = count // largest * largest
            with code.loop(code.number(0), n_whole, largest) as token:
                add(largest, token)
            done = code.variable(n_whole)
            for size in others:
                with code.when((count & size) > 0):
                    add(size, done.get())
                    done.set(done.get() + size)

        for_each_group(code, n_blocks, skip, multiply)
    code.builder.ret_void()


def _add_unpack(module: ir.Module, operands: Operands) -> None:
    """Emit `unpack(tile, index, first, last, unpacked, next_group, first_line, last_line)`.

    Unpacks one group in a tile; the last three arguments are for `Prefetch`.
    """
    code, (tile, index, first, last, unpacked, next_group, *lines) = internal(module, "unpack", 8)
    ahead = Prefetch(next_group, code.number(0), lines[0], lines[1])
    operands.unpack(tile, BlockGroup(index, first, last), unpacked, ahead)
    code.builder.ret_void()


def _add_panel(module: ir.Module, operands: Operands, size: int) -> None:
    """Emit `panel_m(weights, weight_bytes, n_tile, panel, first, last, n_blocks, sums, out, …)`.

    Multiplies the blocks from `first` to `last` of some tiles, `weight_bytes` apart, by a panel of
    m tokens, and writes the results after the last block. The other arguments are the result's row
    stride in bytes, the number of rows to write, and the arguments of `Prefetch`.
    """
    calls = {width: _add_products(module, operands, size, width) for width in operands.widths}
    _add_finish(module, operands, size)
    code, values = internal(module, f"panel_{size}", 15)
    weights, weight_bytes, n_tile, panel, first, last, n_blocks, sums, out, stride, n, *ahead = (
        values
    )
    prefetch = Prefetch(*ahead)
    if not operands.spreads_prefetch:
        prefetch.emit(n_tile)
    here = panel + first * (size * operands.block_bytes)
    begin = code.number(0)
    for width, names in calls.items():
        end = n_tile if width == operands.widths[-1] else n_tile // width * width
        with code.loop(begin, end, width) as tile:
            place = sums + tile * (size * VECTOR_BYTES)
            with code.when(first.equals(0)):
                for number in range(width * size):
                    code.store(code.constant(FLOATS, 0.0), place + VECTOR_BYTES * number)
            for name in names:
                code.call(
                    name, VOID, weights + tile * weight_bytes, weight_bytes, here, last - first,
                    place, prefetch.place + tile * prefetch.tile_bytes, *ahead[1:],
                )  # fmt: skip
        begin = end
    with code.when(last.equals(n_blocks)), code.loop(code.number(0), n_tile) as tile:
        place = sums + tile * (size * VECTOR_BYTES)
        goal, left = out + tile * (4 * TILE), n - tile * TILE
        code.call(f"finish_{size}", VOID, place, here, goal, stride, left)
    code.builder.ret_void()


def _add_products(module: ir.Module, operands: Operands, size: int, width: int) -> Sequence[str]:
    """Emit functions `(weights, weight_bytes, panel, n_blocks, sums, …)` for `Operands.steps`.

    For one group, each adds the products of `width` tiles and a panel of `size` tokens to their
    sums. The other arguments are for `Prefetch`.

    Returns:
        The functions' names, in call order.
    """
    at_once, names = operands.tokens_at_once(size, width), []
    for step, emit in operands.steps.items():
        names.append(f"{step}_{width}_{size}")
        code, values = internal(module, names[-1], 9)
        weights, weight_bytes, panel, n_blocks, place, *ahead = values
        prefetch = partial(Prefetch(*ahead).emit_part, n_blocks=n_blocks, n_tiles=width)
        for first in range(0, size, at_once):
            tokens = range(first, first + at_once)
            places = [
                [place + VECTOR_BYTES * (tile * size + token) for token in tokens]
                for tile in range(width)
            ]
            sums = [[code.variable(code.load(at, FLOATS)) for at in ats] for ats in places]
            tiles = [weights + weight_bytes * tile for tile in range(width)]
            each_block = prefetch if first == 0 else _nothing
            emit(Products(code, tiles, panel, n_blocks, size, tokens, sums, each_block))
            for ats, totals in zip(places, sums, strict=True):
                for at, total in zip(ats, totals, strict=True):
                    code.store(total.get(), at)
        code.builder.ret_void()
    return names


def _add_finish(module: ir.Module, operands: Operands, size: int) -> None:
    """Emit `finish_m(sums, panel, out, out_stride, n)`: a panel's results for a tile.

    It prefetches the destination of later panels' results, whose memory pages often miss the TLB.
    """
    code, (sums, panel, out, stride, n) = internal(module, f"finish_{size}", 5)
    if size == operands.panel_sizes[0]:
        for token in range(size):
            code.prefetch(out + stride * (AHEAD_PANELS * size + token), cache=2)
    totals = [code.load(sums + VECTOR_BYTES * token, FLOATS) for token in range(size)]
    _write(operands, totals, panel, out, stride, n)
    code.builder.ret_void()
