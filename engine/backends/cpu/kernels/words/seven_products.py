"""GEMM with matrices of words for many tokens: seven products take the place of eight.

Strassen's algorithm ("Gaussian elimination is not optimal", 1969) halves the rows, the columns and
the tokens of a product, and multiplies seven sums of the parts in place of eight parts. Sums over
256 columns are whole numbers here, which fit in 32 bits; what overflows on the way comes out right
in the end, as all is modulo 2^32. So the bits are those of `kernels.words.word_gemm`. Sums of
two words fit in a word, as `words.MAX_WORD` sees to.

Four tiles (a quad) are multiplied by two panels (a pair), see `quad_products`. Sums of the tokens'
words are made once for a matrix, see `combined_panels`; those of weights in registers, from the
first cache. Some quads of a piece multiply the same tokens, a group of columns at a time, which the
second cache holds. Between its products those of the quad and the pair before are added up to
results in F32, and the next quad's weights prefetched, a vector or a line now and then: many at
once would make all else wait.

The parts of a matrix are numbered 0 to 3 from left to right, then from top to bottom; columns of
the weights are rows of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.loops import Named, add_kernel, ceil_div, piece
from engine.backends.cpu.kernels.language.values import FLOATS, I64, INTS, VOID, Code, Value
from engine.backends.cpu.kernels.words.combined_panels import PAIR, add_combine, chunk_bytes, chunks
from engine.backends.cpu.kernels.words.quad_products import (
    END,
    ENDS,
    HALF_QUAD,
    N_SPANS,
    QUAD,
    WEIGHTS,
    add_quad,
    store_end,
)
from engine.backends.cpu.kernels.words.word_gemm import VECTOR_BYTES
from engine.backends.cpu.kernels.words.words import GROUP_BYTES
from engine.formats.quants.layout import LINE_BYTES, SUPER, TILE

ARGUMENTS = (
    "planes", "tile_bytes", "n_blocks", "combined", "n_pair", "out", "out_stride", "n_quad",
    "quads_per_piece", "pairs_per_pass",
)  # fmt: skip
"""Arguments of `multiply`: as `quantised_gemm.ARGUMENTS`, with combined pairs of panels. A piece is
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
    """Write `multiply(team, *ARGUMENTS)` and `combine` of `combined_panels`."""
    add_combine(module, isa)
    add_quad(module, isa)
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
        store_end(code, no_pair, self._last_end)
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
        n_bytes, whole_bytes = (chunk_bytes(isa, n) for n in (half, code.number(SUPER // 2)))
        tokens = chunks(isa, self._given, first) + self._begin * n_bytes, n_bytes
        whole = chunks(isa, self._given, first + SUPER) + self._begin * whole_bytes, whole_bytes
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
        store_end(code, facts, self._end)
        code.call(
            "quad", VOID, here, self._tile_bytes, group.half, chunk, self._products, self._end,
            self._last_end, *prefetched,
        )  # fmt: skip
        store_end(code, facts, self._last_end)

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
