"""Splits a layer's attention into tiles of rows and query heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from sys import maxsize
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.backends.cpu.kernels.cache.attention_page import (
    DIRECT_HEADS,
    result_bytes,
    scratch_bytes,
)
from engine.model.forward.batch import MAX_AT_ONCE
from engine.model.forward.pages import PAGE
from engine.model.forward.state import (
    ATTENTION_HEADS,
    ATTENTION_RESULTS_BYTES,
    ATTENTION_TILE_BYTES,
)

if TYPE_CHECKING:
    from engine.backends.cpu.kernels.cache.cache_codec import CacheTensor
    from engine.model.forward.batch import Batch
    from engine.model.forward.operands import Scores

MAX_POSITIONS = 1 << 31
"""A position that no sequence reaches."""

Numbers = NDArray[np.int64]


class PassRows:
    """Memory for the rows in passes with the same number of rows.

    Attributes:
        n_rows: number of rows.
        n_first: number of leading rows that are consecutive tokens of one sequence.
        positions: address of the rows' positions, 64-bit integers.
        n_pages: number of pages in the longest sequence; 0 in a pass that may be recorded.
        n_seen: sum of the rows' context lengths.
    """

    def __init__(self, n_rows: int) -> None:
        self.n_rows = n_rows
        self._positions = np.zeros(n_rows, np.int64)
        self.positions = self._positions.ctypes.data
        self._batch: Batch | None = None
        self._firsts: dict[tuple[int, int, int], tuple[Scores, Numbers]] = {}
        self._tables: dict[int, GroupTables] = {}
        self._words: dict[tuple[int, int, int, int], Numbers] = {}
        self.n_first = 1
        self.n_seen = self.n_pages = 0

    def set(self, batch: Batch) -> None:
        """Write a batch's rows, of which there must be `n_rows`."""
        self._batch = batch
        self.n_first = batch.pieces[0].n
        is_single = batch.is_of_singles and self.n_rows <= MAX_AT_ONCE
        self.n_pages = 0 if is_single else max(-(-piece.stop // PAGE) for piece in batch.pieces)
        self.n_seen = sum(piece.n * piece.stop for piece in batch.pieces)
        _fill(self._positions, batch, lambda position: position)
        for scores, firsts in self._firsts.values():
            _fill(firsts, batch, scores.first_visible)
        for tables in self._tables.values():
            tables.set(batch)
        for words in self._words.values():
            words[-1] = self.n_first

    def tables(self, group: int) -> GroupTables:
        """Return the page tables for a group of layers."""
        found = self._tables.get(group)
        if found is None:
            assert self._batch is not None
            found = self._tables[group] = GroupTables(group, self.n_rows)
            found.set(self._batch)
        return found

    def words(self, scores: Scores, group: int) -> int:
        """Return the address of `attention.ROWS` for the layers in a group that use this window."""
        key = scores.window, scores.chunk, scores.first, group
        words = self._words.get(key)
        if words is None:
            tables = self.tables(group)
            firsts = self._first_visible(scores)
            numbers = (self.positions, firsts.ctypes.data, tables.address, self.n_rows)
            words = self._words[key] = np.array([*numbers, self.n_first], np.int64)
        return words.ctypes.data

    def _first_visible(self, scores: Scores) -> Numbers:
        key = scores.window, scores.chunk, scores.first
        if key not in self._firsts:
            assert self._batch is not None
            firsts = np.zeros(self.n_rows, np.int64)
            _fill(firsts, self._batch, scores.first_visible)
            self._firsts[key] = scores, firsts
        return self._firsts[key][1]


class GroupTables:
    """For each row, the address of its sequence's page table in one group of layers.

    Attributes:
        address: address of these addresses.
        n_slots: minimum number of slots in a layer's cache.
    """

    def __init__(self, group: int, n_rows: int) -> None:
        self._group = group
        self._rows = np.zeros(n_rows, np.int64)
        self.address = self._rows.ctypes.data
        self.n_slots = 0
        self._held: list[_Table] = []

    def set(self, batch: Batch) -> None:
        while len(self._held) < len(batch.pieces):
            self._held.append(_Table())
        self.n_slots = row = 0
        for piece, held in zip(batch.pieces, self._held, strict=False):
            is_sane = 0 <= piece.n_past < MAX_POSITIONS
            pages = piece.tables[self._group] if piece.tables else None
            n_slots = held.set(pages, piece.stop) if is_sane else maxsize
            self.n_slots = max(self.n_slots, n_slots)
            self._rows[row : row + piece.n] = held.address
            row += piece.n


class _Table:
    """One sequence's page table: 64-bit integers at `address`, rewritten only when they change."""

    def __init__(self) -> None:
        self.address = 0
        self._pages: tuple[int, ...] | None = None
        self._numbers = np.zeros(0, np.int64)
        self._n_slots = 0

    def set(self, pages: Sequence[int] | None, stop: int) -> int:
        """Set the pages of a sequence with `stop` tokens; return how many slots it needs.

        Args:
            pages: page indices; None for 0, 1, 2, …
        """
        if pages is None:
            n_pages = -(-stop // PAGE)
            if self._pages is not None or len(self._numbers) < n_pages:
                self._pages = None
                self._numbers = np.arange(2 * n_pages, dtype=np.int64)
                self.address = self._numbers.ctypes.data
            return stop
        found = tuple(pages)
        if len(found) * PAGE < stop:
            return maxsize
        if found != self._pages:
            self._pages, self._numbers = found, np.array(found, np.int64)
            self.address = self._numbers.ctypes.data
            self._n_slots = (max(found) + 1) * PAGE
        return self._n_slots


def _fill(numbers: Numbers, batch: Batch, of_position: Callable[[int], int]) -> None:
    row = 0
    for piece in batch.pieces:
        if piece.n == 1:
            numbers[row] = of_position(piece.n_past)
        else:
            found = [of_position(position) for position in range(piece.n_past, piece.stop)]
            numbers[row : row + piece.n] = found
        row += piece.n


DECODED_FROM = 12
"""Minimum size, in rows times heads, of a tile that decodes blocks into scratch memory."""

MIN_HEADS = 8
"""Minimum capacity of a tile, in rows times heads."""

TILE_HEADS = 256
"""Maximum size, in rows times heads, of a tile with several rows."""

ITEMS_PER_THREAD = 4
"""Minimum number of tiles per thread for which whole tiles keep all threads busy."""


class Tiling(NamedTuple):
    """How a pass is split into tiles.

    Attributes:
        layer: address of `attention.LAYER`.
        arguments: the kernel's arguments from `tile_rows` to `n_results`.
        n_bytes: size of the scratch memory for the call, in bytes.
    """

    layer: int
    arguments: tuple[int, ...]
    n_bytes: int


class QueryGroups:
    """A layer's query heads, in groups that share a key-value head.

    Args:
        rows: index of the key-value head for each query head.
        most: maximum heads per group.

    Attributes:
        layer: address of `attention.LAYER`.
        n: number of groups.
        largest: number of heads in the largest group.
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
    """Return groups of adjacent query heads: key-value head, first query head, number of heads."""
    groups: list[tuple[int, int, int]] = []
    head = 0
    for row, members in groupby(rows):
        stop = head + len(list(members))
        groups.extend((row, start, min(most, stop - start)) for start in range(head, stop, most))
        head = stop
    return groups


class QueryHeads:
    """A layer's query heads, and the tilings of passes.

    Args:
        k, v: keys and values.
        rows: index of the key-value head for each query head.
    """

    def __init__(self, k: CacheTensor, v: CacheTensor, rows: Sequence[int]) -> None:
        self._n, self._n_slots = len(rows), k.n_slots
        self._dims = k.head_dim, v.head_dim
        self._direct, self._decoded = (
            QueryGroups(k, v, rows, most) for most in (DIRECT_HEADS, ATTENTION_HEADS)
        )
        self._tilings: dict[tuple[int, int, int, int], Tiling] = {}

    def tiling(self, rows: PassRows, n_threads: int) -> Tiling:
        """Return a pass's tiling for `n_threads` threads."""
        key = rows.n_rows, rows.n_first, rows.n_pages, n_threads
        found = self._tilings.get(key)
        if found is None:
            found = self._cut(*key)
            if not rows.n_pages:
                self._tilings[key] = found
        return found

    def _cut(self, n_rows: int, n_first: int, n_pages: int, n_threads: int) -> Tiling:
        groups = self._decoded
        is_direct = n_first * groups.largest < DECODED_FROM
        tile_rows = 1
        if is_direct:
            groups = self._direct
        else:
            tile_rows = self._tile_rows(n_first, n_threads)
        tile_heads = max(MIN_HEADS, tile_rows * groups.largest)
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
        groups = self._decoded
        per_head = scratch_bytes(1, *self._dims) - scratch_bytes(0, *self._dims)
        most = min(TILE_HEADS, ATTENTION_TILE_BYTES // per_head)
        n = max(1, min(n_first, most // groups.largest))
        while n * groups.largest > ATTENTION_HEADS and (
            -(-n_first // n) * groups.n < ITEMS_PER_THREAD * n_threads
        ):
            n = -(-n // 2)
        return n
