"""Loops over rows of any length: 16 elements at a time, then what is left."""

from __future__ import annotations

from collections.abc import Callable

from engine.cpu.kernels.values import FLOATS, LANES, Code, Value


class SimdLanes:
    """16 neighbouring elements of rows, or the last few.

    Attributes:
        index: of the first one.
        left: how many there are, if not 16.
    """

    def __init__(self, code: Code, index: Value, left: Value | None = None) -> None:
        self.code = code
        self.index = index
        self.left = left

    def load(self, row: Value) -> Value:
        """Floats of the row at an address; zeros where it has ended."""
        address = row + self.index * 4
        if self.left is None:
            return self.code.load(address, FLOATS)
        return self.code.load_part(address, FLOATS, self.left)

    def doubled(self) -> tuple[SimdLanes, SimdLanes]:
        """The same of rows that have two neighbours for each element here."""
        index, left = self.index * 2, self.left
        if left is None:
            return SimdLanes(self.code, index), SimdLanes(self.code, index + LANES)
        first, second = left * 2, left * 2 - LANES
        return SimdLanes(self.code, index, first), SimdLanes(self.code, index + LANES, second)

    def store(self, value: Value, row: Value) -> None:
        """Write floats to the row at an address."""
        address = row + self.index * 4
        if self.left is None:
            self.code.store(value, address)
        else:
            self.code.store_part(value, address, self.left)

    def only(self, value: Value) -> Value:
        """The same with zeros where the rows have ended."""
        if self.left is None:
            return value
        nothing = self.code.constant(value.kind, 0)
        return self.code.where(self.code.first(self.left), value, nothing)


def for_each_vector(
    code: Code, n: Value, body: Callable[[SimdLanes], None], start: Value | None = None
) -> None:
    """Write a loop over n elements, from the multiple `start` of 16 on."""
    whole = n - n % LANES
    with code.loop(code.number(0) if start is None else start, whole, LANES) as index:
        body(SimdLanes(code, index))
    with code.when(whole < n):
        body(SimdLanes(code, whole, n - whole))
