"""GEMV and GEMM with matrices of words (`kernels.words.words`), for few tokens and for many.

The kernel and its arguments are those of `kernels.products.quantised_gemm`. Sums over 256 columns
are exact; each is multiplied by the factors of token and row and added to the result in F32, in the
order of columns. So a token's bits do not depend on the tokens computed with it.

For many tokens, two tiles are multiplied at once, so that a vector of the token's words serves
both: processors load two vectors and multiply two in a cycle. Four tiles are multiplied by a panel
while the first cache holds a group of their columns, as in `kernels.products.group_gemm`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.loops import ceil_div
from engine.backends.cpu.kernels.language.values import (
    F32,
    FLOATS,
    I32,
    INTS,
    VOID,
    Code,
    Value,
    Variable,
    function,
)
from engine.backends.cpu.kernels.products.group_gemm import AHEAD_PANELS, MAX_PANELS, MAX_TILES
from engine.backends.cpu.kernels.products.quantised_gemm import TileProducts, build_products
from engine.backends.cpu.kernels.products.tile_reader import AHEAD, FAR_AHEAD
from engine.backends.cpu.kernels.words.words import GROUP_BYTES, panel_factor, panel_words
from engine.formats.quants.layout import (
    BLOCK,
    LINE_BYTES,
    SUPER,
    TILE,
    WORD_BLOCK_BYTES,
    WORD_FACTOR_BYTES,
    WORD_PANEL_BYTES,
)

PAIR = 2
"""Number of tiles that are multiplied at once."""

MIN_SUMS = 8
"""Number of sums that processors add to at a time; fewer wait for each other."""

VECTOR_BYTES = 64
"""Bytes of 16 sums."""


def build(module: ir.Module, isa: Isa) -> None:
    """Write `multiply(team, *ARGUMENTS)`."""
    products = TileProducts(
        isa,
        WORD_PANEL_BYTES,
        lambda module, n_tokens: _add_tile(module, isa, n_tokens),
        lambda module: _add_groups(module, isa),
    )
    build_products(module, products)


def _add_tile(module: ir.Module, isa: Isa, n_tokens: int) -> None:
    """Write `tile_m(planes, n_blocks, skip, panel, out, out_stride)`: 16 rows times m tokens."""
    code, (planes, n_blocks, _, panel, out, stride) = function(module, f"tile_{n_tokens}", 6)
    code.builder.function.linkage = "internal"
    sums = [code.variable(code.constant(FLOATS, 0.0)) for _ in range(n_tokens)]
    ahead = AHEAD if n_tokens == 1 else FAR_AHEAD
    group = _Group(code, isa, n_tokens, ahead)
    with code.loop(code.number(0), n_blocks, SUPER) as first:
        n = code.min_signed(n_blocks - first, code.number(SUPER))
        here = planes + first // SUPER * GROUP_BYTES
        group.emit([here], panel + first * (n_tokens * WORD_PANEL_BYTES), n, [sums])
    for token, total in enumerate(sums):
        code.store(total.get(), out + stride * token)
    code.builder.ret_void()


class _Group:
    """Writer of the products of a group of columns of some tiles with a panel.

    Args:
        ahead: distance in bytes from which on weights are prefetched; 0 for none.
    """

    def __init__(self, code: Code, isa: Isa, n_tokens: int, ahead: int = 0) -> None:
        self._code, self._isa, self._ahead = code, isa, ahead
        self._n_tokens = n_tokens

    def emit(
        self, tiles: Sequence[Value], panel: Value, n_blocks: Value,
        sums: Sequence[Sequence[Variable]],
    ) -> None:  # fmt: skip
        """Write the products; they are added to the sums of each tile and token.

        Args:
            tiles: addresses of the group in each tile.
            panel: address of the group's first block in the panel.
            n_blocks: number of the group's blocks.
        """
        code, tokens = self._code, range(self._n_tokens)
        n_parts = max(1, min(4, MIN_SUMS // (len(tiles) * self._n_tokens)))
        zero = code.constant(INTS, 0)
        parts = [[[code.variable(zero) for _ in range(n_parts)] for _ in tokens] for _ in tiles]
        with code.loop(code.number(0), n_blocks) as block:
            at = panel + block * (self._n_tokens * WORD_PANEL_BYTES)
            places = [tile + WORD_FACTOR_BYTES + block * WORD_BLOCK_BYTES for tile in tiles]
            for pair in range(BLOCK // 2):
                self._emit_pair(places, at, pair, parts)
        for tile, totals, found in zip(tiles, sums, parts, strict=True):
            factors = code.load(tile, FLOATS)
            for token in tokens:
                first, *others = [part.get() for part in found[token]]
                total = sum(others, first).to(FLOATS)
                factor = code.load(panel + panel_factor(self._n_tokens, token), F32)
                product = total * code.splat(factor)
                totals[token].set(code.fma(product, factors, totals[token].get()))

    def _emit_pair(
        self, places: Sequence[Value], panel: Value, pair: int,
        parts: Sequence[Sequence[Sequence[Variable]]],
    ) -> None:  # fmt: skip
        """Write the products of two columns of a block, at `places` in the tiles."""
        code = self._code
        if self._ahead:
            for place in places:
                code.prefetch(place + (64 * pair + self._ahead), cache=2)
        weights = [code.load(place + 64 * pair, INTS) for place in places]
        for token in range(self._n_tokens):
            number = code.load(panel + panel_words(token, pair), I32)
            x = code.splat(number)
            for weight, found in zip(weights, parts, strict=True):
                total = found[token][pair % len(found[token])]
                total.set(self._isa.word_dots(code, total.get(), weight, x))


def _add_groups(module: ir.Module, isa: Isa) -> None:
    """Write `groups`, see `kernels.products.group_gemm.add_groups`."""
    for count in (1, PAIR):
        _add_add_up(module, isa, count)
    _add_panel(module, isa)
    code, (planes, tile_bytes, n_tile, n_blocks, _, panels, n_panels, out, stride, n) = function(
        module, "groups", 10
    )
    code.builder.function.linkage = "internal"
    tokens = isa.tile_tokens
    panel_bytes = n_blocks * (tokens * WORD_PANEL_BYTES)
    n_lines = code.number(GROUP_BYTES // LINE_BYTES)
    sums = code.stack_buffer(FLOATS, MAX_PANELS * tokens * MAX_TILES)
    with (
        code.loop(code.number(0), n_panels, MAX_PANELS) as begin,
        code.loop(code.number(0), n_blocks, SUPER) as first,
    ):
        n_now = code.min_signed(n_panels - begin, code.number(MAX_PANELS))
        n_here = code.min_signed(n_blocks - first, code.number(SUPER))
        n_left = n_blocks - first - n_here
        here = planes + first // SUPER * GROUP_BYTES
        behind = code.where(n_left.equals(0), planes + n_tile * tile_bytes, here + GROUP_BYTES)
        step = ceil_div(n_lines, n_now)
        with code.loop(code.number(0), n_now) as panel:
            lines = panel * step, code.min_signed((panel + 1) * step, n_lines)
            part = panels + (begin + panel) * panel_bytes
            part = part + first * (tokens * WORD_PANEL_BYTES)
            goal = out + (begin + panel) * tokens * stride
            place = sums + panel * (tokens * MAX_TILES * VECTOR_BYTES)
            code.call(
                "panel", VOID, here, tile_bytes, n_tile, part, first, n_here, n_left, place, goal,
                stride, n, behind, *lines,
            )  # fmt: skip
    code.builder.ret_void()


def _add_panel(module: ir.Module, isa: Isa) -> None:
    """Write `panel(group, tile_bytes, n_tile, panel, first, n, n_left, sums, out, …)`.

    Multiplies a group of n blocks of some tiles by a panel; `n_left` blocks follow, and results are
    written behind the last. The other arguments: bytes between rows of the result, number of rows
    of the matrix, and what is prefetched: an address for the first tile, the first line and the one
    behind the last.
    """
    _add_write(module, isa)
    tokens = isa.tile_tokens
    code, values = function(module, "panel", 14)
    group, tile_bytes, n_tile, panel, first, n, n_left, sums, out, stride, n_rows, *ahead = values
    behind, *lines = ahead
    code.builder.function.linkage = "internal"
    with code.loop(code.number(0), n_tile) as tile, code.loop(*lines) as line:
        code.prefetch(behind + tile * tile_bytes + line * LINE_BYTES, cache=2)
    whole = n_tile // PAIR * PAIR
    for size, begin, end in ((PAIR, code.number(0), whole), (1, whole, n_tile)):
        with code.loop(begin, end, size) as tile:
            place = sums + tile * (tokens * VECTOR_BYTES)
            code.call(
                f"add_up_{size}",
                VOID,
                group + tile * tile_bytes,
                tile_bytes,
                panel,
                n,
                place,
                first,
            )
    with code.when(n_left.equals(0)), code.loop(code.number(0), n_tile) as tile:
        place, left = sums + tile * (tokens * VECTOR_BYTES), n_rows - tile * TILE
        n_written = code.min_signed(left, code.number(TILE))
        code.call("write", VOID, place, out + tile * (4 * TILE), stride, n_written)
    code.builder.ret_void()


def _add_add_up(module: ir.Module, isa: Isa, n_tiles: int) -> None:
    """Write `add_up_k(group, tile_bytes, panel, n, sums, first)`: a group of k tiles, one panel.

    Its products are added to the tokens' sums; before the first block these are 0.
    """
    tokens = isa.tile_tokens
    code, (group, tile_bytes, panel, n, place, first) = function(module, f"add_up_{n_tiles}", 6)
    code.builder.function.linkage = "internal"
    tiles = [group + tile_bytes * tile for tile in range(n_tiles)]
    zero, places = code.constant(FLOATS, 0.0), []
    sums: list[list[Variable]] = []
    for tile in range(n_tiles):
        places.append([place + VECTOR_BYTES * (tile * tokens + token) for token in range(tokens)])
        sums.append([code.variable(zero) for _ in range(tokens)])
    with code.when(first > 0):
        for at, total in _each(places, sums):
            total.set(code.load(at, FLOATS))
    _Group(code, isa, tokens).emit(tiles, panel, n, sums)
    for at, total in _each(places, sums):
        code.store(total.get(), at)
    code.builder.ret_void()


def _each(
    places: Sequence[Sequence[Value]], sums: Sequence[Sequence[Variable]]
) -> Iterator[tuple[Value, Variable]]:
    for ats, totals in zip(places, sums, strict=True):
        yield from zip(ats, totals, strict=True)


def _add_write(module: ir.Module, isa: Isa) -> None:
    """Write `write(sums, out, out_stride, n)`: the results of a panel and a tile, n rows of them.

    Places of panels behind are prefetched, see `kernels.products.group_gemm`.
    """
    code, (sums, out, stride, n) = function(module, "write", 4)
    code.builder.function.linkage = "internal"
    tokens = isa.tile_tokens
    for token in range(tokens):
        code.prefetch(out + stride * (AHEAD_PANELS * tokens + token), cache=2)
    for token in range(tokens):
        code.store_part(code.load(sums + VECTOR_BYTES * token, FLOATS), out + stride * token, n)
    code.builder.ret_void()
