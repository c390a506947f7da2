"""Loops over rows of any length: whole vectors of 16 elements, then a masked rest."""

from __future__ import annotations

from collections.abc import Callable

from engine.backends.cpu.kernels.language.values import FLOATS, LANES, Code, Value


class SimdLanes:
    """The lanes of one step of a loop: 16 neighbouring elements of rows, or the last few.

    Attributes:
        index: index of the first element.
        left: number of elements, None for 16.
    """

    def __init__(self, code: Code, index: Value, left: Value | None = None) -> None:
        self.code = code
        self.index = index
        self.left = left

    def load(self, row: Value) -> Value:
        """Load floats of the row at an address, zeros beyond its end."""
        address = row + self.index * 4
        if self.left is None:
            return self.code.load(address, FLOATS)
        return self.code.load_part(address, FLOATS, self.left)

    def doubled(self) -> tuple[SimdLanes, SimdLanes]:
        """Return the two steps for a row with twice as many elements."""
        index, left = self.index * 2, self.left
        if left is None:
            return SimdLanes(self.code, index), SimdLanes(self.code, index + LANES)
        first, second = left * 2, left * 2 - LANES
        return SimdLanes(self.code, index, first), SimdLanes(self.code, index + LANES, second)

    def store(self, value: Value, row: Value) -> None:
        """Store floats in the row at an address, none beyond its end."""
        address = row + self.index * 4
        if self.left is None:
            self.code.store(value, address)
        else:
            self.code.store_part(value, address, self.left)

    def only(self, value: Value) -> Value:
        """Return a vector with zeros in the lanes beyond the rows' end."""
        if self.left is None:
            return value
        nothing = self.code.constant(value.kind, 0)
        return self.code.where(self.code.lane_mask(self.left), value, nothing)


def for_each_vector(
    code: Code, n: Value, body: Callable[[SimdLanes], None], start: Value | None = None
) -> None:
    """Write a loop over n elements; `start`, a multiple of 16, is the first of them (default 0)."""
    whole = n - n % LANES
    with code.loop(code.number(0) if start is None else start, whole, LANES) as index:
        body(SimdLanes(code, index))
    with code.when(whole < n):
        body(SimdLanes(code, whole, n - whole))
