"""Packs a matrix's rows straight from a file, and reads parts of a file.

Each thread takes the next few tiles, reads their rows into a buffer that fits in its cache, and
packs them. So reading and packing overlap, in file order, and the thread that fills a memory page
of the planes is the first to touch it.
"""

from __future__ import annotations

from llvmlite import ir

from engine.backends.cpu.kernels.language.isa import Isa
from engine.backends.cpu.kernels.language.loops import Named, add_kernel, ceil_div, piece
from engine.backends.cpu.kernels.language.values import I64, VOID, Code, Value, internal
from engine.backends.cpu.kernels.packing import pack
from engine.backends.cpu.kernels.running.thread_pool import add_run
from engine.formats.quants.layout import TILE

ARGUMENTS = (
    "read", "descriptor", "offset", "file_stride", "row_bytes", "rows_per_read", "buffers",
    "buffer_bytes", "buffer_stride", "progress", "tiles_per_turn", "tiles_per_read", "n_threads",
    "n_rows", "goal_row", "first", "n_blocks", "planes", "tile_bytes",
)  # fmt: skip
"""Arguments of `pack_file`. `read`: address of POSIX's pread; `descriptor`: the file descriptor.
The first row's `row_bytes` start at `offset`; the other rows follow at intervals of `file_stride`.
Each of `n_threads` threads has `buffer_bytes` at `buffers`, with rows `buffer_stride` apart; a read
covers up to `rows_per_read` rows, including the gaps between them. A thread takes `tiles_per_turn`
tiles at a time and reads `tiles_per_read` of them at a time. `progress`: two 64-bit words,
initially 0: the number of turns taken, and 1 after a failed read, which stops the work. For the
others, see `kernels.packing.pack`."""

READ_ARGUMENTS = ("read", "descriptor", "offset", "goal", "n_bytes", "page_bytes", "failed")
"""Arguments of `read_file`. `read`: address of POSIX's pread; `descriptor`: the file descriptor.
`n_bytes` starting at `offset` are read to `goal`. Pieces end at multiples of `page_bytes`, because
two threads that touch the same new page would both clear it. `failed`: a 64-bit word that is set to
1 if a read fails."""


TAKEN, FAILED = 0, 8
"""Byte offsets of the words at `progress`."""


def build(module: ir.Module, isa: Isa, type_number: int) -> None:
    """Emit `pack_file(pool, *ARGUMENTS)`, and `pack` as in `pack.build` or `pack.build_int16`."""
    if type_number in pack.INT16_KINDS:
        pack.build_int16(module, isa, type_number)
    else:
        pack.build(module, type_number)
    _add_fill(module)
    with piece(module, "pack_file", ARGUMENTS) as (code, given, index):
        _emit_turns(code, given, given["buffers"] + index * given["buffer_bytes"])
    add_kernel(module, "pack_file", ARGUMENTS, lambda _, given: given["n_threads"])


def _emit_turns(code: Code, given: Named, buffer: Value) -> None:
    n_tiles = ceil_div(given["goal_row"] % TILE + given["n_rows"], TILE)
    per_turn, per_read = given["tiles_per_turn"], given["tiles_per_read"]
    place = code.stack_array([given.get(name, buffer) for name in pack.ARGUMENTS])
    code.store(given["buffer_stride"], place + 8 * pack.ARGUMENTS.index("row_bytes"))
    with code.forever() as leave:
        failed = code.load(given["progress"] + FAILED, I64)
        first = _take(code, given["progress"] + TAKEN) * per_turn
        leave((first >= n_tiles) | (failed > 0))
        end = code.min_signed(first + per_turn, n_tiles)
        with code.loop(code.number(0), ceil_div(end - first, per_read)) as read:
            begin = first + read * per_read
            stop = code.min_signed(begin + per_read, end)
            _emit_read(code, given, buffer, place, begin, stop)
            with code.loop(begin, stop) as tile:
                code.call("pack_piece", VOID, place, tile)


def _take(code: Code, counter: Value) -> Value:
    place = code.builder.inttoptr(counter.raw, I64.as_pointer())
    return Value(code, code.builder.atomic_rmw("add", place, code.number(1).raw, "monotonic"))


def _emit_read(
    code: Code, given: Named, buffer: Value, place: Value, begin: Value, stop: Value
) -> None:
    """Emit the reads of the rows in tiles `begin` to `stop`, with a return if one fails."""
    before = given["goal_row"] % TILE  # rows in the first tile that are not packed here
    first = begin * TILE - before
    first = code.where(first < 0, code.number(0), first)
    n_rows = code.min_signed(stop * TILE - before, given["n_rows"]) - first
    code.store(buffer - first * given["buffer_stride"], place)
    per_read = given["rows_per_read"]
    with code.loop(code.number(0), ceil_div(n_rows, per_read)) as read:
        done = read * per_read
        n = code.min_signed(n_rows - done, per_read)
        n_bytes = (n - 1) * given["file_stride"] + given["row_bytes"]
        offset = given["offset"] + (first + done) * given["file_stride"]
        goal = buffer + done * given["buffer_stride"]
        left = code.call("fill", I64, given["read"], given["descriptor"], goal, n_bytes, offset)
        with code.when(left > 0):
            code.store(code.number(1), given["progress"] + FAILED)
            code.builder.ret_void()


def build_read(module: ir.Module) -> None:
    """Emit `read_file(pool, *READ_ARGUMENTS)`."""
    add_run(module)
    _add_fill(module)
    with piece(module, "read_file", READ_ARGUMENTS) as (code, given, index):
        page_bytes, n_bytes = given["page_bytes"], given["n_bytes"]
        begin = index * page_bytes - given["goal"] % page_bytes
        end = code.min_signed(begin + page_bytes, n_bytes)
        begin = code.where(begin < 0, code.number(0), begin)
        left = code.call(
            "fill", I64, given["read"], given["descriptor"], given["goal"] + begin, end - begin,
            given["offset"] + begin,
        )  # fmt: skip
        with code.when(left > 0):
            code.store(code.number(1), given["failed"])
    add_kernel(
        module, "read_file", READ_ARGUMENTS,
        lambda _, g: ceil_div(g["goal"] % g["page_bytes"] + g["n_bytes"], g["page_bytes"]),
    )  # fmt: skip


def _add_fill(module: ir.Module) -> None:
    """Emit `fill(read, descriptor, goal, n, offset)`: reads n bytes; returns the shortfall."""
    code, (read, descriptor, goal, n, offset) = internal(module, "fill", 5, I64)
    done = code.variable(code.number(0))
    with code.forever() as leave:
        so_far = done.get()
        leave(so_far >= n)
        got = code.call_at(read, I64, descriptor, goal + so_far, n - so_far, offset + so_far)
        leave(got <= 0)
        done.set(so_far + got)
    code.builder.ret((n - done.get()).raw)
