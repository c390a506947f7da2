"""GEMM with quantised matrices for several panels of tokens: weights are unpacked once for all.

Some tiles of 16 rows are multiplied by all panels, a super-block of columns at a time, so that a
core's first cache holds the unpacked weights, and the part of a panel that all of them multiply.
Meanwhile the tokens' sums wait on the stack. Rows of the result are often so many bytes apart that
their elements push each other out of the caches: a panel's results are written as soon as they are
known, to places that were prefetched shortly before. Where loads are what limits a product, two
tiles are multiplied at once by the same numbers of a token. Sums are made in the order of
`quantised_gemm.add_tile`.
"""

from __future__ import annotations

from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.loops import ceil_div
from engine.backends.cpu.kernels.language.values import (
    F32,
    FLOATS,
    INTS,
    LANES,
    LINE,
    VOID,
    Value,
    function,
)
from engine.backends.cpu.kernels.products.block_sums import (
    N_LINES,
    BlockPart,
    Factors,
    add_block,
    add_blocks,
    arranged,
    shares_numbers,
)
from engine.backends.cpu.kernels.products.panels import PanelOffsets
from engine.backends.cpu.kernels.products.tile_reader import BlockGroup, TileReader, for_each_group
from engine.formats.quants.layout import LINE_BYTES, SUPER, TILE, Layout

VECTOR_BYTES = 4 * LANES
"""Size of a line of weights, and of a vector of factors."""

BLOCK_BYTES = (N_LINES + 4) * VECTOR_BYTES
"""Room for an unpacked block: its lines, then up to four vectors of factors."""

MAX_PANELS = 64
"""Largest number of panels whose sums wait at a time."""

MAX_TILES = 4
"""Largest number of tiles that are multiplied at a time."""

PAIR, PAIR_TOKENS = 2, 4
"""Tiles that share a token's numbers, and tokens at a time of which the registers hold the sums."""

SUMS_BYTES = MAX_TILES * VECTOR_BYTES
"""Room for a token's sums."""

UNPACKED_BYTES = SUPER * BLOCK_BYTES
"""Room for the unpacked blocks of a tile."""

AHEAD_PANELS = 2
"""Number of panels by which the places of results are prefetched. So few stay in a cache even where
all of them compete for the same lines."""


def add_groups(module: ir.Module, isa: Isa, layout: Layout, x_bytes: int) -> None:
    """Write `groups(planes, tile_bytes, n_tile, n_blocks, skip, panels, n_panels, out, …)`.

    Multiplies up to `MAX_TILES` tiles by full panels of tokens. The other arguments are the bytes
    between rows of the result and n, the number of rows that are written. The weights of the next
    group of blocks are prefetched meanwhile, some for each panel.
    """
    _add_unpack(module, isa, layout, x_bytes)
    _add_panel(module, isa, layout, x_bytes)
    code, (planes, tile_bytes, n_tile, n_blocks, skip, panels, n_panels, out, stride, n) = function(
        module, "groups", 10
    )
    code.builder.function.linkage = "internal"
    tokens = isa.tile_tokens
    panel_bytes = n_blocks * PanelOffsets(tokens, x_bytes).n_bytes
    n_lines = code.number(-(-layout.tile_bytes(SUPER, 0) // LINE_BYTES))
    unpacked = code.stack_buffer(LINE, MAX_TILES * UNPACKED_BYTES // VECTOR_BYTES)
    sums = code.stack_buffer(FLOATS, MAX_PANELS * tokens * SUMS_BYTES // VECTOR_BYTES)
    with code.loop(code.number(0), n_panels, MAX_PANELS) as begin:
        count = code.min_signed(n_panels - begin, code.number(MAX_PANELS))

        def multiply(group: BlockGroup) -> None:
            first, last = group.first, group.last
            with code.loop(code.number(0), n_tile) as tile:
                here, goal = planes + tile * tile_bytes, unpacked + tile * UNPACKED_BYTES
                code.call("unpack", VOID, here, group.index, first, last, goal)
            behind = layout.places(planes, group.index + 1, last, last, last).supers
            behind = code.where(last.equals(n_blocks), planes + n_tile * tile_bytes, behind)
            step = ceil_div(n_lines, count)
            with code.loop(code.number(0), count) as panel:
                lines = panel * step, code.min_signed((panel + 1) * step, n_lines)
                code.call(
                    "panel", VOID, unpacked, n_tile, panels + (begin + panel) * panel_bytes, first,
                    last, n_blocks, sums + panel * (tokens * SUMS_BYTES),
                    out + (begin + panel) * tokens * stride, stride, n, behind, tile_bytes, *lines,
                )  # fmt: skip

        for_each_group(code, n_blocks, skip, multiply)
    code.builder.ret_void()


def _add_panel(module: ir.Module, isa: Isa, layout: Layout, x_bytes: int) -> None:
    """Write `panel(unpacked, n_tile, panel, first, last, n_blocks, sums, out, out_stride, n, …)`.

    Multiplies the unpacked blocks from `first` to `last` of some tiles by a panel; behind the last
    block, results are written. The other arguments say what is prefetched: an address for the
    first tile, the bytes from tile to tile, the first line and the one behind the last.
    """
    _add_add_up(module, isa, layout, x_bytes)
    _add_write(module, isa, x_bytes)
    tokens = isa.tile_tokens
    code, values = function(module, "panel", 14)
    unpacked, n_tile, panel, first, last, n_blocks, sums, out, stride, n, *ahead = values
    behind, tile_bytes, *lines = ahead
    code.builder.function.linkage = "internal"
    here = panel + first * PanelOffsets(tokens, x_bytes).n_bytes
    with code.loop(code.number(0), n_tile) as tile, code.loop(*lines) as line:
        code.prefetch(behind + tile * tile_bytes + line * LINE_BYTES, cache=2)

    def add_up(name: str, begin: Value, end: Value, size: int) -> None:
        with code.loop(begin, end, size) as tile:
            weights, place = unpacked + tile * UNPACKED_BYTES, sums + tile * (tokens * VECTOR_BYTES)
            code.call(name, VOID, weights, here, last - first, place, first)

    n_in_pairs = code.number(0)
    if shares_numbers(TileReader(code, isa, layout), x_bytes):
        _add_pair(module, isa, layout, x_bytes)
        n_in_pairs = n_tile // PAIR * PAIR
        add_up("add_up_pair", code.number(0), n_in_pairs, PAIR)
    add_up("add_up", n_in_pairs, n_tile, 1)
    with code.loop(code.number(0), n_tile) as tile:
        place = sums + tile * (tokens * VECTOR_BYTES)
        with code.when(last.equals(n_blocks)):
            n_left = code.min_signed(n - tile * TILE, code.number(TILE))
            code.call("write", VOID, place, panel, out + tile * (4 * TILE), stride, n_left)
    code.builder.ret_void()


def _add_write(module: ir.Module, isa: Isa, x_bytes: int) -> None:
    """Write `write(sums, panel, out, out_stride, n)`: the results of a panel and a tile.

    They are the sums times the tokens' units, of the first n rows. Places of panels behind are
    prefetched: they often lie in pages of their own, whose addresses have to be looked up first.
    """
    code, (sums, panel, out, stride, n) = function(module, "write", 5)
    code.builder.function.linkage = "internal"
    offsets, tokens = PanelOffsets(isa.tile_tokens, x_bytes), isa.tile_tokens
    for token in range(tokens):
        code.prefetch(out + stride * (AHEAD_PANELS * tokens + token), cache=2)
    for token in range(tokens):
        total = code.load(sums + VECTOR_BYTES * token, FLOATS)
        factor = code.load(panel + offsets.unit(token), F32)
        code.store_part(total * code.splat(factor), out + stride * token, n)
    code.builder.ret_void()


def _add_unpack(module: ir.Module, isa: Isa, layout: Layout, x_bytes: int) -> None:
    """Write `unpack(planes, index, first, last, unpacked)`: the blocks of a group."""
    code, (planes, index, first, last, unpacked) = function(module, "unpack", 5)
    code.builder.function.linkage = "internal"
    reader, group = TileReader(code, isa, layout), BlockGroup(index, first, last)
    with code.loop(first, last) as block:
        places, goal = group.places(layout, planes, block), unpacked + (block - first) * BLOCK_BYTES
        scales, added = reader.product_factors(places)
        lines = arranged(reader, reader.lines(places), x_bytes)
        for n, values in enumerate([*lines, *scales, *added]):
            code.store(values, goal + VECTOR_BYTES * n)
    code.builder.ret_void()


def _add_pair(module: ir.Module, isa: Isa, layout: Layout, x_bytes: int) -> None:
    """Write `add_up_pair(unpacked, panel, n_blocks, sums, n_before)`: `add_up` for two tiles.

    The registers hold the sums of `PAIR_TOKENS` tokens at a time.
    """
    code, (unpacked, panel, n_blocks, place, n_before) = function(module, "add_up_pair", 5)
    code.builder.function.linkage = "internal"
    reader, offsets = TileReader(code, isa, layout), PanelOffsets(isa.tile_tokens, x_bytes)
    zero = code.constant(FLOATS, 0.0)
    for first_token in range(0, isa.tile_tokens, PAIR_TOKENS):
        places = [
            [
                place + VECTOR_BYTES * (tile * isa.tile_tokens + first_token + token)
                for token in range(PAIR_TOKENS)
            ]
            for tile in range(PAIR)
        ]
        sums = [
            [code.variable(code.where(n_before > 0, code.load(at, FLOATS), zero)) for at in ats]
            for ats in places
        ]
        with code.loop(code.number(0), n_blocks) as block:
            parts = []
            for tile in range(PAIR):
                start = unpacked + block * BLOCK_BYTES + tile * UNPACKED_BYTES
                parts.append(BlockPart(*_loaded(reader, start), sums[tile]))
            add_blocks(reader, parts, panel + block * offsets.n_bytes, offsets, first_token)
        for ats, totals in zip(places, sums, strict=True):
            for at, total in zip(ats, totals, strict=True):
                code.store(total.get(), at)
    code.builder.ret_void()


def _loaded(reader: TileReader, start: Value) -> tuple[list[Value], Factors]:
    code, (n_scales, n_added) = reader.code, reader.n_factors
    lines = [code.load(start + VECTOR_BYTES * i, INTS) for i in range(N_LINES)]
    behind = start + VECTOR_BYTES * N_LINES
    found = [code.load(behind + VECTOR_BYTES * i, FLOATS) for i in range(n_scales + n_added)]
    return lines, (found[:n_scales], found[n_scales:])


def _add_add_up(module: ir.Module, isa: Isa, layout: Layout, x_bytes: int) -> None:
    """Write `add_up(unpacked, panel, n_blocks, sums, n_before)`: one panel.

    Adds the products of some blocks to a panel's sums; before the first block these are 0.
    """
    code, (unpacked, panel, n_blocks, place, n_before) = function(module, "add_up", 5)
    code.builder.function.linkage = "internal"
    reader, offsets = TileReader(code, isa, layout), PanelOffsets(isa.tile_tokens, x_bytes)
    places = [place + VECTOR_BYTES * token for token in range(isa.tile_tokens)]
    zero = code.constant(FLOATS, 0.0)
    sums = [code.variable(code.where(n_before > 0, code.load(at, FLOATS), zero)) for at in places]
    with code.loop(code.number(0), n_blocks) as block:
        lines, factors = _loaded(reader, unpacked + block * BLOCK_BYTES)
        add_block(reader, lines, factors, panel + block * offsets.n_bytes, offsets, sums)
    for at, total in zip(places, sums, strict=True):
        code.store(total.get(), at)
    code.builder.ret_void()
