"""GEMM with matrices of words for many tokens: seven products take the place of eight.

Strassen's algorithm ("Gaussian elimination is not optimal", 1969) halves the rows, the columns and
the tokens of a product, and multiplies seven sums of the parts in place of eight parts. Sums over
256 columns are whole numbers here, which fit in 32 bits; what overflows on the way comes out right
in the end, as all is modulo 2^32. So the bits are those of `kernels.words.word_gemm`. Sums of
two words fit in a word, as `words.MOST_WORD` sees to.

Four tiles (a quad) are multiplied by two panels (a pair). Sums of the tokens' words are made once
for a matrix, by `combine`; those of weights in registers, from the first cache. Some quads of a
piece multiply the same tokens, a group of columns at a time, which the second cache holds. Weights
of the next quad are prefetched meanwhile, a line now and then: many at once would make all other
loads wait.

The parts of a matrix are numbered 0 to 3 from left to right, then from top to bottom; columns of
the weights are rows of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from engine.cpu.kernels.language.isa import Isa
from engine.cpu.kernels.language.parallel_for import Named, add_kernel, ceil_div, piece
from engine.cpu.kernels.language.values import (
    F32,
    FLOATS,
    I16,
    I32,
    INTS,
    LINE,
    VOID,
    Code,
    Value,
    function,
    vector,
)
from engine.cpu.kernels.products import panels
from engine.cpu.kernels.running.team import add_run
from engine.cpu.kernels.words.word_gemm import VECTOR_BYTES
from engine.cpu.kernels.words.words import GROUP_BYTES, add_pack_group, panel_factor, panel_words
from engine.quants.extent import WORD_BLOCK_BYTES, WORD_FACTOR_BYTES, WORD_PANEL_BYTES
from engine.quants.layout import BLOCK, LINE_BYTES, SUPER, TILE

ARGUMENTS = (
    "planes", "tile_bytes", "n_blocks", "combined", "n_pair", "out", "out_stride", "n_rows",
    "n_quad", "quads_per_piece", "pairs_per_pass",
)  # fmt: skip
"""Arguments of `multiply`: as `quantised_gemm.ARGUMENTS`, with combined pairs of panels. A piece is
`quads_per_piece` quads times `pairs_per_pass` pairs."""

WEIGHTS = ("0+3", "2+3", "3", "0+1", "0", "1-3", "2-0")
"""Parts of the weights in each product."""

TOKENS = ("0+3", "0", "2-0", "3", "1-3", "2+3", "0+1")
"""Parts of the tokens in each product."""

STARTS = {5: (0, 2, 3), 6: (0, 4, 1)}
"""Products that begin with the sum of two others less a third, so that they end as results."""

RESULTS = ((5,), (3, 4), (1, 2), (6,))
"""Products whose sum is a part of the result: of two tiles, with a panel."""

QUAD, PAIR = 4, 2
"""Tiles and panels that are multiplied at a time."""

HALF_QUAD = QUAD // 2

MOST_QUADS, MOST_PAIRS = 4, 16
"""Largest quads of a piece and pairs of a pass: their sums, and a group of columns of the tokens,
are in the second cache."""

WORDS = vector(I16, BLOCK)


PAIR_BLOCK_BYTES = len(TOKENS) * BLOCK // 2 + 2
"""Bytes of 32 activations in a combined pair, at most: half of them in each product, and factors of
16 tokens for each group of at least two blocks."""


def _part_bytes(isa: Isa, half: Value) -> Value:
    """Return the bytes of one product's tokens: `half` blocks of columns of a panel."""
    return half * (isa.tile_tokens * 2 * BLOCK)


def _chunk_bytes(isa: Isa, half: Value) -> Value:
    """Return the bytes of a group of a combined pair: factors of its tokens, then their words."""
    return half * (len(TOKENS) * isa.tile_tokens * 2 * BLOCK) + 4 * PAIR * isa.tile_tokens


def _chunks(isa: Isa, given: Named, first: Value) -> Value:
    """Return where the chunks of all pairs lie for a group; `first` is its first block."""
    code = first.code
    return given["combined"] + first // SUPER * given["n_pair"] * _chunk_bytes(
        isa, code.number(SUPER // 2)
    )


def fits(n_blocks: int) -> bool:
    """Return whether matrices have so many blocks of columns: each group has two halves."""
    return n_blocks % 2 == 0


def _sum(parts: Sequence[Value], term: str) -> Value:
    """Return the part, the sum or the difference that a term names."""
    first, second = parts[int(term[0])], parts[int(term[-1])]
    return first if len(term) == 1 else first + second if term[1] == "+" else first - second


def build(module: ir.Module, isa: Isa) -> None:
    """Write `combine(team, *panels.ARGUMENTS)` and `multiply(team, *ARGUMENTS)`.

    The former packs pairs of panels; tokens behind the last pair are left out.
    """
    add_run(module)
    add_pack_group(module)
    with piece(module, "combine", panels.ARGUMENTS) as (code, given, index):
        _emit_combination(code, isa, given, index)
    add_kernel(module, "combine", panels.ARGUMENTS, lambda _, given: _n_pair(isa, given))
    _add_quad(module, isa)
    with piece(module, "multiply", ARGUMENTS) as (code, given, index):
        _emit_piece(code, isa, given, index)
    add_kernel(module, "multiply", ARGUMENTS, _n_pieces)


def _n_pair(isa: Isa, given: Named) -> Value:
    """Return the number of pairs that are packed."""
    return given["n_tokens"] // (PAIR * isa.tile_tokens)


def _emit_combination(code: Code, isa: Isa, given: Named, index: Value) -> None:
    """Write the combination of a pair of panels, which are packed for it a group at a time."""
    tokens, n_blocks = isa.tile_tokens, given["n_blocks"]
    panel_bytes = SUPER * tokens * WORD_PANEL_BYTES
    buffer = code.stack_buffer(LINE, PAIR * panel_bytes // LINE_BYTES)
    pair = [buffer + n * panel_bytes for n in range(PAIR)]
    goals = {"combined": given["panels"], "n_pair": _n_pair(isa, given)}
    with code.loop(code.number(0), n_blocks, SUPER) as first:
        count = code.min_signed(n_blocks - first, code.number(SUPER))
        for n, panel in enumerate(pair):
            row = given["x"] + (index * PAIR + n) * tokens * given["x_stride"] + first * (4 * BLOCK)
            with code.loop(code.number(0), code.number(tokens)) as token:
                x = row + token * given["x_stride"]
                code.call("pack_group", VOID, x, count, panel, code.number(tokens), token)
        half = count // 2
        goal = _chunks(isa, goals, first) + index * _chunk_bytes(isa, half)
        for n, panel in enumerate(pair):
            for number in range(tokens):
                factor = code.load(panel + panel_factor(tokens, number), F32)
                code.store(factor, goal + 4 * (n * tokens + number))
        _emit_sums(code, isa, pair, half, goal + 4 * PAIR * tokens)


def _emit_sums(code: Code, isa: Isa, pair: Sequence[Value], half: Value, goal: Value) -> None:
    """Write the sums of a group of two panels, whose halves have `half` blocks of columns."""
    tokens = isa.tile_tokens
    with code.loop(code.number(0), half) as block:
        for token in range(tokens):
            places = [
                panel + (block + half * right) * (tokens * WORD_PANEL_BYTES)
                for right in range(2)
                for panel in pair
            ]
            parts = [code.load(place + panel_words(token, 0), WORDS) for place in places]
            for number, term in enumerate(TOKENS):
                place = goal + (block * tokens + token) * (2 * BLOCK)
                code.store(_sum(parts, term), place + _part_bytes(isa, half) * number)


def _add_product(module: ir.Module, isa: Isa, number: int) -> None:
    """Write `product_i(tiles, tile_bytes, half, x, products, ahead, step, n_ahead)`.

    Stores a product of two tiles and a panel: 2 × tokens vectors of sums at its place among the
    products. `tiles` is a group of a quad, whose halves have `half` blocks of columns. For each
    block some lines are prefetched, from `ahead` on, `step` bytes apart.
    """
    code, (tiles, tile_bytes, half, x, products, ahead, step, n_ahead) = function(
        module, f"product_{number}", 8
    )
    code.builder.function.linkage = "internal"
    code.builder.function.attributes.add("noinline")  # registers hold the sums of one product
    tokens, term = isa.tile_tokens, WEIGHTS[number]
    n_vectors = HALF_QUAD * tokens
    places = [products + VECTOR_BYTES * (n_vectors * n) for n in range(len(WEIGHTS))]
    sums = [code.variable(code.constant(INTS, 0)) for _ in range(n_vectors)]
    if number in STARTS:
        for n, total in enumerate(sums):
            found = [code.load(places[i] + VECTOR_BYTES * n, INTS) for i in STARTS[number]]
            total.set(found[0] + found[1] - found[2])
    with code.loop(code.number(0), half) as block:
        with code.loop(block * n_ahead, (block + 1) * n_ahead) as line:
            code.prefetch(ahead + line * step, cache=2)
        numbers = x + block * (tokens * 2 * BLOCK)
        here = [
            [
                tiles + tile_bytes * (HALF_QUAD * low + tile)
                + (block + half * right) * WORD_BLOCK_BYTES
                for low in range(2)
                for right in range(2)
            ]
            for tile in range(HALF_QUAD)
        ]  # fmt: skip
        for pair in range(BLOCK // 2):
            at = WORD_FACTOR_BYTES + pair * VECTOR_BYTES
            weights = [
                _sum([code.load(part + at, WORDS) for part in parts], term).bitcast(INTS)
                for parts in here
            ]
            for token in range(tokens):
                spread = code.splat(code.load(numbers + panel_words(token, pair), I32))
                for tile, words in enumerate(weights):
                    total = sums[tile * tokens + token]
                    total.set(isa.word_dots(code, total.get(), words, spread))
    for n, total in enumerate(sums):
        code.store(total.get(), places[number] + VECTOR_BYTES * n)
    code.builder.ret_void()


def _add_quad(module: ir.Module, isa: Isa) -> None:
    """Write `quad(tiles, tile_bytes, half, chunk, first, sums, products, …)`.

    Adds the products of a group of a quad and a combined pair to its sums: for each part of the
    result two tiles times a panel. Before the first block, sums are 0. The other arguments are what
    is prefetched for each block of columns of a product: by the first four an address, the bytes
    from one's to the next one's, those from line to line, a number of lines; by the others an
    address and the number of lines behind it.
    """
    for number in range(len(WEIGHTS)):
        _add_product(module, isa, number)
    code, values = function(module, "quad", 13)
    tiles, tile_bytes, half, chunk, first, sums, products, *prefetched = values
    ahead, distance, step, n_ahead, behind, n_behind = prefetched
    code.builder.function.linkage = "internal"
    tokens, words = isa.tile_tokens, chunk + 4 * PAIR * isa.tile_tokens
    for number in range(len(WEIGHTS)):
        lines = ahead + distance * number, step, n_ahead
        if number >= QUAD:
            place = behind + half * n_behind * ((number - QUAD) * LINE_BYTES)
            lines = place, code.number(LINE_BYTES), n_behind
        x = words + _part_bytes(isa, half) * number
        code.call(f"product_{number}", VOID, tiles, tile_bytes, half, x, products, *lines)
    n_vectors = HALF_QUAD * tokens
    for part, numbers in enumerate(RESULTS):
        low, panel = divmod(part, 2)
        factors = [
            code.load(tiles + tile_bytes * (HALF_QUAD * low + tile), FLOATS)
            for tile in range(HALF_QUAD)
        ]
        for n in range(n_vectors):
            tile, token = divmod(n, tokens)
            factor = code.load(chunk + 4 * (panel * tokens + token), F32)
            found = [
                code.load(products + VECTOR_BYTES * (n_vectors * i + n), INTS) for i in numbers
            ]
            total = sum(found[1:], found[0]).to(FLOATS) * code.splat(factor)
            place = sums + VECTOR_BYTES * (n_vectors * part + n)
            before = code.where(first > 0, code.load(place, FLOATS), code.constant(FLOATS, 0.0))
            code.store(code.fma(total, factors[tile], before), place)
    code.builder.ret_void()


def _n_runs(given: Named) -> Value:
    """Return the number of pieces that the quads are split into."""
    return ceil_div(given["n_quad"], given["quads_per_piece"])


def _n_pieces(code: Code, given: Named) -> Value:
    return _n_runs(given) * ceil_div(given["n_pair"], given["pairs_per_pass"])


def _emit_piece(code: Code, isa: Isa, given: Named, index: Value) -> None:
    """Write a piece: some quads times some pairs."""
    tile_bytes, n_blocks, stride = given["tile_bytes"], given["n_blocks"], given["out_stride"]
    quad_bytes, n_runs = tile_bytes * QUAD, _n_runs(given)
    first_quad = index % n_runs * given["quads_per_piece"]
    n_quad = code.min_signed(given["n_quad"] - first_quad, given["quads_per_piece"])
    begin = index // n_runs * given["pairs_per_pass"]
    n_pair = code.min_signed(given["n_pair"] - begin, given["pairs_per_pass"])
    planes, rows = given["planes"] + first_quad * quad_bytes, first_quad * (QUAD * TILE)
    out = given["out"] + begin * (PAIR * isa.tile_tokens) * stride + rows * 4
    sums_bytes = VECTOR_BYTES * (QUAD * PAIR * isa.tile_tokens)
    sums = code.stack_buffer(FLOATS, MOST_QUADS * MOST_PAIRS * sums_bytes // VECTOR_BYTES)
    products = code.stack_buffer(INTS, len(WEIGHTS) * HALF_QUAD * isa.tile_tokens)
    with code.loop(code.number(0), n_blocks, SUPER) as first:
        half = code.min_signed(n_blocks - first, code.number(SUPER)) // 2
        is_last = (first + half * 2).equals(n_blocks)
        group = planes + first // SUPER * GROUP_BYTES
        behind = code.where(is_last, planes + n_quad * quad_bytes, group + GROUP_BYTES)
        chunk_bytes, whole_bytes = (
            _chunk_bytes(isa, half),
            _chunk_bytes(isa, code.number(SUPER // 2)),
        )
        chunks = _chunks(isa, given, first) + begin * chunk_bytes
        next_chunks = _chunks(isa, given, first + SUPER) + begin * whole_bytes
        with code.loop(code.number(0), n_quad) as quad, code.loop(code.number(0), n_pair) as pair:
            here, goal = group + quad * quad_bytes, out + quad * (4 * QUAD * TILE)
            next_quad = code.where((quad + 1).equals(n_quad), behind, here + quad_bytes)
            goal = goal + pair * (PAIR * isa.tile_tokens) * stride
            place = sums + (quad * MOST_PAIRS + pair) * sums_bytes
            tile, turn = pair % QUAD, pair // QUAD
            usual = (
                *_share(next_quad, GROUP_BYTES, pair, n_pair, half),
                *_share(next_chunks + pair * whole_bytes, whole_bytes, quad, n_quad, half * 3),
            )
            at_last = (
                goal + stride * (PAIR * isa.tile_tokens),
                ceil_div(code.number(PAIR * isa.tile_tokens), half),
                *_share(
                    next_quad + tile * tile_bytes, GROUP_BYTES, turn, ceil_div(n_pair, QUAD),
                    half * 3,
                ),
            )  # fmt: skip
            ahead, n_ahead, address, n_lines = (
                code.where(is_last, a, b) for a, b in zip(at_last, usual, strict=True)
            )
            distance = code.where(is_last, code.number(4 * TILE), tile_bytes)
            step = code.where(is_last, stride, code.number(LINE_BYTES))
            code.call(
                "quad", VOID, here, tile_bytes, half, chunks + pair * chunk_bytes, first, place,
                products, ahead, distance, step, n_ahead, address, n_lines,
            )  # fmt: skip
            with code.when(is_last):
                left = given["n_rows"] - rows - quad * (QUAD * TILE)
                _emit_write(code, isa, place, goal, stride, left)


def _share(
    address: Value, n_bytes: Value | int, index: Value, n: Value, n_steps: Value
) -> tuple[Value, Value]:
    """Return where the share of an index in n begins of what is prefetched, and lines per step."""
    code = address.code
    n_all = (code.number(n_bytes) if isinstance(n_bytes, int) else n_bytes) // LINE_BYTES
    n_lines = ceil_div(n_all, n * n_steps)
    begin = index * n_steps * n_lines
    return address + begin * LINE_BYTES, code.where(begin < n_all, n_lines, code.number(0))


def _emit_write(
    code: Code, isa: Isa, sums: Value, out: Value, stride: Value, n_rows: Value
) -> None:
    """Write the storing of the results of a quad and a pair, at most `n_rows` rows of them."""
    tokens = isa.tile_tokens
    for panel in range(PAIR):
        for token in range(tokens):
            goal = out + stride * (panel * tokens + token)
            for tile in range(QUAD):
                low, number = divmod(tile, HALF_QUAD)
                vector_number = ((low * PAIR + panel) * HALF_QUAD + number) * tokens + token
                found = code.load(sums + VECTOR_BYTES * vector_number, FLOATS)
                code.store_part(found, goal + tile * (4 * TILE), n_rows - tile * TILE)
