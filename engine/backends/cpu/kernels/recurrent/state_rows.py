"""Recurrent states that the rows of a pass read and write, in memory where kernels find them.

A recorded pass is replayed with the same addresses, so what differs between passes with as many
rows is written to the same memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.backends.cpu.kernels.language.values import I64

if TYPE_CHECKING:
    from engine.backends.cpu.kernels.language.values import Code, Value
    from engine.model.forward.batch import Batch

WORDS = 4
"""Number of words of a chain: its first row, the row behind its last one, the place of the state
before it, and how many of its rows may be computed before their state is stored."""

TOGETHER = 1 << 30
"""Number of rows that no pass has: all rows of a chain leave one state, behind the last of them."""


class StateRows:
    """Memory for the rows of passes with the same number of rows.

    Rows that go on from each other are a *chain*: the tokens of a prompt, whose states replace each
    other in one place, or the next token of an answer and guesses behind it, each of which leaves
    its state in a place of its own.

    Attributes:
        n_chain: number of chains.
        most: number of rows of the longest chain.
        n_slots: number of places that a layer's memory needs at least.
        chains: address of the number of chains, and of `WORDS` words for each.
        goals: address of each row's place to write its state to.
    """

    def __init__(self, n_rows: int) -> None:
        self._chains = np.zeros(1 + WORDS * n_rows, np.int64)
        self._goals = np.zeros(n_rows, np.int64)
        self.chains, self.goals = self._chains.ctypes.data, self._goals.ctypes.data
        self.n_chain = self.most = self.n_slots = 0
        self._held: list[tuple[int, int, int | None]] = []

    def set(self, batch: Batch) -> None:
        """Write the rows of a batch; it has as many rows as this memory."""
        held = [(piece.n, piece.state_slot, piece.source) for piece in batch.pieces]
        if held == self._held:
            return
        self._held = held
        chains, row, last = list[list[int]](), 0, -1
        for piece in batch.pieces:
            is_apart = piece.read_slot != piece.state_slot
            stop = row + piece.n
            if is_apart and piece.read_slot == last:
                chains[-1][1], chains[-1][3] = stop, 1
            else:
                chains.append([row, stop, piece.read_slot, TOGETHER])
            self._goals[row:stop] = last = piece.state_slot
            row = stop
        words = [len(chains), *(word for chain in chains for word in chain)]
        self._chains[: len(words)] = words
        self.n_chain = len(chains)
        self.most = max(stop - begin for begin, stop, _, _ in chains)
        self.n_slots = 1 + max(max(piece.state_slot, piece.read_slot) for piece in batch.pieces)


def n_chains(code: Code, chains: Value) -> Value:
    """Return the number of chains."""
    return code.load(chains, I64)


def chain_words(code: Code, chains: Value, number: Value) -> list[Value]:
    """Return the words of a chain."""
    return code.load_array(chains + 8 + number * (8 * WORDS), WORDS)
