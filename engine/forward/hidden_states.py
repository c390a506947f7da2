"""Hidden states that an MTP block reads in a later pass: the last ones of each sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.forward.batch import KEPT_STATES, MOST_AT_ONCE

if TYPE_CHECKING:
    from engine.forward.batch import Batch, Piece


class HiddenStates:
    """Hidden states of the last tokens of all sequences, on one rank of an MTP block.

    That of a position lies in its sequence's part (`Piece.seat`), in the row of the position modulo
    `KEPT_STATES`. What a sequence has not written is zero, or left over from earlier ones.
    """

    def __init__(self, n_embd: int, device: torch.device) -> None:
        self._rows = torch.zeros(MOST_AT_ONCE * KEPT_STATES, n_embd, device=device)
        self._own, self._before = (
            torch.zeros(MOST_AT_ONCE, dtype=torch.int64, device=device) for _ in range(2)
        )
        self._pieces: tuple[Piece, ...] = ()
        self._is_of_singles = False

    @property
    def n_bytes(self) -> int:
        """Bytes that they take."""
        return self._rows.nbytes

    def begin(self, batch: Batch) -> None:
        """Note where the rows of a pass belong; for single tokens in the same memory each time."""
        self._pieces = batch.pieces
        n = len(batch.pieces)
        self._is_of_singles = batch.is_of_singles and n <= MOST_AT_ONCE
        if self._is_of_singles:
            self._own[:n] = torch.tensor([_row(piece, piece.n_past) for piece in batch.pieces])
            self._before[:n] = torch.tensor(
                [_row(piece, piece.n_past - 1) for piece in batch.pieces]
            )

    def forget(self, seat: int) -> None:
        """Zero the hidden states of a sequence."""
        self._rows[seat * KEPT_STATES : (seat + 1) * KEPT_STATES].zero_()

    def keep(self, hidden: Tensor) -> None:
        """Keep the hidden states (T, n_embd) of a pass over single tokens."""
        self._rows.index_copy_(0, self._own[: len(self._pieces)], hidden)

    def before(self) -> Tensor:
        """Return the hidden states (T, n_embd) of the tokens before those of such a pass."""
        return self._rows.index_select(0, self._before[: len(self._pieces)])

    def exchanged(self, hidden: Tensor) -> Tensor:
        """Keep hidden states (T, n_embd) of a pass; return those of the token before each."""
        if self._is_of_singles:
            self.keep(hidden)
            return self.before()
        device, parts, first = hidden.device, list[Tensor](), 0
        earlier = [_row(piece, piece.n_past - 1) for piece in self._pieces]
        kept = self._rows.index_select(0, torch.tensor(earlier, device=device))
        for number, piece in enumerate(self._pieces):
            parts += [kept[number : number + 1], hidden[first : first + piece.n - 1]]
            first += piece.n
            self._rows[_row(piece, piece.stop - 1)] = hidden[first - 1]
        return torch.cat(parts)


def _row(piece: Piece, position: int) -> int:
    """Return the row of a position of a sequence."""
    return piece.seat * KEPT_STATES + position % KEPT_STATES
