"""Parallel loops: a kernel is split into pieces, which a pool's threads take one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from llvmlite import ir

from engine.backends.cpu.kernels.language.values import FLOATS, LANES, VOID, Code, Value, function

PIECE_ELEMENTS = 16384
"""Elements per piece of simple arithmetic; smaller pieces would cost more than they save."""

Named = Mapping[str, Value]
"""A kernel's arguments by name."""


@contextmanager
def piece(
    module: ir.Module, name: str, arguments: Sequence[str]
) -> Iterator[tuple[Code, Named, Value]]:
    """Start `name_piece(arguments, index)`; yield its code, the arguments and the piece's index."""
    code, (place, index) = function(module, f"{name}_piece", 2)
    named = dict(zip(arguments, code.load_array(place, len(arguments)), strict=True))
    yield code, named, index
    code.builder.ret_void()


def add_kernel(
    module: ir.Module, name: str, arguments: Sequence[str],
    n_pieces: Callable[[Code, Named], Value], *, in_shares: bool = False,
) -> None:  # fmt: skip
    """Emit `name(pool, *arguments)`: runs a kernel's pieces; a single piece bypasses the pool.

    `add_run` and the piece function must already be in the module.

    Args:
        in_shares: whether each thread starts with a share of adjacent pieces.
    """
    code, (pool, *values) = function(module, name, 1 + len(arguments))
    place = code.stack_array(values)
    n = n_pieces(code, dict(zip(arguments, values, strict=True)))
    share(code, name, pool, place, n, "run_in_shares" if in_shares else "run")
    code.builder.ret_void()


def add_row_kernel(
    module: ir.Module, name: str, arguments: Sequence[str],
    row_elements: Callable[[Named], Value], emit: Callable[[Code, Named, Value], None],
    n_rows: str = "n_tokens",
) -> None:  # fmt: skip
    """Emit `name(pool, *arguments)` for independent rows.

    Args:
        row_elements: returns the number of elements per row.
        emit: emits the work for a row, given its index.
        n_rows: name of the argument with the number of rows.
    """

    def n_pieces(code: Code, given: Named) -> Value:
        return ceil_div(given[n_rows], rows_per_piece(code, row_elements(given)))

    with piece(module, name, arguments) as (code, given, index):
        per_piece = rows_per_piece(code, row_elements(given))
        stop = code.min_signed((index + 1) * per_piece, given[n_rows])
        with code.loop(index * per_piece, stop) as row:
            emit(code, given, row)
    add_kernel(module, name, arguments, n_pieces)


def share(code: Code, name: str, pool: Value, place: Value, n: Value, run: str = "run") -> None:
    """Emit the call that runs n pieces, using a function from `add_run`.

    Args:
        place: address of the arguments.
    """
    task = f"{name}_piece"
    with code.when(n.equals(1)):
        code.call(task, VOID, place, code.number(0))
    with code.when(n > 1):
        code.call(run, VOID, pool, code.function_address(task), place, n)


def rows_per_piece(code: Code, elements: Value) -> Value:
    """Return the number of rows per piece, for rows with `elements` elements."""
    return code.number(PIECE_ELEMENTS) // (elements + 1) + 1


def ceil_div(a: Value, b: Value | int) -> Value:
    """Return a / b, rounded up."""
    return (a + b - 1) // b


class SimdLanes:
    """One step in a loop over rows: 16 adjacent elements, or however many remain.

    Attributes:
        index: index of the first element.
        left: number of elements; None for 16.
    """

    def __init__(self, code: Code, index: Value, left: Value | None = None) -> None:
        self.code = code
        self.index = index
        self.left = left

    def load(self, row: Value) -> Value:
        """Load floats from the row at an address, with zeros past its end."""
        address = row + self.index * 4
        if self.left is None:
            return self.code.load(address, FLOATS)
        return self.code.load_part(address, FLOATS, self.left)

    def doubled(self) -> tuple[SimdLanes, SimdLanes]:
        """Return the two corresponding steps in a row with twice as many elements."""
        index, left = self.index * 2, self.left
        if left is None:
            return SimdLanes(self.code, index), SimdLanes(self.code, index + LANES)
        first, second = left * 2, left * 2 - LANES
        return SimdLanes(self.code, index, first), SimdLanes(self.code, index + LANES, second)

    def store(self, value: Value, row: Value) -> None:
        """Store floats in the row at an address, up to the row's end."""
        address = row + self.index * 4
        if self.left is None:
            self.code.store(value, address)
        else:
            self.code.store_part(value, address, self.left)

    def only(self, value: Value) -> Value:
        """Return a vector with zeros in the lanes past the end of the row."""
        if self.left is None:
            return value
        nothing = self.code.constant(value.kind, 0)
        return self.code.where(self.code.lane_mask(self.left), value, nothing)


def for_each_vector(
    code: Code, n: Value, body: Callable[[SimdLanes], None], start: Value | None = None
) -> None:
    """Emit a loop over elements `start` (a multiple of 16, default 0) to n - 1."""
    whole = n - n % LANES
    with code.loop(code.number(0) if start is None else start, whole, LANES) as index:
        body(SimdLanes(code, index))
    with code.when(whole < n):
        body(SimdLanes(code, whole, n - whole))
