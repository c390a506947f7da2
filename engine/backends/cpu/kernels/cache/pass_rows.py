"""The rows of a pass in memory, where kernels of the KV cache find them.

A recorded pass is replayed with the same addresses, so what differs between passes with as many
rows is written to the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import maxsize
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.model.forward.batch import MOST_AT_ONCE
from engine.model.forward.pages import PAGE

if TYPE_CHECKING:
    from engine.model.forward.batch import Batch
    from engine.model.forward.operands import Scores

MOST_POSITIONS = 1 << 31
"""Number of positions that no sequence has."""

Numbers = NDArray[np.int64]


class PassRows:
    """Memory for the rows of passes with the same number of rows.

    Attributes:
        n_rows: number of rows.
        n_first: number of the first rows, neighbouring tokens of one sequence.
        positions: address of the rows' positions, 64-bit integers.
        n_pages: number of pages of the longest sequence; 0 in a pass that may be recorded.
        n_seen: positions of all rows together, each with those before it.
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
        """Write the rows of a batch; it has as many rows as this memory."""
        self._batch = batch
        self.n_first = batch.pieces[0].n
        is_single = batch.is_of_singles and self.n_rows <= MOST_AT_ONCE
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
        """Return the tables of a group of layers."""
        found = self._tables.get(group)
        if found is None:
            assert self._batch is not None
            found = self._tables[group] = GroupTables(group, self.n_rows)
            found.set(self._batch)
        return found

    def words(self, scores: Scores, group: int) -> int:
        """Return the address of `attention.ROWS` for layers with a window and chunk in a group."""
        key = scores.window, scores.chunk, scores.first, group
        words = self._words.get(key)
        if words is None:
            tables = self.tables(group)
            firsts = self._first_visible(scores)
            numbers = (self.positions, firsts.ctypes.data, tables.address, self.n_rows)
            words = self._words[key] = np.array([*numbers, self.n_first], np.int64)
        return words.ctypes.data

    def _first_visible(self, scores: Scores) -> Numbers:
        """Return the first position that each row sees."""
        key = scores.window, scores.chunk, scores.first
        if key not in self._firsts:
            assert self._batch is not None
            firsts = np.zeros(self.n_rows, np.int64)
            _fill(firsts, self._batch, scores.first_visible)
            self._firsts[key] = scores, firsts
        return self._firsts[key][1]


class GroupTables:
    """For each row, the address of its sequence's table of pages in one group of layers.

    Attributes:
        address: address of these addresses.
        n_slots: number of slots that a layer's memory needs at least.
    """

    def __init__(self, group: int, n_rows: int) -> None:
        self._group = group
        self._rows = np.zeros(n_rows, np.int64)
        self.address = self._rows.ctypes.data
        self.n_slots = 0
        self._held: list[_Table] = []

    def set(self, batch: Batch) -> None:
        """Write the tables of a batch."""
        while len(self._held) < len(batch.pieces):
            self._held.append(_Table())
        self.n_slots = row = 0
        for piece, held in zip(batch.pieces, self._held, strict=False):
            is_sane = 0 <= piece.n_past < MOST_POSITIONS
            pages = piece.tables[self._group] if piece.tables else None
            n_slots = held.set(pages, piece.stop) if is_sane else maxsize
            self.n_slots = max(self.n_slots, n_slots)
            self._rows[row : row + piece.n] = held.address
            row += piece.n


class _Table:
    """Table of one sequence, kept for as long as it is the same.

    Attributes:
        address: address of the numbers of its pages, 64-bit integers.
    """

    def __init__(self) -> None:
        self.address = 0
        self._pages: tuple[int, ...] | None = None
        self._numbers = np.zeros(0, np.int64)
        self._n_slots = 0

    def set(self, pages: Sequence[int] | None, stop: int) -> int:
        """Take the table of a sequence of `stop` tokens; return how many slots it needs.

        Args:
            pages: None where page i is the i-th one.
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
    """Write a function of the rows' positions."""
    row = 0
    for piece in batch.pieces:
        if piece.n == 1:
            numbers[row] = of_position(piece.n_past)
        else:
            found = [of_position(position) for position in range(piece.n_past, piece.stop)]
            numbers[row : row + piece.n] = found
        row += piece.n
