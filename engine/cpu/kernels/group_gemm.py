"""GEMM with quantised matrices for several panels of tokens: weights are unpacked once for all.

A tile of 16 rows is multiplied by all panels, a super-block of columns at a time. Meanwhile the
tokens' sums wait on the stack: rows of the result are often so many bytes apart that their elements
push each other out of the caches. Sums are made in the order of `quantised_gemm.add_tile`.
"""

from __future__ import annotations

from llvmlite import ir

from engine.cpu.kernels.block_sums import N_LINES, add_block, arranged
from engine.cpu.kernels.isa import Isa
from engine.cpu.kernels.panels import PanelOffsets
from engine.cpu.kernels.tile_reader import AHEAD, BlockGroup, TileReader, for_each_group
from engine.cpu.kernels.values import F32, FLOATS, INTS, LANES, LINE, VOID, Code, Value, function
from engine.quants.layout import SUPER, Layout

VECTOR_BYTES = 4 * LANES
"""Size of a line of weights, and of a vector of factors."""

BLOCK_BYTES = (N_LINES + 4) * VECTOR_BYTES
"""Room for an unpacked block: its lines, then up to four vectors of factors."""

MOST_PANELS = 64
"""Largest number of panels whose sums wait at a time."""


def add_groups(module: ir.Module, isa: Isa, layout: Layout, x_bytes: int) -> None:
    """Write `groups(planes, n_blocks, skip, panels, n_panels, out, out_stride, n)`: one tile.

    Multiplies 16 rows by full panels of tokens; only the first n rows are written to `out`.
    """
    _add_unpack(module, isa, layout, x_bytes)
    _add_add_up(module, isa, layout, x_bytes)
    code, (planes, n_blocks, skip, panels, n_panels, out, stride, n) = function(module, "groups", 8)
    code.builder.function.linkage = "internal"
    offsets = PanelOffsets(isa.tile_tokens, x_bytes)
    unpacked = code.stack_buffer(LINE, SUPER * BLOCK_BYTES // VECTOR_BYTES)
    sums = code.stack_buffer(FLOATS, MOST_PANELS * isa.tile_tokens)
    with code.loop(code.number(0), n_panels, MOST_PANELS) as begin:
        count = code.min_signed(n_panels - begin, code.number(MOST_PANELS))

        def multiply(group: BlockGroup) -> None:
            first, last = group.first, group.last
            code.call("unpack", VOID, planes, group.index, first, last, unpacked)
            with code.loop(code.number(0), count) as number:
                panel = panels + ((begin + number) * n_blocks + first) * offsets.n_bytes
                place = sums + number * (isa.tile_tokens * VECTOR_BYTES)
                goal = out + (begin + number) * isa.tile_tokens * stride
                with code.when(first.equals(0)):
                    _prefetch_rows(code, goal, stride, isa)
                code.call("add_up", VOID, unpacked, panel, last - first, place, first)

        for_each_group(code, n_blocks, skip, multiply)
        with code.loop(code.number(0), count * isa.tile_tokens) as token:
            panel = begin + token // isa.tile_tokens
            unit = panels + panel * (n_blocks * offsets.n_bytes) + offsets.unit(0)
            factor = code.load(unit + token % isa.tile_tokens * 4, F32)
            goal = out + (begin * isa.tile_tokens + token) * stride
            total = code.load(sums + token * VECTOR_BYTES, FLOATS)
            code.store_part(total * code.splat(factor), goal, n)
    code.builder.ret_void()


def _prefetch_rows(code: Code, out: Value, stride: Value, isa: Isa) -> None:
    """Prefetch the places of a panel's results.

    They often lie in pages of their own, whose addresses then need not be looked up all at once.
    """
    for token in range(isa.tile_tokens):
        code.prefetch(out + stride * token, cache=2)


def _add_unpack(module: ir.Module, isa: Isa, layout: Layout, x_bytes: int) -> None:
    """Write `unpack(planes, index, first, last, unpacked)`: the blocks of a group."""
    code, (planes, index, first, last, unpacked) = function(module, "unpack", 5)
    code.builder.function.linkage = "internal"
    reader, group = TileReader(code, isa, layout), BlockGroup(index, first, last)
    with code.loop(first, last) as block:
        places, goal = group.places(layout, planes, block), unpacked + (block - first) * BLOCK_BYTES
        scales, added = reader.product_factors(places)
        lines = arranged(reader, reader.lines(places, ahead=AHEAD), x_bytes)
        for n, values in enumerate([*lines, *scales, *added]):
            code.store(values, goal + VECTOR_BYTES * n)
    code.builder.ret_void()


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
    n_scales, n_added = reader.n_factors
    with code.loop(code.number(0), n_blocks) as block:
        start = unpacked + block * BLOCK_BYTES
        lines = [code.load(start + VECTOR_BYTES * i, INTS) for i in range(N_LINES)]
        behind = start + VECTOR_BYTES * N_LINES
        found = [code.load(behind + VECTOR_BYTES * i, FLOATS) for i in range(n_scales + n_added)]
        factors = found[:n_scales], found[n_scales:]
        add_block(reader, lines, factors, panel + block * offsets.n_bytes, offsets, sums)
    for at, total in zip(places, sums, strict=True):
        code.store(total.get(), at)
    code.builder.ret_void()
