"""Packs activations into panels; a piece is a group of tokens.

If there are fewer groups than threads, the columns are split too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.loops import Named, ceil_div, piece, share
from engine.backends.cpu.kernels.language.values import I64, VOID, Code, Value, function, internal
from engine.backends.cpu.kernels.products import int16_panels, panels
from engine.backends.cpu.kernels.products.panels import ARGUMENTS
from engine.backends.cpu.kernels.products.tile_reader import BlockGroup
from engine.backends.cpu.kernels.running.thread_pool import THREADS, add_run, load
from engine.formats.quants.layout import BLOCK, INT16_PANEL_BYTES, SUPER, panel_block_bytes

PART_BLOCKS = 48
"""Minimum number of blocks per thread, over all tokens; these take about 1.2 us."""


@dataclass(frozen=True, slots=True)
class PanelFormat:
    """A panel format.

    Attributes:
        add_pack_token: emits `pack_token`; see `kernels.products.panels`.
        token_bytes: bytes per token in each part of a block.
        block_bytes: bytes per token and block, some of which may be unused.
    """

    add_pack_token: Callable[[ir.Module], None]
    token_bytes: tuple[int, ...]
    block_bytes: int


INT16 = PanelFormat(int16_panels.add_pack_token, (2 * BLOCK, 4), INT16_PANEL_BYTES)
"""The format for F16 and BF16 matrices."""


def are_int16(isa: Isa, x_bytes: int) -> bool:
    """Return whether activations are int16; see `kernels.products.int16_panels`."""
    return x_bytes == 2 and isa.has_word_dots


def format_of(isa: Isa, x_bytes: int) -> PanelFormat:
    """Return the format for quantised matrices."""
    n_bytes = panel_block_bytes(x_bytes)
    if are_int16(isa, x_bytes):
        fine = int16_panels.FINE_TOKEN_BYTES
        return PanelFormat(int16_panels.add_pack_fine_token, fine, n_bytes)
    add = partial(panels.add_pack_token, isa=isa, x_bytes=x_bytes)
    return PanelFormat(add, (*[BLOCK] * x_bytes, *panels.TOKEN_BYTES), n_bytes)


def build(module: ir.Module, isa: Isa, panel: PanelFormat) -> None:
    """Emit `quantise(pool, *ARGUMENTS)`; see `kernels.products.panels`."""
    add_run(module)
    add_pack_tokens(module, isa, panel)
    with piece(module, "quantise", (*ARGUMENTS, "n_part")) as (code, given, index):
        n_part, stride = given["n_part"], given["x_stride"]
        first = index // n_part * isa.tile_tokens
        n = code.min_signed(given["n_tokens"] - first, code.number(isa.tile_tokens))
        goal = given["panels"] + first * given["n_blocks"] * panel.block_bytes
        code.call(
            "pack_tokens", VOID, given["x"] + first * stride, stride, n, given["n_blocks"],
            given["skip"], goal, code.number(0), code.number(1), index % n_part, n_part,
        )  # fmt: skip
    code, (pool, *values) = function(module, "quantise", 1 + len(ARGUMENTS))
    given = dict(zip(ARGUMENTS, values, strict=True))
    n_group = ceil_div(given["n_tokens"], isa.tile_tokens)
    n_part = _n_part(code, given, n_group, load(code, pool + THREADS))
    share(code, "quantise", pool, code.stack_array([*values, n_part]), n_group * n_part)
    code.builder.ret_void()


def _n_part(code: Code, given: Named, n_group: Value, n_threads: Value) -> Value:
    """Return the number of parts into which each group's columns are split."""
    n = code.min_signed(given["n_tokens"] * given["n_blocks"] // PART_BLOCKS, n_threads)
    n = n // code.where(n_group < 1, code.number(1), n_group)  # there may be no tokens
    n = code.min_signed(n, ceil_div(given["n_blocks"] + given["skip"], SUPER))
    return code.where(n < 1, code.number(1), n)


def add_pack_tokens(module: ir.Module, isa: Isa, panel: PanelFormat) -> None:
    """Emit `pack_tokens(x, x_stride, n, n_blocks, skip, panels, pairs, n_used, part, n_part)`.

    It packs up to `isa.tile_tokens` rows, in one panel per bit set in n, largest first. Row i is
    token `pairs[i] / n_used` of x (`pairs` has 64-bit integers), or token i if `pairs` is 0. Of
    `n_part` parts of the columns, only part `part` is packed.
    """
    panel.add_pack_token(module)
    code, values = internal(module, "pack_tokens", 10)
    x, stride, n, n_blocks, skip, goal, pairs, n_used, part, n_part = values
    n_group, token = ceil_div(n_blocks + skip, SUPER), code.variable(code.number(0))
    begin, end = (
        BlockGroup.at(number * n_group // n_part, n_blocks, skip).first
        for number in (part, part + 1)
    )
    end = code.min_signed(end, n_blocks)

    def group(size: int) -> None:
        first = token.get()
        with code.loop(code.number(0), code.number(size)) as t:
            number = code.variable(first + t)
            with code.when(pairs.differs(0)):
                number.set(code.load(pairs + (first + t) * 8, I64) // n_used)
            row = x + number.get() * stride
            place = goal + first * n_blocks * panel.block_bytes
            code.call(
                "pack_token", VOID, row, n_blocks, skip, place, code.number(size), t, begin, end
            )
        token.set(first + size)

    size = isa.tile_tokens
    while size:
        with code.when((n & size) > 0):
            group(size)
        size //= 2
    code.builder.ret_void()
