"""GEMV and GEMM with quantised matrices: integer dot products within blocks, F32 sums across them.

Within a block of 32 columns (or a sub-block of 16), weights are small integers q on a scale, and
activations are bytes on a scale d, so that `Σ w x = scale × d × Σ q x - minimum × Σ x`: an exact
integer sum and few floating-point steps. All further rounding is F32's. A token's bits do not
depend on the tokens computed with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.loops import Named, add_kernel, ceil_div, piece
from engine.backends.cpu.kernels.language.values import (
    F32,
    FLOATS,
    I64,
    VOID,
    Code,
    Value,
    function,
)
from engine.backends.cpu.kernels.products.block_sums import add_block, arranged
from engine.backends.cpu.kernels.products.group_gemm import MAX_TILES, add_groups
from engine.backends.cpu.kernels.products.panel_packing import are_words
from engine.backends.cpu.kernels.products.panels import PanelOffsets, panel_sizes
from engine.backends.cpu.kernels.products.tile_reader import BlockGroup, TileReader, for_each_group
from engine.backends.cpu.kernels.running.team import add_run
from engine.backends.cpu.kernels.words import plane_word_gemm
from engine.formats.quants.layout import TILE, Layout, panel_block_bytes

MIN_PANELS = 2
"""Smallest number of full panels for which weights are unpacked once for all of them."""


def add_tile(module: ir.Module, isa: Isa, layout: Layout, n_tokens: int, x_bytes: int = 1) -> str:
    """Write `tile_m(planes, n_blocks, skip, panel, out, out_stride)`: 16 rows times m tokens.

    Token t's results go to `out + t × out_stride`, 16 F32 each. Returns the function's name.
    """
    name = f"tile_{n_tokens}"
    code, (planes, n_blocks, skip, panel, out, stride) = function(module, name, 6)
    code.builder.function.linkage = "internal"
    reader = TileReader(code, isa, layout)
    sums = [code.variable(code.constant(FLOATS, 0.0)) for _ in range(n_tokens)]
    offsets = PanelOffsets(n_tokens, x_bytes)

    def add(group: BlockGroup) -> None:
        with code.loop(group.first, group.last) as block:
            places = group.places(layout, planes, block)
            reader.prefetch(group, planes, block, n_tokens)
            lines = arranged(reader, reader.lines(places), x_bytes)
            factors = reader.product_factors(places)
            add_block(reader, lines, factors, panel + block * offsets.n_bytes, offsets, sums)

    for_each_group(code, n_blocks, skip, add)
    for token, total in enumerate(sums):
        unit = code.load(panel + offsets.unit(token), F32)
        code.store(total.get() * code.splat(unit), out + stride * token)
    code.builder.ret_void()
    return name


ARGUMENTS = (
    "planes", "tile_bytes", "n_blocks", "skip", "panels", "n_tokens", "out", "out_stride", "n_rows",
    "n_tile", "tiles_per_piece", "tokens_per_pass",
)  # fmt: skip
"""Arguments of the kernel. `out` is (n_tokens, n_rows) F32 with rows `out_stride` bytes apart. A
piece is `tiles_per_piece` tiles times up to `tokens_per_pass` tokens, whose panels stay in
the cores' last cache; that number is a multiple of `Isa.tile_tokens`."""


@dataclass(frozen=True, slots=True)
class TileProducts:
    """Functions that multiply tiles by panels, for one form of weights and activations.

    Attributes:
        isa: instruction set.
        block_bytes: bytes of a token's block of 32 columns in a panel.
        add_tile: writes `tile_m` for so many tokens, see `add_tile`.
        add_groups: writes `groups`, see `kernels.products.group_gemm`.
    """

    isa: Isa
    block_bytes: int
    add_tile: Callable[[ir.Module, int], object]
    add_groups: Callable[[ir.Module], None]


def build(module: ir.Module, isa: Isa, layout: Layout, x_bytes: int = 1) -> None:
    """Write `multiply(team, *ARGUMENTS)` for matrices of one layout."""
    add_run(module)
    add_rows(module, isa, layout, x_bytes)
    _add_multiply(module, panel_block_bytes(x_bytes))


def build_products(module: ir.Module, products: TileProducts) -> None:
    """Write `multiply(team, *ARGUMENTS)`."""
    add_run(module)
    _add_rows(module, products)
    _add_multiply(module, products.block_bytes)


def _add_multiply(module: ir.Module, block_bytes: int) -> None:
    """Write the kernel, whose `rows` is in the module."""
    with piece(module, "multiply", ARGUMENTS) as (code, given, index):
        _emit_piece(code, given, index, block_bytes)
    add_kernel(module, "multiply", ARGUMENTS, _n_pieces)


def _quantised(isa: Isa, layout: Layout, x_bytes: int) -> TileProducts:
    """Return the functions for matrices of one layout."""
    return TileProducts(
        isa,
        panel_block_bytes(x_bytes),
        lambda module, n_tokens: add_tile(module, isa, layout, n_tokens, x_bytes),
        lambda module: add_groups(module, isa, layout, x_bytes),
    )


def _n_runs(given: Named) -> Value:
    return ceil_div(given["n_tile"], given["tiles_per_piece"])


def _n_pieces(code: Code, given: Named) -> Value:
    return _n_runs(given) * ceil_div(given["n_tokens"], given["tokens_per_pass"])


def _emit_piece(code: Code, given: Named, index: Value, block_bytes: int) -> None:
    """Write a piece: some tiles times some tokens."""
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
    """Return the number of rows of some tiles; the last tile of a matrix may have fewer than 16."""
    return code.min_signed(last_tile * TILE, given["n_rows"]) - first_tile * TILE


def add_rows(module: ir.Module, isa: Isa, layout: Layout, x_bytes: int = 1) -> None:
    """Write `rows(planes, tile_bytes, n_blocks, skip, panels, n_tokens, out, out_stride, n_rows)`.

    Computes all panels' tokens for some rows; the first of them is the first of a tile.
    """
    if are_words(isa, x_bytes):
        plane_word_gemm.add_rows(module, isa, layout)
    else:
        _add_rows(module, _quantised(isa, layout, x_bytes))


def _add_rows(module: ir.Module, products: TileProducts) -> None:
    """Write `rows`, see `add_rows`."""
    isa = products.isa
    products.add_groups(module)
    _add_panels(module, products)
    code, (planes, tile_bytes, n_blocks, skip, panels, n_tokens, out, stride, n_rows) = function(
        module, "rows", 9
    )
    code.builder.function.linkage = "internal"
    n_panels = n_tokens // isa.tile_tokens
    n_panels = code.where(n_panels < MIN_PANELS, code.number(0), n_panels)
    n_done = n_panels * isa.tile_tokens
    n_tile = ceil_div(n_rows, TILE)
    with code.loop(code.number(0), n_tile, MAX_TILES) as tile:
        n_tiles = code.min_signed(n_tile - tile, code.number(MAX_TILES))
        here, goal, left = planes + tile * tile_bytes, out + tile * (4 * TILE), n_rows - tile * TILE
        with code.when(n_panels > 0):
            code.call(
                "groups", VOID, here, tile_bytes, n_tiles, n_blocks, skip, panels, n_panels, goal,
                stride, left,
            )  # fmt: skip
    behind = panels + n_done * n_blocks * products.block_bytes
    with code.when(n_done < n_tokens), code.loop(code.number(0), n_tile) as tile:
        code.call(
            "panels", VOID, planes + tile * tile_bytes, n_blocks, skip, behind, n_tokens - n_done,
            out + n_done * stride + tile * (4 * TILE), stride, n_rows - tile * TILE,
        )  # fmt: skip
    code.builder.ret_void()


def _add_panels(module: ir.Module, products: TileProducts) -> None:
    """Write `panels(planes, n_blocks, skip, panels, n_tokens, out, out_stride, n_rows)`: one tile.

    Weights are unpacked for each panel; if fewer than 16 rows are left, only those are written.
    """
    sizes = panel_sizes(products.isa)
    for size in sizes:
        products.add_tile(module, size)
    code, (planes, n_blocks, skip, panels, n_tokens, out, stride, left) = function(
        module, "panels", 8
    )
    code.builder.function.linkage = "internal"
    buffer = Value(code, code.builder.ptrtoint(code.builder.alloca(FLOATS, sizes[0]), I64))
    is_whole = left >= TILE
    goal_stride = code.where(is_whole, stride, code.number(4 * TILE))
    panel, done = code.variable(panels), code.variable(code.number(0))
    for size in sizes:
        with code.when((n_tokens & size) > 0):
            token = done.get()
            goal = code.where(is_whole, out + token * stride, buffer)
            code.call(f"tile_{size}", VOID, planes, n_blocks, skip, panel.get(), goal, goal_stride)
            n_copied = code.where(is_whole, code.number(0), left)
            with (
                code.loop(code.number(0), code.number(size)) as t,
                code.loop(code.number(0), n_copied) as row,
            ):
                number = code.load(buffer + t * (4 * TILE) + row * 4, F32)
                code.store(number, out + (token + t) * stride + row * 4)
            panel.set(panel.get() + n_blocks * (size * products.block_bytes))
            done.set(token + size)
    code.builder.ret_void()
