"""Products of four tiles (a quad) of weights and two panels (a pair) of tokens: seven for eight.

See `seven_products`, whose pieces call them for one group of columns after the other. What ends a
product is done beside others, a vector now and then.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.values import (
    F32,
    FLOATS,
    I32,
    INTS,
    VOID,
    Code,
    Value,
    function,
)
from engine.backends.cpu.kernels.words.combined_panels import PAIR, WORDS, part_bytes, sum_of
from engine.backends.cpu.kernels.words.word_gemm import VECTOR_BYTES
from engine.backends.cpu.kernels.words.words import panel_words
from engine.formats.quants.layout import (
    BLOCK,
    LINE_BYTES,
    SUPER,
    WORD_BLOCK_BYTES,
    WORD_FACTOR_BYTES,
)

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


def add_quad(module: ir.Module, isa: Isa) -> None:
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


def store_end(code: Code, facts: Sequence[Value], place: Value) -> None:
    """Write what `END` says to an address."""
    for n, fact in enumerate(facts):
        code.store(fact, place + 8 * n)
