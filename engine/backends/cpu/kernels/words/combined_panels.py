"""Combined panels: sums of tokens' words, of which `seven_products` multiplies.

A pair of panels, a group of columns of it, has four parts: both halves of the columns, the rows of
a matrix with two columns, each of both panels. They are numbered 0 to 3 from left to right, then
from top to bottom.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.loops import Named, add_kernel, piece
from engine.backends.cpu.kernels.language.values import F32, I16, LINE, VOID, Code, Value, vector
from engine.backends.cpu.kernels.products.panels import ARGUMENTS
from engine.backends.cpu.kernels.running.team import add_run
from engine.backends.cpu.kernels.words.words import add_pack_group, panel_factor, panel_words
from engine.formats.quants.layout import BLOCK, LINE_BYTES, SUPER, WORD_PANEL_BYTES

PAIR = 2
"""Panels that are combined."""

TOKENS = ("0+3", "0", "2-0", "3", "1-3", "2+3", "0+1")
"""Parts of the tokens in each product."""

WORDS = vector(I16, BLOCK)

GROUP_LINES = SUPER * 4 * BLOCK // LINE_BYTES
"""Lines of a group of columns of a token, in F32."""

PAIR_BLOCK_BYTES = len(TOKENS) * BLOCK // 2 + 2
"""Bytes of 32 activations in a combined pair, at most: half of them in each product, and factors of
16 tokens for each group of at least two blocks."""


def part_bytes(isa: Isa, half: Value) -> Value:
    """Return the bytes of one product's tokens: `half` blocks of columns of a panel."""
    return half * (isa.tile_tokens * 2 * BLOCK)


def chunk_bytes(isa: Isa, half: Value) -> Value:
    """Return the bytes of a group of a combined pair: factors of its tokens, then their words."""
    return half * (len(TOKENS) * isa.tile_tokens * 2 * BLOCK) + 4 * PAIR * isa.tile_tokens


def chunks(isa: Isa, given: Named, first: Value) -> Value:
    """Return where the chunks of all pairs lie for a group; `first` is its first block."""
    code = first.code
    return given["combined"] + first // SUPER * given["n_pair"] * chunk_bytes(
        isa, code.number(SUPER // 2)
    )


def sum_of(parts: Sequence[Value], term: str) -> Value:
    """Return the part, the sum or the difference that a term names."""
    first, second = parts[int(term[0])], parts[int(term[-1])]
    return first if len(term) == 1 else first + second if term[1] == "+" else first - second


def add_combine(module: ir.Module, isa: Isa) -> None:
    """Write `combine(team, *ARGUMENTS)`; tokens behind the last pair are left out."""
    add_run(module)
    add_pack_group(module)
    with piece(module, "combine", ARGUMENTS) as (code, given, index):
        _emit_combination(code, isa, given, index)
    add_kernel(module, "combine", ARGUMENTS, lambda _, given: _n_pair(isa, given))


def _n_pair(isa: Isa, given: Named) -> Value:
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
                for line in range(GROUP_LINES):  # as rows are too short to be foreseen
                    code.prefetch(x + (GROUP_LINES + line) * LINE_BYTES)
                code.call("pack_group", VOID, x, count, panel, code.number(tokens), token)
        half = count // 2
        goal = chunks(isa, goals, first) + index * chunk_bytes(isa, half)
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
                code.store(sum_of(parts, term), place + part_bytes(isa, half) * number)
