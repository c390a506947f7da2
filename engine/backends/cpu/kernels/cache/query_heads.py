"""How the work of attention in a layer is cut into tiles of rows and query heads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.backends.cpu.kernels.cache.attention_page import (
    DIRECT_HEADS,
    result_bytes,
    scratch_bytes,
)
from engine.model.forward.pages import PAGE
from engine.model.forward.state import (
    ATTENTION_HEADS,
    ATTENTION_RESULTS_BYTES,
    ATTENTION_TILE_BYTES,
)

if TYPE_CHECKING:
    from engine.backends.cpu.kernels.cache.cache_tensor import CacheTensor
    from engine.backends.cpu.kernels.cache.pass_rows import PassRows

DECODED_FROM = 12
"""Smallest number of rows times heads of a tile for which blocks are decoded into scratch."""

LEAST_HEADS = 8
"""Smallest number of rows times heads for which a tile has memory."""

TILE_HEADS = 256
"""Largest number of rows times heads of a tile with several rows."""

ITEMS_PER_THREAD = 4
"""Number of tiles for each thread from which on threads are kept busy by whole tiles."""


class Tiling(NamedTuple):
    """The cut of a pass into tiles.

    Attributes:
        layer: address of `attention.LAYER`.
        arguments: arguments of the kernel, from `tile_rows` to `n_results`.
        n_bytes: scratch memory of the call.
    """

    layer: int
    arguments: tuple[int, ...]
    n_bytes: int


class QueryGroups:
    """The query heads of a layer, in groups that share a key-value head.

    Args:
        rows: index of the key-value head of each query head.
        most: largest number of heads of a group.

    Attributes:
        layer: address of `attention.LAYER`.
        n: number of groups.
        largest: largest number of heads of a group.
    """

    def __init__(self, k: CacheTensor, v: CacheTensor, rows: Sequence[int], most: int) -> None:
        groups = _groups(rows, most)
        self._groups = np.array(groups, np.int64)
        self.n, self.largest = len(groups), max(n for _, _, n in groups)
        places = (k.address, k.stride, k.head_stride, v.address, v.stride, v.head_stride)
        self._layer = np.array(
            [*places, k.head_dim, v.head_dim, len(rows), self._groups.ctypes.data, self.n], np.int64
        )
        self.layer = self._layer.ctypes.data


def _groups(rows: Sequence[int], most: int) -> list[tuple[int, int, int]]:
    """Group adjacent query heads of one key-value head: that head, the first of them, how many."""
    groups: list[tuple[int, int, int]] = []
    head = 0
    for row, members in groupby(rows):
        stop = head + len(list(members))
        groups.extend((row, start, min(most, stop - start)) for start in range(head, stop, most))
        head = stop
    return groups


class QueryHeads:
    """The query heads of a layer, and the cut of passes over them.

    Args:
        k, v: keys and values.
        rows: index of the key-value head of each query head.
    """

    def __init__(self, k: CacheTensor, v: CacheTensor, rows: Sequence[int]) -> None:
        self._n, self._n_slots = len(rows), k.n_slots
        self._dims = k.head_dim, v.head_dim
        self._direct, self._decoded = (
            QueryGroups(k, v, rows, most) for most in (DIRECT_HEADS, ATTENTION_HEADS)
        )
        self._tilings: dict[tuple[int, int, int, int], Tiling] = {}

    def tiling(self, rows: PassRows, n_threads: int) -> Tiling:
        """Return the cut of a pass for so many threads."""
        key = rows.n_rows, rows.n_first, rows.n_pages, n_threads
        found = self._tilings.get(key)
        if found is None:
            found = self._cut(*key)
            if not rows.n_pages:
                self._tilings[key] = found
        return found

    def _cut(self, n_rows: int, n_first: int, n_pages: int, n_threads: int) -> Tiling:
        """Return a cut.

        Args:
            n_pages: number of pages of the longest sequence; 0 for as many as there are.
        """
        groups = self._decoded
        is_direct = n_first * groups.largest < DECODED_FROM
        tile_rows = 1
        if is_direct:
            groups = self._direct
        else:
            tile_rows = self._tile_rows(n_first, n_threads)
        tile_heads = max(LEAST_HEADS, tile_rows * groups.largest)
        scratch = scratch_bytes(tile_heads, *self._dims)
        n_tiles = -(-n_first // tile_rows) + n_rows - n_first
        per_result = result_bytes(self._dims[1])
        n_results = n_rows * self._n * (n_pages or -(-self._n_slots // PAGE))
        is_whole = n_tiles * groups.n >= ITEMS_PER_THREAD * n_threads
        if n_pages and (is_whole or n_results * per_result > ATTENTION_RESULTS_BYTES):
            n_results = 0
        n_results = min(n_results, ATTENTION_RESULTS_BYTES // per_result)
        n_result_bytes = ATTENTION_RESULTS_BYTES if not n_pages else n_results * per_result
        arguments = tile_rows, tile_heads, int(is_direct), n_threads, scratch, n_results
        return Tiling(groups.layer, arguments, n_threads * scratch + n_result_bytes)

    def _tile_rows(self, n_first: int, n_threads: int) -> int:
        """Return the number of rows of a tile where blocks are decoded."""
        groups = self._decoded
        per_head = scratch_bytes(1, *self._dims) - scratch_bytes(0, *self._dims)
        most = min(TILE_HEADS, ATTENTION_TILE_BYTES // per_head)
        n = max(1, min(n_first, most // groups.largest))
        while n * groups.largest > ATTENTION_HEADS and (
            -(-n_first // n) * groups.n < ITEMS_PER_THREAD * n_threads
        ):
            n = -(-n // 2)
        return n
