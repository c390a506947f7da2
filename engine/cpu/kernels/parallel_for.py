"""How a kernel is cut into pieces: functions that each do one, and one that has them all done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from llvmlite import ir

from engine.cpu.kernels.values import VOID, Code, Value, function

PIECE_ELEMENTS = 16384
"""What one thread does alone in less time than it takes to share."""

Named = Mapping[str, Value]


@contextmanager
def piece(
    module: ir.Module, name: str, arguments: Sequence[str]
) -> Iterator[tuple[Code, Named, Value]]:
    """Begin `name_piece(list, index)`: its code, the arguments by name, and which piece it does."""
    code, (place, index) = function(module, f"{name}_piece", 2)
    named = dict(zip(arguments, code.listed(place, len(arguments)), strict=True))
    yield code, named, index
    code.builder.ret_void()


def add_kernel(
    module: ir.Module, name: str, arguments: Sequence[str], n_pieces: Callable[[Code, Named], Value]
) -> None:
    """`name(team, *arguments)` does all pieces; a single one without the team.

    The module has `add_run` and the pieces already.
    """
    code, (team, *values) = function(module, name, 1 + len(arguments))
    place = code.kept(values)
    n = n_pieces(code, dict(zip(arguments, values, strict=True)))
    share(code, name, team, place, n)
    code.builder.ret_void()


def share(code: Code, name: str, team: Value, place: Value, n: Value) -> None:
    """Have n pieces done."""
    task = f"{name}_piece"
    with code.when(n.equals(1)):
        code.call(task, VOID, place, code.number(0))
    with code.when(n > 1):
        code.call("run", VOID, team, code.address(task), place, n)


def rows_per_piece(code: Code, elements: Value) -> Value:
    """How many rows of so many elements make a piece."""
    return code.number(PIECE_ELEMENTS) // (elements + 1) + 1


def ceil_div(a: Value, b: Value | int) -> Value:
    """a / b, rounded up."""
    return (a + b - 1) // b
