"""Tiles of query heads that are computed side by side: loops over them, and over their lanes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from engine.backends.cpu.kernels.language.values import Code, Value

Combine = Callable[[Value, Value], Value]


def for_heads(
    code: Code,
    tiles: Sequence[int],
    start: Value,
    stop: Value,
    body: Callable[[int, Value], object],
) -> None:
    """Write a loop over heads start … stop - 1, in the largest tiles that they fill.

    Args:
        tiles: sizes of tiles: a power of two and all smaller ones, largest first.
    """
    most, *fewer = tiles
    n = stop - start
    with code.loop(start, stop - n % most, most) as head:
        body(most, head)
    for size in fewer:
        with code.when((n & size) > 0):
            body(size, stop - n % (2 * size))


def sums_of(vectors: Sequence[Value], combine: Combine = operator.add) -> Value:
    """Return the sum over the lanes of each of 1, 2, 4, … vectors, each in the same order.

    Args:
        combine: what adds two vectors; another operation takes its place.
    """
    n_groups = 1
    while len(vectors) > 1:
        vectors = [
            _folded(combine, a, b, n_groups)
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        n_groups *= 2
    (total,) = vectors
    while total.kind.count > n_groups:
        total = _folded(combine, total, None, n_groups)
    return total


def _folded(combine: Combine, a: Value, b: Value | None, n_groups: int) -> Value:
    """Add the two halves of each group of lanes; the results of b follow those of a."""
    n = a.kind.count
    size = n // n_groups
    starts = range(0, n if b is None else 2 * n, size)
    low, high = (
        [start + lane for start in starts for lane in part]
        for part in (range(size // 2), range(size // 2, size))
    )
    return combine(a.shuffle(low, b), a.shuffle(high, b))
