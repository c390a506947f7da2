"""Integer products of queries and keys, for cache types that have blocks of integers.

A query head is quantised to int16 with a scale per 32 elements, 256 times as fine as Q8_0. Its dot
product with a cache block is exact, so terms may be added in any order. A score is the sum over the
blocks, in order, of this product times the key's scale times the query's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

from llvmlite import ir

from engine.backends.cpu.kernels.cache.attention_softmax import larger
from engine.backends.cpu.kernels.cache.cache_codec import CODECS, BlockCodec
from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.values import (  # fmt: skip
    F32,
    FLOATS,
    I16,
    I32,
    INTS,
    LANES,
    Code,
    Value,
    internal,
    transposed,
    vector,
)
from engine.backends.cpu.kernels.products.panels import size_bits
from engine.model.forward.state import ATTENTION_BLOCK as BLOCK

UNIT_BYTES = 4 * LANES
"""Size in bytes of a vector: 16 F32 or 32 int16."""

QUERY_BYTES = 2 * UNIT_BYTES
"""Size in bytes of a query block: 32 int16, then the scale as a vector; the same as in F32."""

N_PAIRS = 16
"""Number of int16 pairs in a cache block."""

PAIR_BYTES = 4 * BLOCK
"""Bytes per int16 pair for a block of positions."""

PANEL_BYTES = (N_PAIRS + 1) * PAIR_BYTES
"""Bytes per 32 elements for a block of positions: int16, then scales."""

MAX_INT16 = 32767.0

MIN_QUERY = 1e-30
"""Query blocks whose elements are all smaller than this become 0."""


def in_words(isa: Isa, type_k: str) -> bool:
    """Return whether queries and keys of this type are multiplied as int16."""
    return isa.has_word_dots and issubclass(CODECS[type_k], BlockCodec)


def add_query_words(module: ir.Module) -> None:
    """Emit `query_words(q, head_dim, goal)`: quantises a query head."""
    code, (q, dim, goal) = internal(module, "query_words", 3)
    greater = partial(larger, code)
    with code.loop(code.number(0), dim // 32) as index:
        place, values = goal + index * QUERY_BYTES, q + index * QUERY_BYTES
        parts = [code.load(values + at, FLOATS) for at in (0, UNIT_BYTES)]
        sizes = [size_bits(part) for part in parts]
        largest = code.reduce_each([greater(*sizes)], greater)[0].bitcast(F32)
        is_zero, zero = largest < MIN_QUERY, code.constant(F32, 0.0)
        factor = code.constant(F32, MAX_INT16) / largest
        spread = code.splat(code.where(is_zero, zero, factor))
        for n, part in enumerate(parts):
            words = code.unary("rint", part * spread).to(INTS).to(vector(I16))
            code.store(words, place + 2 * LANES * n)
        scale = code.where(is_zero, zero, largest * (1 / MAX_INT16))
        code.store(code.splat(scale), place + UNIT_BYTES)
    code.builder.ret_void()


def add_key_words(module: ir.Module, isa: Isa, type_k: str) -> None:
    """Emit `transpose(k, stride, last, head_dim, ahead, goal)`: reads 16 keys for `tile_scores`.

    Each int16 pair becomes a vector over the 16 positions; pairs are `PAIR_BYTES` apart, and a
    block's 16 pairs are followed by a vector of scales. Keys after `last` are not read. As many
    bytes are prefetched from `ahead`.
    """
    code, (k, stride, last, dim, ahead, goal) = internal(module, "transpose", 6)
    codec = _codec(code, isa, type_k)
    n_bytes = LANES * codec.n_bytes
    rows = [k + code.min_signed(code.number(n), last) * stride for n in range(LANES)]
    with code.loop(code.number(0), dim // codec.width) as index:
        for line in range(0, n_bytes, 64):
            code.prefetch(ahead + index * n_bytes + line, cache=2)
        places = [row + index * codec.n_bytes for row in rows]
        panel = goal + index * PANEL_BYTES
        pairs = transposed([codec.words(place).bitcast(INTS) for place in places])
        for n, pair in enumerate(pairs):
            code.store(pair, panel + n * PAIR_BYTES)
        code.store(codec.scales(places), panel + N_PAIRS * PAIR_BYTES)
    code.builder.ret_void()


def add_word_scores(module: ir.Module, isa: Isa, n_rows: int) -> None:
    """Emit `tile_scores(q, n_units, k, out)`: q·k for n rows and a block of positions.

    q has rows of `n_units` vectors from `query_words`; k is laid out by `transpose`.
    """
    code, (q, n_units, k, out) = internal(module, "tile_scores", 4)
    q_rows = [q + n_units * (UNIT_BYTES * row) for row in range(n_rows)]
    vectors = range(0, PAIR_BYTES, UNIT_BYTES)

    def add_block(index: Value, *, is_first: bool) -> None:
        queries, panel = [row + index * QUERY_BYTES for row in q_rows], k + index * PANEL_BYTES
        sums = [[code.constant(INTS, 0)] * len(vectors) for _ in queries]
        for pair in range(N_PAIRS):
            keys = [code.load(panel + pair * PAIR_BYTES + at, INTS) for at in vectors]
            for row, query in enumerate(queries):
                words = code.splat(code.load(query + 4 * pair, I32))
                sums[row] = [
                    isa.word_dots(code, total, key, words)
                    for key, total in zip(keys, sums[row], strict=True)
                ]
        scales = [code.load(panel + N_PAIRS * PAIR_BYTES + at, FLOATS) for at in vectors]
        for row, query in enumerate(queries):
            own = code.load(query + UNIT_BYTES, FLOATS)
            for at, total, scale in zip(vectors, sums[row], scales, strict=True):
                place = out + (PAIR_BYTES * row + at)
                before = code.constant(FLOATS, 0.0) if is_first else code.load(place, FLOATS)
                code.store(code.fma(total.to(FLOATS) * scale, own, before), place)

    add_block(code.number(0), is_first=True)
    with code.loop(code.number(1), n_units // 2) as index:
        add_block(index, is_first=False)
    code.builder.ret_void()


def word_products(
    code: Code, isa: Isa, type_k: str, queries: Sequence[Value], keys: Sequence[Value]
) -> tuple[list[Value], Value, Value]:
    """Multiply one block each from some queries and some keys.

    Args:
        queries: addresses of blocks from `query_words`.
        keys: addresses of cache blocks.

    Returns:
        For each query and key, 16 integers that add up to the dot product; then, in the same order,
        a vector of the keys' scales and one of the queries' scales.
    """
    codec = _codec(code, isa, type_k)
    words = [codec.words(key).bitcast(INTS) for key in keys]
    zero, products = code.constant(INTS, 0), []
    for query in queries:
        own = code.load(query, INTS)
        products += [isa.word_dots(code, zero, key, own) for key in words]
    n = len(keys)
    scales = codec.scales(keys).shuffle([lane % n for lane in range(LANES)])
    factors = code.load(queries[0] + UNIT_BYTES, FLOATS)
    for number, query in enumerate(queries[1:], 1):
        lanes = [lane + LANES * (lane // n == number) for lane in range(LANES)]
        factors = factors.shuffle(lanes, code.load(query + UNIT_BYTES, FLOATS))
    return products, scales, factors


def _codec(code: Code, isa: Isa, type_k: str) -> BlockCodec:
    return cast("BlockCodec", CODECS[type_k](code, isa))
