"""Location of a pass's rows in a cache's pages, in device memory for the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engine.model.forward.batch import MAX_AT_ONCE
from engine.model.forward.operands import PlacedStates
from engine.model.forward.pages import PAGE

if TYPE_CHECKING:
    from engine.model.forward.batch import Batch, Piece, Tables
    from engine.model.forward.operands import States


class PagedRows(NamedTuple):
    """Rows in a pass: tokens of one sequence, then single tokens of others.

    A sequence's position p lies in slot `table[p // PAGE] * PAGE + p % PAGE` of a layer's memory.

    Attributes:
        positions: each row's position in its sequence, int64 (T,), dense.
        tables: each sequence's pages, int32 (sequences, pages), dense; entries for pages that no
            row attends to are not read.
    """

    positions: Tensor
    tables: Tensor

    @classmethod
    def alone(cls, positions: Tensor, n_ctx: int) -> PagedRows:
        """Return consecutive rows for the only sequence in a cache of n_ctx tokens."""
        pages = torch.arange(-(-n_ctx // PAGE), dtype=torch.int32, device=positions.device)
        return cls(positions, pages[None])

    @property
    def n_first(self) -> int:
        """Number of rows in the first sequence; the others have one each."""
        return len(self.positions) - len(self.tables) + 1

    @property
    def n_ctx(self) -> int:
        """Number of tokens for which a sequence's table has room."""
        return self.tables.shape[1] * PAGE

    def runs(self) -> Sequence[PagedRun]:
        """Group the rows into runs of sequences that have the same number of rows."""
        n_first, n_sequence = self.n_first, len(self.tables)
        if n_first == 1 or n_sequence == 1:
            return [PagedRun(0, 0, n_first, n_sequence)]
        return [PagedRun(0, 0, n_first, 1), PagedRun(n_first, 1, 1, n_sequence - 1)]


class PagedRun(NamedTuple):
    """Adjacent rows, starting at `row`, of sequences with `n_tokens` rows each."""

    row: int
    sequence: int
    n_tokens: int
    n_sequence: int

    @property
    def n_rows(self) -> int:
        return self.n_tokens * self.n_sequence


class PageTables:
    """Page tables for the sequences in a pass, at fixed addresses.

    A captured pass can therefore serve other and longer sequences. Only changes since the last
    pass are written.

    Args:
        n_ctx: maximum number of tokens in a sequence.
    """

    def __init__(self, device: torch.device, n_ctx: int) -> None:
        self._device = device
        self._n_pages = -(-n_ctx // PAGE)
        self._pieces: Sequence[Piece] = ()
        self._positions = torch.zeros(1, dtype=torch.int64, device=device)
        self._tables: dict[int, Tensor] = {}
        self._written: dict[tuple[int, int], tuple[int, ...]] = {}

    def begin(self, batch: Batch, positions: Tensor) -> None:
        """Write a batch's tables; `positions` are as in `Ops.begin`."""
        self._pieces, self._positions = batch.pieces, positions
        for group in self._tables:
            self._write(group)

    def extend(self, tables: Tables) -> None:
        """Write the tables of the only sequence, which has been given more pages."""
        (piece,) = self._pieces
        self._pieces = (piece._replace(tables=tables),)
        for group in self._tables:
            self._write(group)

    def rows(self, group: int) -> PagedRows | None:
        """Return where the rows lie in a group's layers; None if there are too many sequences."""
        if len(self._pieces) > MAX_AT_ONCE:
            return None
        if group not in self._tables:
            shape = MAX_AT_ONCE, self._n_pages
            self._tables[group] = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._write(group)
        return PagedRows(self._positions, self._tables[group][: len(self._pieces)])

    def _write(self, group: int) -> None:
        for row, piece in enumerate(self._pieces[:MAX_AT_ONCE]):
            pages = tuple(piece.tables[group] if piece.tables else range(self._n_pages))
            if self._written.get((group, row)) != pages:
                self._written[group, row] = pages
                # the source is not pinned, so it is read before the call returns
                source = torch.tensor(pages, dtype=torch.int32)
                self._tables[group][row, : len(pages)].copy_(source, non_blocking=True)


WORDS = 4
"""Words per row: length of the chain that starts there (0 if none does, -1 if the row is a
repetition), state slot to read, state slot to write, and number of rows that repeat the row."""


class StateChains:
    """A pass's chains; only changes since the last pass are written."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: Sequence[Piece] | None = None
        self._words: Tensor | None = None
        self._written: list[list[int]] = []

    def begin(self, batch: Batch) -> None:
        """Write a batch's chains if they are used and the batch has a few single tokens."""
        self._pieces = batch.pieces if batch.is_of_few_singles else None
        if self._words is not None:
            self._write()

    def find(self, states: States) -> Tensor | None:
        """Return the words for the rows to which states belong, int64 (T, WORDS).

        Return None for one sequence's state, and for rows other than a few single tokens.
        """
        if self._pieces is None or not isinstance(states, PlacedStates):
            return None
        if self._words is None:
            shape = MAX_AT_ONCE, WORDS
            self._words = torch.zeros(shape, dtype=torch.int64, device=self._device)
            self._write()
        return self._words[: len(self._pieces)]

    def _write(self) -> None:
        words = chain_words(self._pieces or ())
        if self._words is not None and words and words != self._written[: len(words)]:
            self._written = words
            # the source is not pinned, so it is read before the call returns
            self._words[: len(words)].copy_(torch.tensor(words), non_blocking=True)


def chain_words(pieces: Sequence[Piece]) -> list[list[int]]:
    """Return the `WORDS` words for each piece; all pieces are single tokens."""
    words, first, own, last = list[list[int]](), 0, 0, None
    for row, piece in enumerate(pieces):
        if piece == last:
            words[own][3] += 1
            words.append([-1, piece.state_slot, piece.state_slot, 0])
            continue
        if last is not None and last.state_slot == piece.read_slot != piece.state_slot:
            words[first][0] += 1
            words.append([0, piece.read_slot, piece.state_slot, 0])
        else:
            words.append([1, piece.read_slot, piece.state_slot, 0])
            first = row
        own, last = row, piece
    return words
