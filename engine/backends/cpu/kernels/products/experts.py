"""Grouped GEMM for mixtures of experts: each row times the matrix of its expert, all in one job.

Rows are sorted into groups, one for each expert in use (`forward.expert_rows.Groups`). A group is
packed into panels of its own, as if there were no other rows, at the offset of its first row. So
each row's result has the bits that `kernels.products.quantised_gemm` gives it. Weights of experts
without rows are not read.

    table = groups.table.data_ptr(), len(groups.table)
    quantise_groups(team, x, x_stride, n_blocks, skip, panels, pairs, n_used, *table)
    multiply_groups(team, planes, expert_bytes, tile_bytes, n_blocks, skip, panels, row_bytes,
                    out, out_stride, n_rows, n_tile, tiles_per_piece, tokens_per_pass, *table)

x is (n_row, 32 × n_blocks) F32 with rows `x_stride` bytes apart, and `pairs` is 0; or x has a row
for each token, and `pairs` is the address of `groups.pair_of`, with `n_used` experts for each.
`panels` is the address of `quantised_bytes(n_row, n_blocks, x_bytes)` bytes; out is (n_row, n_rows)
F32 with rows `out_stride` bytes apart; `row_bytes` is `quantised_bytes(1, n_blocks, x_bytes)`.
Where all groups have the same single row (one token and its experts), `quantise` packs that row
alone, and `row_bytes` is 0.
"""

from __future__ import annotations

from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.loops import Named, add_kernel, ceil_div, piece
from engine.backends.cpu.kernels.language.values import I64, VOID, Code, Value
from engine.backends.cpu.kernels.products.gemm import add_rows, row_count
from engine.backends.cpu.kernels.products.panel_packing import add_pack_tokens, format_of
from engine.backends.cpu.kernels.products.quantised_gemm import operands
from engine.backends.cpu.kernels.running.team import add_run
from engine.formats.quants.layout import TILE, Layout, panel_block_bytes

ENTRY_BYTES = 24
"""Size of the table's entry of a group: its expert, first row and number of rows, 64-bit each."""

QUANTISE = (
    "x", "x_stride", "n_blocks", "skip", "panels", "pairs", "n_used", "table", "n_group",
)  # fmt: skip
"""Arguments of `quantise_groups`."""

MULTIPLY = (
    "planes", "expert_bytes", "tile_bytes", "n_blocks", "skip", "panels", "row_bytes", "out",
    "out_stride", "n_rows", "n_tile", "tiles_per_piece", "tokens_per_pass", "table", "n_group",
)  # fmt: skip
"""Arguments of `multiply_groups`. The planes of experts are `expert_bytes` apart. A piece is
`tiles_per_piece` tiles of one expert times up to `tokens_per_pass` of its rows, whose panels stay
in a core's cache; that number is a multiple of `Isa.tile_tokens`."""


def build_quantise(module: ir.Module, isa: Isa, x_bytes: int = 1) -> None:
    """Write `quantise_groups(team, *QUANTISE)`."""
    name, size = "quantise_groups", isa.tile_tokens
    add_run(module)
    add_pack_tokens(module, isa, format_of(isa, x_bytes))
    with piece(module, name, QUANTISE) as (code, given, index):
        _, first, n = _part(code, given, code.number(size), index)
        goal = given["panels"] + first * given["n_blocks"] * panel_block_bytes(x_bytes)
        are_rows = given["pairs"].equals(0)
        x = given["x"] + code.where(are_rows, first * given["x_stride"], code.number(0))
        pairs = given["pairs"] + code.where(are_rows, code.number(0), first * 8)
        code.call(
            "pack_tokens", VOID, x, given["x_stride"], n, given["n_blocks"], given["skip"], goal,
            pairs, given["n_used"], code.number(0), code.number(1),
        )  # fmt: skip
    add_kernel(module, name, QUANTISE, lambda code, given: n_parts(code, given, code.number(size)))


def build_multiply(module: ir.Module, isa: Isa, layout: Layout, x_bytes: int = 1) -> None:
    """Write `multiply_groups(team, *MULTIPLY)` for matrices of one layout.

    Each thread begins with a share of neighbouring experts, so that it reads their weights from
    front to back.
    """
    name = "multiply_groups"
    add_run(module)
    add_rows(module, operands(isa, layout, x_bytes))
    with piece(module, name, MULTIPLY) as (code, given, index):
        _add_piece(code, given, index)

    def n_pieces(code: Code, given: Named) -> Value:
        return n_parts(code, given, given["tokens_per_pass"]) * _n_runs(given)

    add_kernel(module, name, MULTIPLY, n_pieces, in_shares=True)


def _n_runs(given: Named) -> Value:
    return ceil_div(given["n_tile"], given["tiles_per_piece"])


def _add_piece(code: Code, given: Named, index: Value) -> None:
    """Write a piece: some tiles of one expert times some of its rows."""
    n_runs = _n_runs(given)
    expert, first, n = _part(code, given, given["tokens_per_pass"], index // n_runs)
    first_tile = index % n_runs * given["tiles_per_piece"]
    last_tile = code.min_signed(first_tile + given["tiles_per_piece"], given["n_tile"])
    planes = given["planes"] + expert * given["expert_bytes"]
    panels = given["panels"] + first * given["row_bytes"]
    out = given["out"] + first * given["out_stride"] + first_tile * (4 * TILE)
    code.call(
        "rows", VOID, planes + first_tile * given["tile_bytes"], given["tile_bytes"],
        given["n_blocks"], given["skip"], panels, n, out, given["out_stride"],
        row_count(code, given, first_tile, last_tile),
    )  # fmt: skip


def n_parts(code: Code, given: Named, size: Value) -> Value:
    """Return the number of parts of at most `size` rows that all groups are split into."""
    total = code.variable(code.number(0))
    with code.loop(code.number(0), given["n_group"]) as group:
        n = code.load(given["table"] + group * ENTRY_BYTES + 16, I64)
        total.set(total.get() + ceil_div(n, size))
    return total.get()


def _part(code: Code, given: Named, size: Value, number: Value) -> tuple[Value, Value, Value]:
    """Return the expert, the first row and the number of rows of a part, by its number."""
    left, entry = code.variable(number), code.variable(given["table"])
    with code.forever() as leave:
        n_parts = ceil_div(code.load(entry.get() + 16, I64), size)
        leave(left.get() < n_parts)
        left.set(left.get() - n_parts)
        entry.set(entry.get() + ENTRY_BYTES)
    expert, first, n = code.load_array(entry.get(), 3)
    begin = left.get() * size
    return expert, first + begin, code.min_signed(n - begin, size)
