"""GEMM with F16 and BF16 matrices as int16, for many tokens, by Strassen's algorithm.

It ("Gaussian elimination is not optimal", 1969) halves the rows, the columns and the tokens of a
product, and multiplies seven sums of the parts in place of eight parts. Sums over 256 columns are
whole numbers here, which fit in 32 bits; what overflows on the way comes out right in the end, as
all is modulo 2^32. So the bits are those of `kernels.products.int16_gemm`. Sums of two numbers fit
in 16 bits, as `int16_panels.MAX_INT16` sees to.

Four tiles (a quad) are multiplied by two panels (a pair). Sums of the tokens' numbers are made once
for a matrix, by `combine`; those of weights in registers, from the first cache. Some quads of a
piece multiply the same tokens, a group of columns at a time, which the second cache holds. Between
its products those of the quad and the pair before are added up to results in F32, and the next
quad's weights prefetched, a vector or a line now and then: many at once would make all else wait.

The parts of a matrix are numbered 0 to 3 from left to right, then from top to bottom; columns of
the weights are rows of the tokens: both halves of the columns, each of both panels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.loops import Named, add_kernel, ceil_div, piece
from engine.backends.cpu.kernels.language.values import (
    F32,
    FLOATS,
    I16,
    I32,
    I64,
    INTS,
    LINE,
    VOID,
    Code,
    Value,
    internal,
    vector,
)
from engine.backends.cpu.kernels.products.gemm import VECTOR_BYTES
from engine.backends.cpu.kernels.products.int16_panels import (
    GROUP_BYTES,
    add_pack_group,
    factor_offset,
    pair_offset,
)
from engine.backends.cpu.kernels.products.panels import ARGUMENTS as PACK_ARGUMENTS
from engine.backends.cpu.kernels.running.thread_pool import add_run
from engine.formats.quants.layout import (
    BLOCK,
    INT16_BLOCK_BYTES,
    INT16_FACTOR_BYTES,
    INT16_PANEL_BYTES,
    LINE_BYTES,
    SUPER,
    TILE,
)

PAIR = 2
"""Panels that are combined."""

TOKENS = ("0+3", "0", "2-0", "3", "1-3", "2+3", "0+1")
"""Parts of the tokens in each product."""

INT16S = vector(I16, BLOCK)

GROUP_LINES = SUPER * 4 * BLOCK // LINE_BYTES
"""Lines of a group of columns of a token, in F32."""

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


def _sum_of(parts: Sequence[Value], term: str) -> Value:
    """Return the part, the sum or the difference that a term names."""
    first, second = parts[int(term[0])], parts[int(term[-1])]
    return first if len(term) == 1 else first + second if term[1] == "+" else first - second


def _add_combine(module: ir.Module, isa: Isa) -> None:
    """Write `combine(pool, *panels.ARGUMENTS)`; tokens behind the last pair are left out."""
    add_run(module)
    add_pack_group(module)
    with piece(module, "combine", PACK_ARGUMENTS) as (code, given, index):
        _emit_combination(code, isa, given, index)
    add_kernel(module, "combine", PACK_ARGUMENTS, lambda _, given: _n_pair(isa, given))


def _n_pair(isa: Isa, given: Named) -> Value:
    return given["n_tokens"] // (PAIR * isa.tile_tokens)


def _emit_combination(code: Code, isa: Isa, given: Named, index: Value) -> None:
    """Write the combination of a pair of panels, which are packed for it a group at a time."""
    tokens, n_blocks = isa.tile_tokens, given["n_blocks"]
    panel_bytes = SUPER * tokens * INT16_PANEL_BYTES
    buffer = code.stack_buffer(LINE, PAIR * panel_bytes // LINE_BYTES)
    pair = [buffer + n * panel_bytes for n in range(PAIR)]
    goals = {"combined": given["panels"], "n_pair": _n_pair(isa, given)}
    with code.loop(code.number(0), n_blocks, SUPER) as first:
        count = code.min_signed(n_blocks - first, code.number(SUPER))
        for n, panel in enumerate(pair):
            row = given["x"] + (index * PAIR + n) * tokens * given["x_stride"] + first * (4 * BLOCK)
            with code.loop(code.number(0), code.number(tokens)) as token:
                x = row + token * given["x_stride"]
                for line in range(GROUP_LINES):  # as rows are too short to be foreseen
                    code.prefetch(x + (GROUP_LINES + line) * LINE_BYTES)
                code.call("pack_group", VOID, x, count, panel, code.number(tokens), token)
        half = count // 2
        goal = _chunks(isa, goals, first) + index * _chunk_bytes(isa, half)
        for n, panel in enumerate(pair):
            for number in range(tokens):
                factor = code.load(panel + factor_offset(tokens, number), F32)
                code.store(factor, goal + 4 * (n * tokens + number))
        _emit_sums(code, isa, pair, half, goal + 4 * PAIR * tokens)


def _emit_sums(code: Code, isa: Isa, pair: Sequence[Value], half: Value, goal: Value) -> None:
    """Write the sums of a group of two panels, whose halves have `half` blocks of columns."""
    tokens = isa.tile_tokens
    with code.loop(code.number(0), half) as block:
        for token in range(tokens):
            places = [
                panel + (block + half * right) * (tokens * INT16_PANEL_BYTES)
                for right in range(2)
                for panel in pair
            ]
            parts = [code.load(place + pair_offset(token, 0), INT16S) for place in places]
            for number, term in enumerate(TOKENS):
                place = goal + (block * tokens + token) * (2 * BLOCK)
                code.store(_sum_of(parts, term), place + _part_bytes(isa, half) * number)


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
    code, (end, tile_bytes, products, first) = internal(module, f"end_{part}", 4)
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
    code, (tiles, tile_bytes, half, x, products, end, ahead, step, n_ahead) = internal(
        module, f"product_{number}", 9
    )
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
                + half * (INT16_BLOCK_BYTES * right) + span * (SPAN * VECTOR_BYTES)
                for low in range(2)
                for right in range(2)
            ]
            for tile in range(HALF_QUAD)
        ]  # fmt: skip
        for pair in range(SPAN):
            at = INT16_FACTOR_BYTES + pair * VECTOR_BYTES
            weights = [
                _sum_of([code.load(part + at, INT16S) for part in parts], term).bitcast(INTS)
                for parts in here
            ]
            for token in range(tokens):
                spread = code.splat(code.load(numbers + pair_offset(token, pair), I32))
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
    code, values = internal(module, "quad", 13)
    tiles, tile_bytes, half, chunk, products, end, last_end, *prefetched = values
    ahead, distance, step, n_ahead, behind, n_behind = prefetched
    words = chunk + 4 * PAIR * isa.tile_tokens
    for number in range(len(WEIGHTS)):
        lines = ahead + distance * number, step, n_ahead
        if number >= QUAD:
            place = behind + half * N_SPANS * n_behind * ((number - QUAD) * LINE_BYTES)
            lines = place, code.number(LINE_BYTES), n_behind
        x, ended = words + _part_bytes(isa, half) * number, last_end if number == 0 else end
        if number in ENDS:
            with code.when(half < SUPER // 2):
                code.call(f"end_{ENDS[number]}", VOID, ended, tile_bytes, products, half * N_SPANS)
        code.call(f"product_{number}", VOID, tiles, tile_bytes, half, x, products, ended, *lines)
    code.builder.ret_void()


def _store_end(code: Code, facts: Sequence[Value], place: Value) -> None:
    """Write what `END` says to an address."""
    for n, fact in enumerate(facts):
        code.store(fact, place + 8 * n)


ARGUMENTS = (
    "planes", "tile_bytes", "n_blocks", "combined", "n_pair", "out", "out_stride", "n_quad",
    "quads_per_piece", "pairs_per_pass",
)  # fmt: skip
"""Arguments of `multiply`: as `gemm.ARGUMENTS`, with combined pairs of panels. A piece is
`quads_per_piece` quads times `pairs_per_pass` pairs."""

TILE_BYTES = GROUP_BYTES - LINE_BYTES
"""Bytes of a group of a tile that are prefetched: a line in each span then does for 16 pairs. The
processor reads on by itself."""

MAX_QUADS, MAX_PAIRS = 4, 16
"""Largest quads of a piece and pairs of a pass: their sums, and a group of columns of the tokens,
are in the second cache."""


def fits(n_blocks: int) -> bool:
    """Return whether matrices have so many blocks of columns: each group has two halves."""
    return n_blocks % 2 == 0


def build(module: ir.Module, isa: Isa) -> None:
    """Write `multiply(pool, *ARGUMENTS)` and `combine`."""
    _add_combine(module, isa)
    _add_quad(module, isa)
    with piece(module, "multiply", ARGUMENTS) as (code, given, index):
        _Piece(code, isa, given, index).emit()
    add_kernel(module, "multiply", ARGUMENTS, _n_pieces)


def _n_runs(given: Named) -> Value:
    return ceil_div(given["n_quad"], given["quads_per_piece"])


def _n_pieces(code: Code, given: Named) -> Value:
    return _n_runs(given) * ceil_div(given["n_pair"], given["pairs_per_pass"])


class _Group(NamedTuple):
    """A group of columns of a piece.

    Attributes:
        first: first block of columns.
        half: number of blocks of each half.
        n_spans: number of spans of a product.
        is_last: whether sums are results behind it.
        tiles: address of the group of the first quad.
        behind: address of what weights are multiplied behind it.
        tokens: address of the first pair's tokens, and bytes from pair to pair.
        next_tokens: the same in the next group.
    """

    first: Value
    half: Value
    n_spans: Value
    is_last: Value
    tiles: Value
    behind: Value
    tokens: tuple[Value, Value]
    next_tokens: tuple[Value, Value]


class _Piece:
    """Writer of a piece: some quads times some pairs.

    Args:
        given: values of `ARGUMENTS`.
        index: number of the piece.
    """

    def __init__(self, code: Code, isa: Isa, given: Named, index: Value) -> None:
        self._code, self._isa, self._given = code, isa, given
        self._tile_bytes, self._stride = given["tile_bytes"], given["out_stride"]
        self._quad_bytes, n_runs = self._tile_bytes * QUAD, _n_runs(given)
        self._n_token = PAIR * isa.tile_tokens
        first_quad = index % n_runs * given["quads_per_piece"]
        self._n_quad = code.min_signed(given["n_quad"] - first_quad, given["quads_per_piece"])
        self._begin = begin = index // n_runs * given["pairs_per_pass"]
        self._n_pair = code.min_signed(given["n_pair"] - begin, given["pairs_per_pass"])
        self._planes = given["planes"] + first_quad * self._quad_bytes
        row = given["out"] + begin * self._n_token * self._stride
        self._out = row + first_quad * (4 * QUAD * TILE)
        self._n_vectors = QUAD * self._n_token
        self._sums = code.stack_buffer(FLOATS, MAX_QUADS * MAX_PAIRS * self._n_vectors)
        self._nothing = code.stack_buffer(FLOATS, self._n_vectors)
        with code.loop(code.number(0), code.number(self._n_vectors)) as n:
            code.store(code.constant(FLOATS, 0.0), self._nothing + n * VECTOR_BYTES)
        self._products = code.stack_buffer(INTS, len(WEIGHTS) * HALF_QUAD * isa.tile_tokens)
        self._end, self._last_end = (code.stack_buffer(I64, len(END)) for _ in range(2))

    def emit(self) -> None:
        """Write the piece, a group of columns after the other."""
        code, n_blocks = self._code, self._given["n_blocks"]
        sums_bytes = code.number(VECTOR_BYTES * QUAD)
        no_pair = self._planes, self._given["combined"], self._nothing, self._sums, sums_bytes
        _store_end(code, no_pair, self._last_end)
        with code.loop(code.number(0), n_blocks, SUPER) as first:
            group = self._group(first)
            with (
                code.loop(code.number(0), self._n_quad) as quad,
                code.loop(code.number(0), self._n_pair) as pair,
            ):
                self._emit_pair(group, quad, pair)
        code.call(
            f"end_{ENDS[0]}", VOID, self._last_end, self._tile_bytes, self._products, code.number(0)
        )

    def _group(self, first: Value) -> _Group:
        code, isa, n_blocks = self._code, self._isa, self._given["n_blocks"]
        half = code.min_signed(n_blocks - first, code.number(SUPER)) // 2
        n_spans, is_last = half * N_SPANS, (first + half * 2).equals(n_blocks)
        tiles = self._planes + first // SUPER * GROUP_BYTES
        end = self._planes + self._n_quad * self._quad_bytes
        behind = code.where(is_last, end, tiles + GROUP_BYTES)
        n_bytes, whole_bytes = (_chunk_bytes(isa, n) for n in (half, code.number(SUPER // 2)))
        tokens = _chunks(isa, self._given, first) + self._begin * n_bytes, n_bytes
        whole = _chunks(isa, self._given, first + SUPER) + self._begin * whole_bytes, whole_bytes
        return _Group(first, half, n_spans, is_last, tiles, behind, tokens, whole)

    def _emit_pair(self, group: _Group, quad: Value, pair: Value) -> None:
        """Write the products of a group of a quad and a pair, given their numbers in the piece."""
        code, n_vectors, (tokens, n_bytes) = self._code, self._n_vectors, group.tokens
        here, goal = group.tiles + quad * self._quad_bytes, self._out + quad * (4 * QUAD * TILE)
        is_last_quad = (quad + 1).equals(self._n_quad)
        next_quad = code.where(is_last_quad, group.behind, here + self._quad_bytes)
        goal = goal + pair * self._n_token * self._stride
        place = self._sums + (quad * MAX_PAIRS + pair) * (n_vectors * VECTOR_BYTES)
        prefetched = self._prefetched(group, quad, pair, next_quad, goal)
        chunk = tokens + pair * n_bytes
        facts = (
            here, chunk, code.where(group.first > 0, place, self._nothing),
            code.where(group.is_last, goal, place),
            code.where(group.is_last, self._stride, code.number(VECTOR_BYTES * QUAD)),
        )  # fmt: skip
        _store_end(code, facts, self._end)
        code.call(
            "quad", VOID, here, self._tile_bytes, group.half, chunk, self._products, self._end,
            self._last_end, *prefetched,
        )  # fmt: skip
        _store_end(code, facts, self._last_end)

    def _prefetched(
        self, group: _Group, quad: Value, pair: Value, next_quad: Value, goal: Value
    ) -> Sequence[Value]:
        """Return what `quad` prefetches: weights and tokens; in the last group places of results.

        Args:
            next_quad: address of the weights behind the quad's.
            goal: address of the result of the pair.
        """
        code, n_spans, is_last = self._code, group.n_spans, group.is_last
        tokens, n_bytes = group.next_tokens
        tile, turn = pair % QUAD, pair // QUAD
        usual = (
            *_share(next_quad, TILE_BYTES, pair, self._n_pair, n_spans),
            *_share(tokens + pair * n_bytes, n_bytes, quad, self._n_quad, n_spans * 3),
        )
        at_last = (
            goal + self._stride * self._n_token,
            ceil_div(code.number(self._n_token), n_spans),
            *_share(
                next_quad + tile * self._tile_bytes, TILE_BYTES, turn,
                ceil_div(self._n_pair, QUAD), n_spans * 3,
            ),
        )  # fmt: skip
        ahead, n_ahead, address, n_lines = (
            code.where(is_last, a, b) for a, b in zip(at_last, usual, strict=True)
        )
        distance = code.where(is_last, code.number(4 * TILE), self._tile_bytes)
        step = code.where(is_last, self._stride, code.number(LINE_BYTES))
        return ahead, distance, step, n_ahead, address, n_lines


def _share(
    address: Value, n_bytes: Value | int, index: Value, n: Value, n_steps: Value
) -> tuple[Value, Value]:
    """Return where the share of an index in n begins of what is prefetched, and lines per step."""
    code = address.code
    n_all = (code.number(n_bytes) if isinstance(n_bytes, int) else n_bytes) // LINE_BYTES
    n_lines = ceil_div(n_all, n * n_steps)
    begin = index * n_steps * n_lines
    return address + begin * LINE_BYTES, code.where(begin < n_all, n_lines, code.number(0))
