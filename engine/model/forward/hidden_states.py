"""Hidden states that MTP blocks read in a later pass: the last ones of each sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.model.forward.batch import KEPT_STATES, MOST_AT_ONCE

if TYPE_CHECKING:
    from engine.model.forward.batch import Batch, Piece


class HiddenStates:
    """Hidden states of the last tokens of all sequences, on one rank of an MTP block.

    Each block has a level of its own: those that it reads. That of a position lies in its
    sequence's part (`Piece.seat`), in the row of the position modulo `KEPT_STATES`. What a sequence
    has not written is zero, or left over from earlier ones.

    Args:
        n_levels: number of MTP blocks.
    """

    def __init__(self, n_embd: int, device: torch.device, n_levels: int = 1) -> None:
        n_rows = MOST_AT_ONCE * KEPT_STATES
        self._levels = [torch.zeros(n_rows, n_embd, device=device) for _ in range(n_levels)]
        self._own, self._before = (
            torch.zeros(MOST_AT_ONCE, dtype=torch.int64, device=device) for _ in range(2)
        )
        self._pieces: tuple[Piece, ...] = ()
        self._is_of_singles = False

    @property
    def n_bytes(self) -> int:
        """Bytes that they take."""
        return sum(rows.nbytes for rows in self._levels)

    def begin(self, batch: Batch) -> None:
        """Note where the rows of a pass belong; for single tokens in the same memory each time."""
        self._pieces = batch.pieces
        n = len(batch.pieces)
        self._is_of_singles = batch.is_of_few_singles
        if self._is_of_singles:
            _write(self._own[:n], [_row(piece, piece.n_past) for piece in batch.pieces])
            _write(self._before[:n], [_row(piece, piece.n_past - 1) for piece in batch.pieces])

    def forget(self, seat: int) -> None:
        """Zero the hidden states of a sequence."""
        for rows in self._levels:
            rows[seat * KEPT_STATES : (seat + 1) * KEPT_STATES].zero_()

    def follow(self, position: Tensor) -> None:
        """Have the next single token keep its hidden state where a position (1,) belongs.

        Tokens that a device samples ahead have their position in its memory alone. All work is the
        device's, so that it can be captured with the token.
        """
        own = self._own[:1]
        own.sub_(own % KEPT_STATES).add_(position % KEPT_STATES)

    def keep(self, hidden: Tensor, level: int = 0, first: int = 0) -> None:
        """Keep the hidden states of a pass, (T, n_embd), from its row `first` on."""
        own = self._rows_of(self._own, 0)
        self._levels[level].index_copy_(0, own[first:], hidden[first:])

    def before(self, level: int = 0) -> Tensor:
        """Return the kept hidden states (T, n_embd) of the tokens before those of the pass."""
        return self._levels[level].index_select(0, self._rows_of(self._before, -1))

    def _rows_of(self, of_singles: Tensor, distance: int) -> Tensor:
        """Return the row of each token of the pass, or of the one at a distance from it, (T,).

        Args:
            of_singles: memory where `begin` has written these rows for single tokens.
        """
        if self._is_of_singles:
            return of_singles[: len(self._pieces)]
        rows = [_row(piece, at + distance) for piece in self._pieces for at in _positions(piece)]
        return torch.tensor(rows, device=self._own.device)

    def exchanged(self, hidden: Tensor, level: int = 0) -> Tensor:
        """Keep the last hidden state of each piece of a prompt's pass, (T, n_embd).

        Returns:
            The hidden states of the token before each, (T, n_embd).
        """
        device, parts, first, rows = hidden.device, list[Tensor](), 0, self._levels[level]
        earlier = [_row(piece, piece.n_past - 1) for piece in self._pieces]
        kept = rows.index_select(0, torch.tensor(earlier, device=device))
        for number, piece in enumerate(self._pieces):
            parts += [kept[number : number + 1], hidden[first : first + piece.n - 1]]
            first += piece.n
            rows[_row(piece, piece.stop - 1)] = hidden[first - 1]
        return torch.cat(parts)


def _write(memory: Tensor, rows: list[int]) -> None:
    """Write numbers of rows to memory, (rows,); a single one takes no tensor of its own."""
    if len(rows) == 1:
        memory.fill_(rows[0])
    else:
        memory.copy_(torch.tensor(rows))


def _positions(piece: Piece) -> range:
    """Return the positions of a piece's tokens."""
    return range(piece.n_past, piece.stop)


def _row(piece: Piece, position: int) -> int:
    """Return the row of a position of a sequence."""
    return piece.seat * KEPT_STATES + position % KEPT_STATES
