"""Grouped GEMM for mixtures of experts: each row times its expert's matrix, all in one job.

Rows are sorted into groups, one per expert in use (`forward.expert_rows.Groups`). Each group is
packed into its own panels, at the offset of its first row, so each row's result has the same bits
as in `kernels.products.quantised_gemm`. The weights of experts that have no rows are not read.

    table = groups.table.data_ptr(), len(groups.table)
    quantise_groups(pool, x, x_stride, n_blocks, skip, panels, pairs, n_used, *table)
    multiply_groups(pool, planes, expert_bytes, tile_bytes, n_blocks, skip, panels, row_bytes,
                    out, out_stride, n_rows, n_tile, tiles_per_piece, tokens_per_pass, *table)

x is (n_row, 32 × n_blocks), F32, with rows `x_stride` bytes apart, and `pairs` is 0; or x has one
row per token, and `pairs` is the address of `groups.pair_of`, with `n_used` experts per token.
`panels` is the address of `quantised_bytes(n_row, n_blocks, x_bytes)` bytes; out is (n_row, n_rows)
F32, with rows `out_stride` bytes apart; `row_bytes` is `quantised_bytes(1, n_blocks, x_bytes)`.
If all groups have the same single row (one token and its experts), `quantise` packs only this row,
and `row_bytes` is 0.

`build_ffn` fuses the experts' FFNs for prompts: a piece computes all products for some of an
expert's rows, so that intermediate results stay in a core's cache. Each token is packed once and
copied for its experts. As rows are independent, the bits are the same as with separate products.
"""

from __future__ import annotations

from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.loops import Named, add_kernel, ceil_div, piece
from engine.backends.cpu.kernels.language.values import (
    I32,
    I64,
    VOID,
    Code,
    Value,
    internal,
    vector,
)
from engine.backends.cpu.kernels.products import panels
from engine.backends.cpu.kernels.products.gemm import add_rows, row_count
from engine.backends.cpu.kernels.products.panel_packing import add_pack_tokens, format_of
from engine.backends.cpu.kernels.products.quantised_gemm import operands
from engine.backends.cpu.kernels.running.thread_pool import add_run, store
from engine.backends.cpu.kernels.small.activation import COLUMNS
from engine.formats.quants.layout import TILE, Layout, panel_block_bytes

ENTRY_BYTES = 24
"""Size in bytes of a group's table entry: expert, first row and number of rows, 64-bit each."""

QUANTISE = (
    "x", "x_stride", "n_blocks", "skip", "panels", "pairs", "n_used", "table", "n_group",
)  # fmt: skip
"""Arguments of `quantise_groups`."""

MULTIPLY = (
    "planes", "expert_bytes", "tile_bytes", "n_blocks", "skip", "panels", "row_bytes", "out",
    "out_stride", "n_rows", "n_tile", "tiles_per_piece", "tokens_per_pass", "table", "n_group",
)  # fmt: skip
"""Arguments of `multiply_groups`. The experts' planes are `expert_bytes` apart. A piece is
`tiles_per_piece` tiles of one expert times up to `tokens_per_pass` of its rows (a multiple of
`Isa.tile_tokens`), whose panels fit in a core's cache."""


def build_quantise(module: ir.Module, isa: Isa, x_bytes: int = 1) -> None:
    """Emit `quantise_groups(pool, *QUANTISE)`."""
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
    """Emit `multiply_groups(pool, *MULTIPLY)` for matrices of one layout.

    Each thread starts with a share of adjacent experts, so that it reads their weights in order.
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
    """Return the number of parts in all groups, if a part has at most `size` rows."""
    total = code.variable(code.number(0))
    with code.loop(code.number(0), given["n_group"]) as group:
        n = code.load(given["table"] + group * ENTRY_BYTES + 16, I64)
        total.set(total.get() + ceil_div(n, size))
    return total.get()


def _part(
    code: Code, given: Named, size: Value, number: Value, unit: int = 0
) -> tuple[Value, Value, Value]:
    """Given a part's index, return its expert, first row and number of rows.

    Args:
        size: largest number of rows in a part.
        unit: if not 0, an expert's parts have roughly equal sizes, multiples of this.
    """
    left, entry = code.variable(number), code.variable(given["table"])
    with code.forever() as leave:
        n_parts = ceil_div(code.load(entry.get() + 16, I64), size)
        leave(left.get() < n_parts)
        left.set(left.get() - n_parts)
        entry.set(entry.get() + ENTRY_BYTES)
    expert, first, n = code.load_array(entry.get(), 3)
    if unit:
        size = ceil_div(ceil_div(n, ceil_div(n, size)), unit) * unit
    begin = left.get() * size
    return expert, first + begin, code.min_signed(n - begin, size)


FFN_NAMES = ("pack_each", "feed")

PRODUCT = (
    "task", "planes", "expert_bytes", "tile_bytes", "n_blocks", "skip", "n_rows", "n_tile",
)  # fmt: skip
"""A product's entry, in 64-bit integers: address of its piece function, then as in `MULTIPLY`."""

PRODUCT_BYTES = 8 * len(PRODUCT)
"""Size of such an entry, in bytes."""

FFN_ARGUMENTS = (
    "tokens", "pairs", "n_used", "products", "activation", "limit", "table", "n_group",
    "most_rows", "places", "place_bytes", "locks", "n_place", "out",
)  # fmt: skip
"""Arguments of `feed`. tokens: single-token panels from `pack_each`; pairs: see above. products:
address of the entries for gate, up and down. activation: address of a kernel in `small.activation`,
with its limit. A piece has up to `most_rows` rows of one expert, a multiple of `Isa.tile_tokens`. A
thread uses one of `n_place` buffers of `place_bytes`; their locks are 64-bit integers `LOCK_BYTES`
apart, 0 if free. out is F32, (n_row, rows of down), contiguous."""

LOCK_BYTES = 64
"""Bytes between locks: a cache line."""


def place_bytes(most_rows: int, n_blocks: tuple[int, int], n_ff: int, x_bytes: int) -> int:
    """Return the size of a piece's buffer: panels, the results of gate and up, and their panels.

    Args:
        n_blocks: column blocks in gate (and up), and in down.
        n_ff: number of rows in gate, and in up.
    """
    return most_rows * (sum(n_blocks) * panel_block_bytes(x_bytes) + 8 * n_ff)


def build_ffn(module: ir.Module, isa: Isa, x_bytes: int) -> None:
    """Emit `pack_each(pool, *panels.ARGUMENTS)` and `feed(pool, *FFN_ARGUMENTS)`."""
    add_run(module)
    add_pack_tokens(module, isa, format_of(isa, x_bytes))
    _add_copy_row(module, isa, x_bytes)
    _add_fill(module, isa, x_bytes)
    _add_take_place(module)
    with piece(module, "pack_each", panels.ARGUMENTS) as (code, given, index):
        row, one, none = given["x"] + index * given["x_stride"], code.number(1), code.number(0)
        n_blocks, skip = given["n_blocks"], given["skip"]
        goal = given["panels"] + index * n_blocks * panel_block_bytes(x_bytes)
        code.call("pack_token", VOID, row, n_blocks, skip, goal, one, none, none, n_blocks)
    add_kernel(module, "pack_each", panels.ARGUMENTS, lambda _, given: given["n_tokens"])
    with piece(module, "feed", FFN_ARGUMENTS) as (code, given, index):
        _emit_piece(code, isa, x_bytes, given, index)
    add_kernel(
        module, "feed", FFN_ARGUMENTS, lambda code, given: n_parts(code, given, given["most_rows"]),
        in_shares=True,
    )  # fmt: skip


def _emit_piece(code: Code, isa: Isa, x_bytes: int, given: Named, index: Value) -> None:
    expert, first, n = _part(code, given, given["most_rows"], index, isa.tile_tokens)
    gate, up, down = (_product(code, given["products"] + at * PRODUCT_BYTES) for at in range(3))
    block_bytes, n_ff = panel_block_bytes(x_bytes), gate["n_rows"]
    number = code.call("take_place", I64, given["locks"], given["n_place"])
    rows = given["places"] + number * given["place_bytes"]
    gates = rows + n * gate["n_blocks"] * block_bytes
    ups, hidden = gates + n * n_ff * 4, gates + n * n_ff * 8
    code.call(
        "fill", VOID, given["tokens"], given["pairs"] + first * 8, given["n_used"], n,
        gate["n_blocks"], rows,
    )  # fmt: skip
    _multiply(code, gate, expert, rows, n, gates)
    _multiply(code, up, expert, rows, n, ups)
    with code.loop(code.number(0), n * n_ff, COLUMNS) as begin:
        count = code.min_signed(n * n_ff - begin, code.number(COLUMNS))
        goal, none = gates + begin * 4, code.number(0)
        code.call_at(
            given["activation"], VOID, none, goal, none, ups + begin * 4, none, code.number(1),
            count, given["limit"], goal,
        )  # fmt: skip
    with code.loop(code.number(0), n, isa.tile_tokens) as begin:
        count = code.min_signed(n - begin, code.number(isa.tile_tokens))
        none, one = code.number(0), code.number(1)
        code.call(
            "pack_tokens", VOID, gates + begin * n_ff * 4, n_ff * 4, count, down["n_blocks"],
            down["skip"], hidden + begin * down["n_blocks"] * block_bytes, none, one, none, one,
        )  # fmt: skip
    _multiply(code, down, expert, hidden, n, given["out"] + first * down["n_rows"] * 4)
    store(code, code.number(0), given["locks"] + number * LOCK_BYTES)


def _product(code: Code, entry: Value) -> Named:
    return dict(zip(PRODUCT, code.load_array(entry, len(PRODUCT)), strict=True))


def _multiply(code: Code, product: Named, expert: Value, rows: Value, n: Value, out: Value) -> None:
    n_tile = product["n_tile"]
    arguments = [
        product["planes"] + expert * product["expert_bytes"], product["tile_bytes"],
        product["n_blocks"], product["skip"], rows, n, out, product["n_rows"] * 4,
        product["n_rows"], n_tile, n_tile, n,
    ]  # fmt: skip
    code.call_at(product["task"], VOID, code.stack_array(arguments), code.number(0))


def _add_take_place(module: ir.Module) -> None:
    """Emit `take_place(locks, n)`: locks a free buffer and returns its index.

    One is always free, as each thread uses only one buffer at a time.
    """
    code, (locks, n) = internal(module, "take_place", 2, I64)
    number = code.variable(code.number(0))
    with code.forever() as leave:
        address = locks + number.get() * LOCK_BYTES
        place = code.builder.inttoptr(address.raw, I64.as_pointer())
        free, taken = code.number(0).raw, code.number(1).raw
        found = code.builder.cmpxchg(place, free, taken, "seq_cst", "seq_cst")
        leave(Value(code, code.builder.extract_value(found, 1)))
        number.set((number.get() + 1) % n)
    code.builder.ret(number.get().raw)


def _add_fill(module: ir.Module, isa: Isa, x_bytes: int) -> None:
    """Emit `fill(tokens, pairs, n_used, n, n_blocks, goal)`: panels of n rows.

    Row i is a copy of token `pairs[i] / n_used`.
    """
    code, (tokens, pairs, n_used, n, n_blocks, goal) = internal(module, "fill", 6)
    row_bytes = n_blocks * panel_block_bytes(x_bytes)

    def copy(first: Value, size: int) -> None:
        with code.loop(code.number(0), code.number(size)) as t:
            token = code.load(pairs + (first + t) * 8, I64) // n_used
            place = tokens + token * row_bytes
            code.call(
                "copy_row", VOID, place, n_blocks, goal + first * row_bytes, code.number(size), t
            )

    size = isa.tile_tokens
    done = code.variable(n // size * size)
    with code.loop(code.number(0), done.get(), size) as first:
        copy(first, size)
    while size := size // 2:
        with code.when((n & size) > 0):
            copy(done.get(), size)
            done.set(done.get() + size)
    code.builder.ret_void()


def _add_copy_row(module: ir.Module, isa: Isa, x_bytes: int) -> None:
    """Emit `copy_row(token, n_blocks, panel, n, t)`: copies a token to token t in a panel of n."""
    code, (token, n_blocks, panel, n, t) = internal(module, "copy_row", 5)
    block_bytes = panel_block_bytes(x_bytes)
    with code.loop(code.number(0), n_blocks) as block:
        here, goal, begin = token + block * block_bytes, panel + block * n * block_bytes, 0
        for size in format_of(isa, x_bytes).token_bytes:
            kind = I32 if size == 4 else vector(I32, size // 4)
            code.store(code.load(here + begin, kind), goal + n * begin + t * size)
            begin += size
    code.builder.ret_void()
