"""Words: F16 and BF16 matrices and their activations as whole numbers of 16 bits.

A processor that adds up products of words (`Isa.has_word_dots`) multiplies twice as many of them as
of F32 numbers. Each 256 columns of a row of weights, and of a token, have a scale: numbers are
multiplied by it and rounded. A sum of products over 256 columns is exact: it fits in 32 bits, as by
Cauchy and Schwarz it is at most the product of both vectors' lengths, which scales keep within
`MAX_LENGTH`. So the bits of a sum do not depend on its order, and all further steps are those of
F32 numbers, in the order of columns.

Rounding adds at most 8 to a vector's length, which is at least 8,192 unless all is 0. So whatever
the numbers are, a product is off by less than 2^-9 of both lengths, about what rounding both to F16
may do. A typical word has a size of 1,400 to 2,900: products of two random vectors are off by
1e-4 of their size (an NMSE of 2e-8; 3e-6 where one of them is rounded to BF16). Scales of weights
are powers of two, so that most BF16 weights, and the larger ones of F16, stay exact.

A tile of 16 rows holds for each group of 256 columns the rows' factors, `BALANCE` / scale in F32,
then the words: 64 bytes have two columns of each row. For a panel of m tokens see
`add_pack_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.loops import add_kernel, ceil_div, piece
from engine.backends.cpu.kernels.language.values import (
    F32,
    FLOATS,
    I16,
    INTS,
    VOID,
    Code,
    Value,
    function,
    vector,
)
from engine.backends.cpu.kernels.products.panels import (
    ARGUMENTS,
    ROUNDER,
    ROUNDER_BITS,
    TINY,
    size_bits,
)
from engine.backends.cpu.kernels.running.team import add_run
from engine.formats.quants.layout import (
    BLOCK,
    SUPER,
    WORD_BLOCK_BYTES,
    WORD_FACTOR_BYTES,
    WORD_PANEL_BYTES,
)

MAX_LENGTH = 46_000
"""Largest length of a vector of words: its square, with what rounding adds, is less than 2^31."""

MAX_WORD = 16_383
"""Largest word: sums of two are words, too, as `kernels.words.seven_products` needs."""

BALANCE = 2.0**21
"""Factors of weights are multiplied by this, those of activations divided. So a sum times the
latter, the step before the former, is a number for all activations: it is less than
2^31 × 2^-21 × 2^128 / (`MAX_LENGTH` / 16), and factors of `TINY` and more keep all their bits."""

GROUP_BYTES = WORD_FACTOR_BYTES + SUPER * WORD_BLOCK_BYTES
"""Bytes of a group in a tile."""


def panel_words(token: int, pair: int) -> int:
    """Return the offset of two words of a token in a block of a panel."""
    return (token * (BLOCK // 2) + pair) * 4


def panel_factor(n_tokens: int, token: int) -> int:
    """Return the offset of a token's factor in the first block of a group of a panel."""
    return (n_tokens * (BLOCK // 2) + token) * 4


def build(module: ir.Module, isa: Isa) -> None:
    """Write `quantise(team, *ARGUMENTS)`."""
    add_run(module)
    _add_pack_tokens(module, isa)
    with piece(module, "quantise", ARGUMENTS) as (code, given, index):
        first, stride = index * isa.tile_tokens, given["x_stride"]
        n = code.min_signed(given["n_tokens"] - first, code.number(isa.tile_tokens))
        goal = given["panels"] + first * given["n_blocks"] * WORD_PANEL_BYTES
        code.call(
            "pack_tokens", VOID, given["x"] + first * stride, stride, n, given["n_blocks"], goal
        )
    add_kernel(module, "quantise", ARGUMENTS, lambda _, g: ceil_div(g["n_tokens"], isa.tile_tokens))


def _add_pack_tokens(module: ir.Module, isa: Isa) -> None:
    """Write `pack_tokens(x, x_stride, n, n_blocks, panels)`.

    Packs up to `isa.tile_tokens` rows: one panel for each bit set in n, the largest first. For each
    block of 32 columns, a panel of m tokens holds m × 32 words, then m factors in F32,
    1 / (scale × `BALANCE`), of which products read those of a group's first block.
    """
    _add_pack_token(module)
    code, (x, stride, n, n_blocks, panels) = function(module, "pack_tokens", 5)
    code.builder.function.linkage = "internal"
    done = code.variable(code.number(0))
    size = isa.tile_tokens
    while size:
        with code.when((n & size) > 0):
            first = done.get()
            panel = panels + first * n_blocks * WORD_PANEL_BYTES
            with code.loop(code.number(0), code.number(size)) as t:
                code.call(
                    "pack_token", VOID, x + (first + t) * stride, n_blocks, panel,
                    code.number(size), t,
                )  # fmt: skip
            done.set(first + size)
        size //= 2
    code.builder.ret_void()


def _add_pack_token(module: ir.Module) -> None:
    """Write `pack_token(x, n_blocks, panel, n, t)`: packs token t of a panel of n."""
    add_pack_group(module)
    code, (x, n_blocks, panel, n, t) = function(module, "pack_token", 5)
    code.builder.function.linkage = "internal"
    with code.loop(code.number(0), n_blocks, SUPER) as first:
        count = code.min_signed(n_blocks - first, code.number(SUPER))
        place = panel + first * n * WORD_PANEL_BYTES
        code.call("pack_group", VOID, x + first * (4 * BLOCK), count, place, n, t)
    code.builder.ret_void()


def add_pack_group(module: ir.Module) -> None:
    """Write `pack_group(x, n_blocks, panel, n, t)`: `pack_token` for up to 256 columns."""
    code, (x, n_blocks, panel, n, t) = function(module, "pack_group", 5)
    code.builder.function.linkage = "internal"

    def half(index: Value) -> Value:
        return code.load(x + index * 64, FLOATS)

    size, relative = scale_of(code, half, code.number(0), n_blocks * 2, MAX_LENGTH)
    steps, factor = relative / size, size * (1 / BALANCE) / relative + (size - size)
    steps = code.where(size < TINY, code.constant(F32, 0.0), steps)
    with code.loop(code.number(0), n_blocks) as block:
        at = panel + block * n * WORD_PANEL_BYTES
        words = [whole(half(block * 2 + k) * code.splat(steps)) for k in range(2)]
        code.store(joined_numbers(factor, *words), at + t * (2 * BLOCK))
        code.store(factor, at + n * (2 * BLOCK) + t * 4)
    code.builder.ret_void()


def scale_of(
    code: Code, half: Callable[[Value], Value], first: Value, last: Value, most_length: int,
    most_word: int = MAX_WORD,
) -> tuple[Value, Value]:  # fmt: skip
    """Return the largest size of some numbers, and the size that it may have as a word.

    Args:
        half: function that loads the 16 numbers of an index.
        first: index of the first 16 numbers.
        last: index behind the last ones.
        most_length: largest length that the numbers may have together, as words.
        most_word: largest size of each.
    """
    most = code.variable(code.constant(INTS, 0))
    with code.loop(first, last) as index:
        most.set(code.maximum(most.get(), size_bits(half(index))))
    size = code.reduce("max", most.get()).bitcast(F32)
    inverse = code.where(size < TINY, code.constant(F32, 0.0), code.constant(F32, 1.0) / size)
    squares = code.variable(code.constant(FLOATS, 0.0))
    with code.loop(first, last) as index:
        number = half(index) * code.splat(inverse)
        squares.set(code.fma(number, number, squares.get()))
    length = code.unary("sqrt", code.reduce("add", squares.get()))
    relative = code.constant(F32, float(most_length)) / length
    return size, code.minimum(relative, code.constant(F32, float(most_word)))


def whole(values: Value) -> Value:
    """Return the nearest integers, ties to even, as words."""
    return ((values + ROUNDER).bitcast(INTS) - ROUNDER_BITS).to(vector(I16))


def joined_numbers(factor: Value, first: Value, second: Value) -> Value:
    """Return 32 words, all 0 where their factor is no number: others are added to them."""
    words = joined(first, second)
    return words.code.where(factor.equals(factor), words, words.code.constant(words.kind, 0))


def joined(first: Value, second: Value) -> Value:
    """Return 32 words of two vectors of 16."""
    return first.shuffle(range(BLOCK), second)
