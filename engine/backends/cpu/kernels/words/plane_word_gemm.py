"""GEMV and GEMM with quantised matrices and activations in words (`plane_words`).

One token's weights are decoded to registers. For more tokens, those of four tiles are decoded to
the first cache, a group of columns at a time, and multiplied by all panels, two tiles at once, as
in `kernels.words.word_gemm`; so an expert with few rows decodes its weights only once, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.loops import ceil_div
from engine.backends.cpu.kernels.language.values import (
    FLOATS,
    INTS,
    LINE,
    VOID,
    Code,
    Value,
    Variable,
    function,
)
from engine.backends.cpu.kernels.products.group_gemm import AHEAD_PANELS, MAX_PANELS, MAX_TILES
from engine.backends.cpu.kernels.products.panels import panel_sizes
from engine.backends.cpu.kernels.products.tile_reader import BlockGroup, for_each_group
from engine.backends.cpu.kernels.words.plane_word_reader import WordReader
from engine.backends.cpu.kernels.words.plane_word_sums import GroupSums, TileGroup
from engine.backends.cpu.kernels.words.plane_words import BLOCK_BYTES, N_PAIRS, balanced
from engine.formats.quants.layout import LINE_BYTES, SUPER, TILE, Layout

PAIR = 2
"""Number of tiles that are multiplied at once."""

AT_ONCE = 4
"""Number of tokens at a time whose sums of blocks and of columns the registers hold."""

VECTOR_BYTES = 64
"""Bytes of 16 sums, of a vector of factors and of a pair of columns of a tile in words."""

UNPACKING = 3
"""Number of tokens whose products take as long as decoding."""


class _Prefetch:
    """Lines of the next weights that are prefetched, some with each block of these.

    So many at once that caches cannot ask for all of them would stop a processor.

    Args:
        place: address of the next group of the first tile.
        tile_bytes: bytes from tile to tile.
        lines: first line, and the one behind the last.
        n_blocks: number of blocks.
        n_tiles: number of tiles.
    """

    def __init__(
        self, code: Code, place: Value, tile_bytes: Value, lines: tuple[Value, Value],
        n_blocks: Value, n_tiles: int = 1,
    ) -> None:  # fmt: skip
        self._code, self._place, self._tile_bytes = code, place, tile_bytes
        self._first, self._last = lines
        self._step = ceil_div(self._last - self._first, n_blocks)
        self._n_tiles = n_tiles

    def emit(self, block: Value) -> None:
        """Write the part of a block, given its index in the group."""
        code, first = self._code, self._first + block * self._step
        with code.loop(first, code.min_signed(first + self._step, self._last)) as line:
            for tile in range(self._n_tiles):
                at = self._place + self._tile_bytes * tile
                code.prefetch(at + line * LINE_BYTES, cache=2)


class _Unpacked:
    """A group of columns of a tile, decoded: a factor, then blocks of words and factors.

    Args:
        reader: says what the type has.
    """

    def __init__(self, reader: WordReader) -> None:
        self._reader, self._code = reader, reader.code
        self._n_vectors = N_PAIRS + reader.n_scales + reader.n_minima
        self.n_bytes = VECTOR_BYTES * (1 + SUPER * self._n_vectors)

    def write(
        self, layout: Layout, planes: Value, group: BlockGroup, goal: Value, ahead: _Prefetch
    ) -> None:
        """Write the decoding of the group of a tile to an address."""
        code, reader = self._code, self._reader
        with code.loop(group.first, group.last) as block:
            ahead.emit(block - group.first)
            places = group.places(layout, planes, block)
            at = self._block(goal, block - group.first)
            for n, vector in enumerate([*reader.words(places), *reader.block_factors(places)]):
                code.store(vector, at + VECTOR_BYTES * n)
        if layout.has_supers:
            code.store(reader.group_factor(group.places(layout, planes, group.first)), goal)

    def tile(self, place: Value, sums: Sequence[Variable]) -> TileGroup:
        """Return the group at an address."""
        code, n_factors = self._code, self._n_vectors - N_PAIRS

        def words(block: Value, number: int) -> Value:
            return code.load(self._block(place, block) + VECTOR_BYTES * number, INTS)

        def factors(block: Value) -> Sequence[Value]:
            at = self._block(place, block) + VECTOR_BYTES * N_PAIRS
            return [code.load(at + VECTOR_BYTES * n, FLOATS) for n in range(n_factors)]

        return TileGroup(words, factors, lambda: code.load(place, FLOATS), sums)

    def _block(self, place: Value, block: Value) -> Value:
        return place + VECTOR_BYTES + block * (VECTOR_BYTES * self._n_vectors)


def add_rows(module: ir.Module, isa: Isa, layout: Layout) -> None:
    """Write `rows`, see `kernels.products.quantised_gemm.add_rows`."""
    _add_one(module, isa, layout)
    _add_groups(module, isa, layout)
    code, (planes, tile_bytes, n_blocks, skip, panels, n_tokens, out, stride, n_rows) = function(
        module, "rows", 9
    )
    code.builder.function.linkage = "internal"
    n_tile = ceil_div(n_rows, TILE)
    with code.if_else(n_tokens.equals(1)) as (one, several):
        with one, code.loop(code.number(0), n_tile) as tile:
            here, left = planes + tile * tile_bytes, n_rows - tile * TILE
            code.call("one", VOID, here, n_blocks, skip, panels, out + tile * (4 * TILE), left)
        with several, code.loop(code.number(0), n_tile, MAX_TILES) as tile:
            n_here = code.min_signed(n_tile - tile, code.number(MAX_TILES))
            here, left = planes + tile * tile_bytes, n_rows - tile * TILE
            code.call(
                "groups", VOID, here, tile_bytes, n_here, n_blocks, skip, panels, n_tokens,
                out + tile * (4 * TILE), stride, left,
            )  # fmt: skip
    code.builder.ret_void()


def _add_one(module: ir.Module, isa: Isa, layout: Layout) -> None:
    """Write `one(planes, n_blocks, skip, panel, out, n)`: n rows of a tile times one token."""
    code, (planes, n_blocks, skip, panel, out, n) = function(module, "one", 6)
    code.builder.function.linkage = "internal"
    reader = WordReader(code, isa, layout)
    total = code.variable(code.constant(FLOATS, 0.0))

    def add(group: BlockGroup) -> None:
        decoded: list[tuple[Value, list[Value]]] = []

        def words(block: Value, number: int) -> Value:
            if not decoded or decoded[-1][0] is not block:
                reader.prefetch(group, planes, group.first + block, 1)
                places = group.places(layout, planes, group.first + block)
                decoded.append((block, reader.codes(places)))
            return decoded[-1][1][number]

        def factors(block: Value) -> Sequence[Value]:
            return reader.block_factors(group.places(layout, planes, group.first + block))

        def factor() -> Value:
            return reader.group_factor(group.places(layout, planes, group.first))

        def scales(block: Value) -> Sequence[Value]:
            places = group.places(layout, planes, group.first + block)
            return reader.integer_scales(places)

        own = scales if layout.has_supers else None
        tile = TileGroup(words, factors, factor, [total], own)
        GroupSums(reader, 1).emit(
            [tile], panel + group.first * BLOCK_BYTES, group.last - group.first
        )

    for_each_group(code, n_blocks, skip, add)
    code.store_part(balanced(total.get()), out, n)
    code.builder.ret_void()


def _add_groups(module: ir.Module, isa: Isa, layout: Layout) -> None:
    """Write `groups(planes, tile_bytes, n_tile, n_blocks, skip, panels, n_tokens, out, …)`.

    Multiplies up to `MAX_TILES` tiles by all tokens. The other arguments are the bytes between
    rows of the result and n, the number of rows that are written. The weights of the next group of
    blocks are prefetched meanwhile, some for each panel.
    """
    _add_unpack(module, isa, layout)
    for size in panel_sizes(isa):
        _add_panel(module, isa, layout, size)
    code, values = function(module, "groups", 10)
    planes, tile_bytes, n_tile, n_blocks, skip, panels, n_tokens, out, stride, n = values
    code.builder.function.linkage = "internal"
    most, unpacked_bytes = MAX_PANELS * isa.tile_tokens, _unpacked(code, isa, layout).n_bytes
    n_lines = code.number(-(-layout.tile_bytes(SUPER, 0) // LINE_BYTES))
    unpacked = code.stack_buffer(LINE, MAX_TILES * unpacked_bytes // VECTOR_BYTES)
    sums = code.stack_buffer(FLOATS, most * MAX_TILES)
    with code.loop(code.number(0), n_tokens, most) as begin:
        count = code.min_signed(n_tokens - begin, code.number(most))
        n_panels = count // isa.tile_tokens

        def lines(first: Value, n: int) -> tuple[Value, Value]:
            """Return what is prefetched beside n tokens' products, decoding before them all."""
            total = count + UNPACKING
            return first * n_lines // total, (first + n) * n_lines // total

        def multiply(group: BlockGroup) -> None:
            first, last = group.first, group.last
            behind = layout.places(planes, group.index + 1, last, last, last).supers
            behind = code.where(last.equals(n_blocks), planes + n_tile * tile_bytes, behind)
            decoded = lines(code.number(0), UNPACKING)
            with code.loop(code.number(0), n_tile) as tile:
                goal, at = unpacked + tile * unpacked_bytes, tile * tile_bytes
                code.call(
                    "unpack", VOID, planes + at, group.index, first, last, goal, behind + at,
                    *decoded,
                )  # fmt: skip

            def add(size: int, token: Value) -> None:
                code.call(
                    f"panel_{size}", VOID, unpacked, n_tile,
                    panels + (begin + token) * n_blocks * BLOCK_BYTES, first, last, n_blocks,
                    sums + token * (MAX_TILES * VECTOR_BYTES), out + (begin + token) * stride,
                    stride, n, behind, tile_bytes, *lines(token + UNPACKING, size),
                )  # fmt: skip

            largest, *others = panel_sizes(isa)
            with code.loop(code.number(0), n_panels) as panel:
                add(largest, panel * largest)
            token = code.variable(n_panels * largest)
            for size in others:
                with code.when((count & size) > 0):
                    add(size, token.get())
                    token.set(token.get() + size)

        for_each_group(code, n_blocks, skip, multiply)
    code.builder.ret_void()


def _unpacked(code: Code, isa: Isa, layout: Layout) -> _Unpacked:
    return _Unpacked(WordReader(code, isa, layout))


def _add_unpack(module: ir.Module, isa: Isa, layout: Layout) -> None:
    """Write `unpack(planes, index, first, last, unpacked, behind, first_line, last_line)`.

    Decodes a group of a tile. The last three arguments say what is prefetched: lines of the next.
    """
    code, (planes, index, first, last, unpacked, behind, *lines) = function(module, "unpack", 8)
    code.builder.function.linkage = "internal"
    group = BlockGroup(index, first, last)
    ahead = _Prefetch(code, behind, code.number(0), (lines[0], lines[1]), last - first)
    _unpacked(code, isa, layout).write(layout, planes, group, unpacked, ahead)
    code.builder.ret_void()


def _add_panel(module: ir.Module, isa: Isa, layout: Layout, size: int) -> None:
    """Write `panel_m(unpacked, n_tile, panel, first, last, n_blocks, sums, out, stride, n, …)`.

    Multiplies the decoded blocks from `first` to `last` of some tiles by a panel of m tokens;
    behind the last block, results are written. Where the number of tiles is odd, what lies behind
    them is multiplied, too, and not written. The other arguments say what is prefetched: an
    address for the first tile, the bytes from tile to tile, the first line and the one behind the
    last.
    """
    calls = _add_sums(module, isa, layout, size)
    _add_write(module, isa, size)
    code, values = function(module, f"panel_{size}", 14)
    unpacked, n_tile, panel, first, last, n_blocks, sums, out, stride, n, *ahead = values
    behind, tile_bytes, *lines = ahead
    code.builder.function.linkage = "internal"
    here, unpacked_bytes = (
        panel + first * (size * BLOCK_BYTES),
        _unpacked(code, isa, layout).n_bytes,
    )
    with code.loop(code.number(0), n_tile, PAIR) as tile:
        place = sums + tile * (size * VECTOR_BYTES)
        with code.when(first.equals(0)):
            for number in range(PAIR * size):
                code.store(code.constant(FLOATS, 0.0), place + VECTOR_BYTES * number)
        for name in calls:
            code.call(
                name, VOID, unpacked + tile * unpacked_bytes, here, last - first, place,
                behind + tile * tile_bytes, tile_bytes, *lines,
            )  # fmt: skip
    with code.when(last.equals(n_blocks)), code.loop(code.number(0), n_tile) as tile:
        place, left = sums + tile * (size * VECTOR_BYTES), n - tile * TILE
        n_written = code.min_signed(left, code.number(TILE))
        code.call(f"write_{size}", VOID, place, out + tile * (4 * TILE), stride, n_written)
    code.builder.ret_void()


def _add_sums(module: ir.Module, isa: Isa, layout: Layout, size: int) -> list[str]:
    """Write functions `(unpacked, panel, n_blocks, sums, …)` that add a group of two tiles to sums.

    Registers hold either the sums of minima or those of products of eight tokens, so these are
    functions of their own. The other arguments are those of `panel_m`.

    Returns:
        The functions' names, in the order of calls.
    """

    def add(name: str, emit: Callable[[GroupSums, list[TileGroup], Value, Value], None]) -> str:
        code, values = function(module, f"{name}_{size}", 8)
        unpacked, panel, n_blocks, place, behind, tile_bytes, *lines = values
        code.builder.function.linkage = "internal"
        ahead = _Prefetch(code, behind, tile_bytes, (lines[0], lines[1]), n_blocks, PAIR)
        reader = WordReader(code, isa, layout)
        form, at_once = _Unpacked(reader), min(size, AT_ONCE if reader.n_scales else size)
        for token in range(0, size, at_once):
            tiles: list[TileGroup] = []
            places: list[tuple[Value, Variable]] = []
            for tile in range(PAIR):
                ats = [
                    place + VECTOR_BYTES * (tile * size + token + number)
                    for number in range(at_once)
                ]
                sums = [code.variable(code.load(at, FLOATS)) for at in ats]
                tiles.append(form.tile(unpacked + tile * form.n_bytes, sums))
                places.extend(zip(ats, sums, strict=True))
            each_block = None if token else ahead.emit
            emit(GroupSums(reader, size, token, each_block), tiles, panel, n_blocks)
            for at, total in places:
                code.store(total.get(), at)
        code.builder.ret_void()
        return f"{name}_{size}"

    if layout.has_supers:
        minima = [add("add_minima", GroupSums.emit_minima)] if layout.has_minimum else []
        return [*minima, add("add_products", GroupSums.emit_products)]
    return [add("add_blocks", GroupSums.emit)]


def _add_write(module: ir.Module, isa: Isa, size: int) -> None:
    """Write `write_m(sums, out, stride, n)`: the results of a panel and a tile, n rows of them.

    Places of panels behind are prefetched, see `kernels.products.group_gemm`.
    """
    code, (sums, out, stride, n) = function(module, f"write_{size}", 4)
    code.builder.function.linkage = "internal"
    if size == isa.tile_tokens:
        for token in range(size):
            code.prefetch(out + stride * (AHEAD_PANELS * size + token), cache=2)
    for token in range(size):
        total = code.load(sums + VECTOR_BYTES * token, FLOATS)
        code.store_part(balanced(total), out + stride * token, n)
    code.builder.ret_void()
