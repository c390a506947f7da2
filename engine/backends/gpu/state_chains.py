"""Places of the recurrent states of single tokens, in the device's memory for its kernels.

Rows that go on from each other are a *chain*: the next token of an answer and guesses behind it,
each of which leaves its state in a place of its own. Where a captured pass has more rows, the last
one is repeated: these rows get the same result, and its state changes once. A captured pass is
replayed with the same addresses, so what differs between passes is written to the same memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.model.forward.batch import MOST_AT_ONCE
from engine.model.forward.operands import PlacedStates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.model.forward.batch import Batch, Piece
    from engine.model.forward.operands import States

WORDS = 4
"""Number of words of a row: rows of the chain that begins there, 0 if none does, -1 if the row is
repeated; the place of the state before the row; that of the state behind it; and how many rows
repeat it."""


class StateChains:
    """The chains of a pass; only what has changed since the last pass is written."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: Sequence[Piece] | None = None
        self._words: Tensor | None = None
        self._written: list[list[int]] = []

    def begin(self, batch: Batch) -> None:
        """Write the chains of a batch, if they are used and it is one of few single tokens."""
        self._pieces = batch.pieces if batch.is_of_few_singles else None
        if self._words is not None:
            self._write()

    def find(self, states: States) -> Tensor | None:
        """Return the words of the rows that states belong to, int64 (T, WORDS).

        Returns:
            None where it is the state of one sequence, or of other rows than few single tokens.
        """
        if self._pieces is None or not isinstance(states, PlacedStates):
            return None
        if self._words is None:
            shape = MOST_AT_ONCE, WORDS
            self._words = torch.zeros(shape, dtype=torch.int64, device=self._device)
            self._write()
        return self._words[: len(self._pieces)]

    def _write(self) -> None:
        """Write the words that have changed."""
        words = chain_words(self._pieces or ())
        if self._words is not None and words and words != self._written[: len(words)]:
            self._written = words
            # from memory that is not pinned: it is read before the call returns
            self._words[: len(words)].copy_(torch.tensor(words), non_blocking=True)


def chain_words(pieces: Sequence[Piece]) -> list[list[int]]:
    """Return the `WORDS` words of each piece, which is a single token."""
    words, first, own, last = list[list[int]](), 0, 0, None
    for row, piece in enumerate(pieces):
        if piece == last:
            words[own][3] += 1
            words.append([-1, piece.slot, piece.slot, 0])
            continue
        if last is not None and last.slot == piece.read_slot != piece.slot:
            words[first][0] += 1
            words.append([0, piece.read_slot, piece.slot, 0])
        else:
            words.append([1, piece.read_slot, piece.slot, 0])
            first = row
        own, last = row, piece
    return words
