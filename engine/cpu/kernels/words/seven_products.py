"""GEMM with matrices of words for many tokens: seven products take the place of eight.

Strassen's algorithm ("Gaussian elimination is not optimal", 1969) halves the rows, the columns and
the tokens of a product, and multiplies seven sums of the parts in place of eight parts. Sums over
256 columns are whole numbers here, which fit in 32 bits; what overflows on the way comes out right
in the end, as all is modulo 2^32. So the bits are those of `kernels.words.word_gemm`. Sums of
two words fit in a word, as `words.MOST_WORD` sees to.

Four tiles (a quad) are multiplied by two panels (a pair). Sums of the tokens' words are made once
for a matrix, see `combined_panels`; those of weights in registers, from the first cache. Some quads
of a piece multiply the same tokens, a group of columns at a time, which the second cache holds.
Between its products those of the quad and the pair before are added up to results in F32, and the
next quad's weights prefetched, a vector or a line now and then: many at once would make all else
wait.

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
    I32,
    I64,
    INTS,
    VOID,
    Code,
    Value,
    function,
)
from engine.cpu.kernels.words.combined_panels import (
    PAIR,
    WORDS,
    add_combine,
    chunk_bytes,
    chunks,
    part_bytes,
    sum_of,
)
from engine.cpu.kernels.words.word_gemm import VECTOR_BYTES
from engine.cpu.kernels.words.words import GROUP_BYTES, panel_words
from engine.quants.extent import WORD_BLOCK_BYTES, WORD_FACTOR_BYTES
from engine.quants.layout import BLOCK, LINE_BYTES, SUPER, TILE

ARGUMENTS = (
    "planes", "tile_bytes", "n_blocks", "combined", "n_pair", "out", "out_stride", "n_quad",
    "quads_per_piece", "pairs_per_pass",
)  # fmt: skip
"""Arguments of `multiply`: as `quantised_gemm.ARGUMENTS`, with combined pairs of panels. A piece is
`quads_per_piece` quads times `pairs_per_pass` pairs."""

WEIGHTS = ("0+3", "2+3", "3", "0+1", "0", "1-3", "2-0")
"""Parts of the weights in each product."""

RESULTS = ("5+0+2-3", "3+4", "1+2", "6+0+4-1")
"""Products whose sum is a part of the result: of two tiles, with a panel."""

ENDS = {4: 2, 5: 1, 6: 0, 0: 3}
"""Parts of the result that end beside a product; the last of them beside the next pair's."""

END = ("tiles", "chunk", "before", "goal", "stride")
"""What is known where a part of a result ends: addresses of its weights, of its tokens, of the sums
before it and of the sums or results with it, whose tokens are `stride` bytes apart."""

QUAD = 4
"""Tiles that are multiplied at a time by a pair of panels."""

HALF_QUAD = QUAD // 2

SPAN = 4
"""Pairs of columns that are multiplied between two vectors of results that end."""

N_SPANS = BLOCK // 2 // SPAN
"""Spans of a block of columns."""

AHEAD_BLOCKS = 2
"""Blocks of columns by which tokens are prefetched to the first cache."""

TILE_BYTES = GROUP_BYTES - LINE_BYTES
"""Bytes of a group of a tile that are prefetched: a line in each span then does for 16 pairs. The
processor reads on by itself."""

MOST_QUADS, MOST_PAIRS = 4, 16
"""Largest quads of a piece and pairs of a pass: their sums, and a group of columns of the tokens,
are in the second cache."""


def fits(n_blocks: int) -> bool:
    """Return whether matrices have so many blocks of columns: each group has two halves."""
    return n_blocks % 2 == 0


def build(module: ir.Module, isa: Isa) -> None:
    """Write `multiply(team, *ARGUMENTS)` and `combine` of `combined_panels`."""
    add_combine(module, isa)
    _add_quad(module, isa)
    with piece(module, "multiply", ARGUMENTS) as (code, given, index):
        _emit_piece(code, isa, given, index)
    add_kernel(module, "multiply", ARGUMENTS, _n_pieces)


class _Ending:
    """Writer of what ends a part of the result: its sums are added to those of the groups before.

    Vectors of it end between those of a product, so that processors multiply meanwhile.

    Args:
        place: address of what `END` says about a quad and a pair.
        products: address of their products.
    """

    def __init__(
        self, code: Code, isa: Isa, part: int, place: Value, tile_bytes: Value, products: Value
    ) -> None:
        low, panel = divmod(part, 2)
        tiles, chunk, before, goal, self._stride = code.load_array(place, len(END))
        first = panel * isa.tile_tokens
        self._code, self._isa, self._terms, self._products = code, isa, RESULTS[part], products
        self._weights, self._tile_bytes = tiles + tile_bytes * (HALF_QUAD * low), tile_bytes
        self._tokens = chunk + 4 * first
        self._before = before + (first * QUAD + low * HALF_QUAD) * VECTOR_BYTES
        self._goal = goal + self._stride * first + low * HALF_QUAD * VECTOR_BYTES

    def emit(self, number: Value) -> None:
        """Write a vector of the part: two tiles of its first token, then of the next one."""
        code, tokens = self._code, self._isa.tile_tokens
        token, tile = number // HALF_QUAD, number % HALF_QUAD
        place = self._products + (tile * tokens + token) * VECTOR_BYTES
        found = [
            code.load(place + VECTOR_BYTES * (int(i) * HALF_QUAD * tokens), INTS)
            for i in self._terms[::2]
        ]
        total = found[0]
        for sign, more in zip(self._terms[1::2], found[1:], strict=True):
            total = total + more if sign == "+" else total - more
        scaled = total.to(FLOATS) * code.splat(code.load(self._tokens + token * 4, F32))
        weights = code.load(self._weights + tile * self._tile_bytes, FLOATS)
        before = code.load(self._before + (token * QUAD + tile) * VECTOR_BYTES, FLOATS)
        goal = self._goal + token * self._stride + tile * VECTOR_BYTES
        code.store(code.fma(scaled, weights, before), goal)


def _add_end(module: ir.Module, isa: Isa, part: int) -> None:
    """Write `end_i(end, tile_bytes, products, first)`: what is not ended beside a product.

    That is what belongs to blocks of columns from `first` on, which a group does not have.
    """
    code, (end, tile_bytes, products, first) = function(module, f"end_{part}", 4)
    code.builder.function.linkage = "internal"
    code.builder.function.attributes.add("noinline")
    ending = _Ending(code, isa, part, end, tile_bytes, products)
    with code.loop(first, code.number(HALF_QUAD * isa.tile_tokens)) as number:
        ending.emit(number)
    code.builder.ret_void()


def _add_product(module: ir.Module, isa: Isa, number: int) -> None:
    """Write `product_i(tiles, tile_bytes, half, x, products, end, ahead, step, n_ahead)`.

    Stores a product of two tiles and a panel: 2 × tokens vectors of sums at its place among the
    products. `tiles` is a group of a quad, whose halves have `half` blocks of columns. `end` says
    where a part of the result is, see `ENDS`. For each span some lines are prefetched, from `ahead`
    on, `step` bytes apart.
    """
    code, (tiles, tile_bytes, half, x, products, end, ahead, step, n_ahead) = function(
        module, f"product_{number}", 9
    )
    code.builder.function.linkage = "internal"
    code.builder.function.attributes.add("noinline")  # registers hold the sums of one product
    tokens, term = isa.tile_tokens, WEIGHTS[number]
    n_vectors = HALF_QUAD * tokens
    sums = [code.variable(code.constant(INTS, 0)) for _ in range(n_vectors)]
    part = ENDS.get(number)
    ending = None if part is None else _Ending(code, isa, part, end, tile_bytes, products)
    with code.loop(code.number(0), half * N_SPANS) as span:
        block, turn = span // N_SPANS, span % N_SPANS
        with code.loop(span * n_ahead, (span + 1) * n_ahead) as line:
            code.prefetch(ahead + line * step, cache=2)
        if ending:
            with code.when(span < n_vectors):  # first: LLVM keeps loads behind it in place
                ending.emit(span)
        columns = x + block * (tokens * 2 * BLOCK)
        for n in range(tokens // N_SPANS):
            behind = columns + (turn * (tokens // N_SPANS) + n) * LINE_BYTES
            code.prefetch(behind + AHEAD_BLOCKS * (tokens * 2 * BLOCK))
        numbers = columns + turn * (4 * SPAN)
        here = [
            [
                tiles + tile_bytes * (HALF_QUAD * low + tile)
                + half * (WORD_BLOCK_BYTES * right) + span * (SPAN * VECTOR_BYTES)
                for low in range(2)
                for right in range(2)
            ]
            for tile in range(HALF_QUAD)
        ]  # fmt: skip
        for pair in range(SPAN):
            at = WORD_FACTOR_BYTES + pair * VECTOR_BYTES
            weights = [
                sum_of([code.load(part + at, WORDS) for part in parts], term).bitcast(INTS)
                for parts in here
            ]
            for token in range(tokens):
                spread = code.splat(code.load(numbers + panel_words(token, pair), I32))
                for tile, words in enumerate(weights):
                    total = sums[tile * tokens + token]
                    total.set(isa.word_dots(code, total.get(), words, spread))
    for n, total in enumerate(sums):
        code.store(total.get(), products + VECTOR_BYTES * (n_vectors * number + n))
    code.builder.ret_void()


def _add_quad(module: ir.Module, isa: Isa) -> None:
    """Write `quad(tiles, tile_bytes, half, chunk, products, end, last_end, …)`.

    Makes the products of a group of a quad and a combined pair. Adds them up as `end` says, but for
    one part of the result; that of the products before, as `last_end` says. The other arguments are
    what is prefetched for each span of a product: by the first four an address, the
    bytes from one's to the next one's, those from line to line, a number of lines; by the others an
    address and the number of lines behind it.
    """
    for number in range(len(WEIGHTS)):
        _add_product(module, isa, number)
    for part in range(len(RESULTS)):
        _add_end(module, isa, part)
    code, values = function(module, "quad", 13)
    tiles, tile_bytes, half, chunk, products, end, last_end, *prefetched = values
    ahead, distance, step, n_ahead, behind, n_behind = prefetched
    code.builder.function.linkage = "internal"
    words = chunk + 4 * PAIR * isa.tile_tokens
    for number in range(len(WEIGHTS)):
        lines = ahead + distance * number, step, n_ahead
        if number >= QUAD:
            place = behind + half * N_SPANS * n_behind * ((number - QUAD) * LINE_BYTES)
            lines = place, code.number(LINE_BYTES), n_behind
        x, ended = words + part_bytes(isa, half) * number, last_end if number == 0 else end
        if number in ENDS:
            with code.when(half < SUPER // 2):
                code.call(f"end_{ENDS[number]}", VOID, ended, tile_bytes, products, half * N_SPANS)
        code.call(f"product_{number}", VOID, tiles, tile_bytes, half, x, products, ended, *lines)
    code.builder.ret_void()


def _n_runs(given: Named) -> Value:
    """Return the number of pieces that the quads are split into."""
    return ceil_div(given["n_quad"], given["quads_per_piece"])


def _n_pieces(code: Code, given: Named) -> Value:
    return _n_runs(given) * ceil_div(given["n_pair"], given["pairs_per_pass"])


def _emit_piece(code: Code, isa: Isa, given: Named, index: Value) -> None:
    """Write a piece: some quads times some pairs."""
    tile_bytes, n_blocks, stride = given["tile_bytes"], given["n_blocks"], given["out_stride"]
    quad_bytes, n_runs, n_token = tile_bytes * QUAD, _n_runs(given), PAIR * isa.tile_tokens
    first_quad = index % n_runs * given["quads_per_piece"]
    n_quad = code.min_signed(given["n_quad"] - first_quad, given["quads_per_piece"])
    begin = index // n_runs * given["pairs_per_pass"]
    n_pair = code.min_signed(given["n_pair"] - begin, given["pairs_per_pass"])
    planes = given["planes"] + first_quad * quad_bytes
    out = given["out"] + begin * n_token * stride + first_quad * (4 * QUAD * TILE)
    n_vectors = QUAD * n_token
    sums = code.stack_buffer(FLOATS, MOST_QUADS * MOST_PAIRS * n_vectors)
    nothing = code.stack_buffer(FLOATS, n_vectors)
    with code.loop(code.number(0), code.number(n_vectors)) as n:
        code.store(code.constant(FLOATS, 0.0), nothing + n * VECTOR_BYTES)
    products = code.stack_buffer(INTS, len(WEIGHTS) * HALF_QUAD * isa.tile_tokens)
    end, last_end = code.stack_buffer(I64, len(END)), code.stack_buffer(I64, len(END))
    no_pair = planes, given["combined"], nothing, sums, code.number(VECTOR_BYTES * QUAD)
    _store_end(code, no_pair, last_end)
    with code.loop(code.number(0), n_blocks, SUPER) as first:
        half = code.min_signed(n_blocks - first, code.number(SUPER)) // 2
        n_spans, is_last = half * N_SPANS, (first + half * 2).equals(n_blocks)
        group = planes + first // SUPER * GROUP_BYTES
        behind = code.where(is_last, planes + n_quad * quad_bytes, group + GROUP_BYTES)
        n_bytes, whole_bytes = (chunk_bytes(isa, n) for n in (half, code.number(SUPER // 2)))
        tokens = chunks(isa, given, first) + begin * n_bytes
        next_tokens = chunks(isa, given, first + SUPER) + begin * whole_bytes
        with code.loop(code.number(0), n_quad) as quad, code.loop(code.number(0), n_pair) as pair:
            here, goal = group + quad * quad_bytes, out + quad * (4 * QUAD * TILE)
            next_quad = code.where((quad + 1).equals(n_quad), behind, here + quad_bytes)
            goal = goal + pair * n_token * stride
            place = sums + (quad * MOST_PAIRS + pair) * (n_vectors * VECTOR_BYTES)
            tile, turn = pair % QUAD, pair // QUAD
            usual = (
                *_share(next_quad, TILE_BYTES, pair, n_pair, n_spans),
                *_share(next_tokens + pair * whole_bytes, whole_bytes, quad, n_quad, n_spans * 3),
            )
            at_last = (
                goal + stride * n_token,
                ceil_div(code.number(n_token), n_spans),
                *_share(
                    next_quad + tile * tile_bytes, TILE_BYTES, turn, ceil_div(n_pair, QUAD),
                    n_spans * 3,
                ),
            )  # fmt: skip
            ahead, n_ahead, address, n_lines = (
                code.where(is_last, a, b) for a, b in zip(at_last, usual, strict=True)
            )
            distance = code.where(is_last, code.number(4 * TILE), tile_bytes)
            step = code.where(is_last, stride, code.number(LINE_BYTES))
            chunk = tokens + pair * n_bytes
            facts = (
                here, chunk, code.where(first > 0, place, nothing),
                code.where(is_last, goal, place),
                code.where(is_last, stride, code.number(VECTOR_BYTES * QUAD)),
            )  # fmt: skip
            _store_end(code, facts, end)
            code.call(
                "quad", VOID, here, tile_bytes, half, chunk, products, end, last_end, ahead,
                distance, step, n_ahead, address, n_lines,
            )  # fmt: skip
            _store_end(code, facts, last_end)
    code.call(f"end_{ENDS[0]}", VOID, last_end, tile_bytes, products, code.number(0))


def _store_end(code: Code, facts: Sequence[Value], place: Value) -> None:
    for n, fact in enumerate(facts):
        code.store(fact, place + 8 * n)


def _share(
    address: Value, n_bytes: Value | int, index: Value, n: Value, n_steps: Value
) -> tuple[Value, Value]:
    """Return where the share of an index in n begins of what is prefetched, and lines per step."""
    code = address.code
    n_all = (code.number(n_bytes) if isinstance(n_bytes, int) else n_bytes) // LINE_BYTES
    n_lines = ceil_div(n_all, n * n_steps)
    begin = index * n_steps * n_lines
    return address + begin * LINE_BYTES, code.where(begin < n_all, n_lines, code.number(0))
