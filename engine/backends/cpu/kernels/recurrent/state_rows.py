"""State slots that a pass's rows read and write, laid out for kernels.

A recorded pass is replayed with the same addresses, so passes with the same number of rows write
their slots to the same memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.backends.cpu.kernels.language.values import I64

if TYPE_CHECKING:
    from engine.backends.cpu.kernels.language.values import Code, Value
    from engine.model.forward.batch import Batch

WORDS = 4
"""Number of words per chain: its first row, its end, the slot with its initial state, and how many
rows may be computed before their state is stored."""

TOGETHER = 1 << 30
"""More rows than any pass has, so that a chain stores only the state after its last row."""


class StateRows:
    """Memory for the rows in passes with the same number of rows.

    Consecutive rows of a sequence are a *chain*: the tokens of a prompt, which share one state
    slot, or the next token of an answer and its draft tokens, each of which stores its state in a
    separate slot.

    Attributes:
        n_chain: number of chains.
        most: number of rows in the longest chain.
        n_slots: minimum number of slots in a layer.
        chains: address of the number of chains, followed by `WORDS` words for each.
        goals: address of the slots in which the rows store their states.
    """

    def __init__(self, n_rows: int) -> None:
        self._chains = np.zeros(1 + WORDS * n_rows, np.int64)
        self._goals = np.zeros(n_rows, np.int64)
        self.chains, self.goals = self._chains.ctypes.data, self._goals.ctypes.data
        self.n_chain = self.most = self.n_slots = 0
        self._held: list[tuple[int, int, int | None]] = []

    def set(self, batch: Batch) -> None:
        """Write the rows of a batch, which must have the same number of rows."""
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
    """Return a chain's words."""
    return code.load_array(chains + 8 + number * (8 * WORDS), WORDS)
