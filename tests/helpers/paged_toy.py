"""A paged runtime for tests that stores token ids where a real one stores keys and values.

Its logits are a function of what a sequence sees in its pages and of its recurrent state, so that
any mistake in tables, slots or the order of rows shows.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from engine.decoding.sampling.sampler import Sampler, SamplingRequest
from engine.errors import EngineError
from engine.model.forward.batch import MAX_AT_ONCE, Batch, Piece
from engine.model.forward.pages import PAGE, AttentionWindow
from engine.runtime.interface import PageGroup
from engine.runtime.model_runner import ModelRunner

N_VOCAB = 40
EMPTY = -7


def whole_logits(
    ids: Sequence[int], windows: Sequence[AttentionWindow], *, is_recurrent: bool
) -> np.ndarray:
    """Return the logits after `ids`, (n_vocab,), without pages."""
    n = len(ids) - 1
    seen = tuple(tuple(ids[window.first_seen(n) :]) for window in windows)
    return _logits(seen, _state_of(ids) if is_recurrent else 0)


def _state_of(ids: Sequence[int]) -> int:
    state = 0
    for token in ids:
        state = hash((state, token))
    return state


def _logits(seen: object, state: int) -> np.ndarray:
    drawn = random.Random(hash((seen, state)))
    return np.array([drawn.gauss(0, 2) for _ in range(N_VOCAB)], np.float32)


class PagedToy(ModelRunner):
    """Paged runtime of a toy model.

    Args:
        groups: number of pages and window of each group.
        n_slots: number of places for recurrent states; 0 for a model without any.

    Attributes:
        batches: batches computed so far.
        error: error to raise in the next pass.
        n_sampled: number of tokens that `sample` has sampled.
    """

    n_running = 0
    n_vocab = N_VOCAB
    drafter = None
    max_verify_rows = 16

    def __init__(
        self, *groups: tuple[int, AttentionWindow], n_ctx: int = 64, n_batch: int = 32,
        n_slots: int = 0,
    ) -> None:  # fmt: skip
        self.groups: Sequence[PageGroup] = [PageGroup(*group) for group in groups]
        self.n_ctx, self.n_batch = n_ctx, n_batch
        self.can_rewind, self.n_slots = not n_slots, max(1, n_slots)
        self.ranks: list[Any] = []
        self.token_source: Any = None
        self._cells = [[[EMPTY] * PAGE for _ in range(n)] for n, _ in groups]
        self._states: list[int | None] = [None] * self.n_slots
        self.batches: list[Batch] = []
        self.error: BaseException | None = None
        self.n_sampled = 0

    @property
    def windows(self) -> list[AttentionWindow]:
        return [group.window for group in self.groups]

    def expected(self, ids: Sequence[int]) -> np.ndarray:
        """Return the logits after `ids` of a sequence that is alone."""
        return whole_logits(ids, self.windows, is_recurrent=not self.can_rewind)

    def forward(self, ids: Sequence[int], batch: Batch) -> np.ndarray:
        assert len(ids) == batch.n_rows <= max(self.n_batch, 1)
        assert len(batch.pieces) <= MAX_AT_ONCE + 1
        assert all(piece.n == 1 for piece in batch.pieces[1:])
        assert 0 <= batch.first_logit <= batch.n_rows
        if self.error is not None:
            error, self.error = self.error, None
            self._states = [None] * self.n_slots
            raise error
        self.batches.append(batch)
        written = [
            (number, self._slot(piece, number, position))
            for piece in batch.pieces
            for position in range(piece.n_past, piece.stop)
            for number in range(len(self.groups))
        ]
        assert len(set(written)) == len(written), "two rows write to one slot"
        rows, at = [], 0
        for piece in batch.pieces:
            for position in range(piece.n_past, piece.stop):
                state = self._write(piece, position, ids[at])
                if at >= batch.first_logit:
                    rows.append(_logits(self._seen(piece, position), state))
                at += 1
        return np.array(rows, np.float32).reshape(-1, N_VOCAB)

    def sample(
        self, ids: Sequence[int], batch: Batch, wishes: Sequence[SamplingRequest | None]
    ) -> list[Any]:
        """Sample rows with even seeds; those with odd ones are left to the host."""
        found: list[Any] = list(self.forward(ids, batch))
        for row, wish in enumerate(wishes):
            if wish is not None and wish.sampler.seed % 2 == 0:
                found[row][list(wish.never)] = -np.inf
                if wish.allowed:
                    found[row][~wish.allowed()] = -np.inf
                found[row] = wish.sampler.sample(found[row])
                self.n_sampled += 1
        assert len(wishes) == len(found)
        return found

    def _slot(self, piece: Piece, number: int, position: int) -> tuple[int, int]:
        index = position // PAGE
        page = piece.tables[number][index] if piece.tables else index
        assert 0 <= page < self.groups[number].n_pages
        return page, position % PAGE

    def _write(self, piece: Piece, position: int, token: int) -> int:
        """Store a token in all groups and in the recurrent state, and return that."""
        assert position < self.n_ctx
        for number in range(len(self.groups)):
            page, place = self._slot(piece, number, position)
            self._cells[number][page][place] = token
        if self.can_rewind:
            return 0
        before = self._states[piece.read_slot if position == piece.n_past else piece.state_slot]
        assert before is not None, "nobody has set this state"
        state = self._states[piece.state_slot] = hash((before, token))
        return state

    def _seen(self, piece: Piece, position: int) -> tuple[tuple[int, ...], ...]:
        """Return what the token at a position sees in each group."""
        return tuple(
            tuple(
                self._cells[number][page][place]
                for at in range(group.window.first_seen(position), position + 1)
                for page, place in [self._slot(piece, number, at)]
            )
            for number, group in enumerate(self.groups)
        )

    def finish(self) -> None:
        """Do nothing: every pass is computed at once."""

    def copy_page(self, group: int, source: int, target: int) -> None:
        self._cells[group][target] = list(self._cells[group][source])

    def clear_slot(self, slot: int) -> None:
        self._states[slot] = 0

    def save_slot(self, slot: int) -> tuple[Any, int]:
        assert self._states[slot] is not None
        return self._states[slot], 8

    def load_slot(self, slot: int, state: Any) -> None:
        assert state is not None
        self._states[slot] = state

    def close(self) -> None:
        """Do nothing."""

    def fail_next(self, error: BaseException | None = None) -> None:
        """Have the next pass fail."""
        self.error = error or EngineError("a device failed")


class ToySource:
    """A token source that has sampled some tokens more than it was asked for.

    Args:
        runtime: computes the tokens.
        ahead: number of tokens to sample ahead.
        is_lost: returns, for each token, whether its logits are lost with what the states hold.

    Attributes:
        n_delivered: number of sampled tokens that were handed out.
    """

    waited_s = 0.0

    def __init__(
        self, runtime: PagedToy, ahead: int, is_lost: Callable[[], bool] = lambda: False
    ) -> None:
        self._runtime, self._ahead, self._is_lost = runtime, ahead, is_lost
        self._sampler: Sampler | None = None
        self._never: list[int] = []
        self._next: tuple[int, int] | None = None
        self._sampled: list[int] = []
        self.n_delivered = 0

    def serve(self, sampler: Sampler, never: Sequence[int]) -> bool:
        if sampler is not self._sampler:
            assert not self._sampled, "it has to be stopped first"
            self._sampler, self._never = sampler, list(never)
        return sampler.params.typical_p == 1

    def next(self, token: int, piece: Piece, n_left: int) -> Any:
        assert self._sampler is not None
        assert 0 < n_left <= self._runtime.n_ctx - piece.n_past
        if self._next != (token, piece.n_past):
            assert not self._sampled, "it has to be stopped first"
            self._at, self._fed = piece.n_past, token
            self._copy = copy.deepcopy(self._sampler)
        while len(self._sampled) < min(1 + self._ahead, n_left):
            row = Piece(self._at, 1, piece.tables, piece.state_slot)
            logits = self._runtime.forward([self._fed], Batch((row,), 0))[0]
            if self._is_lost():
                self._sampled.clear()
                self._next = None
                return None
            logits[self._never] = -np.inf
            self._at, self._fed = self._at + 1, self._copy.sample(logits)
            self._copy.accept(self._fed)
            self._sampled.append(self._fed)
        if not self._sampler.is_greedy:
            self._sampler.uniforms.draw()
        found = self._sampled.pop(0)
        self._next = found, piece.n_past + 1
        self.n_delivered += 1
        return found

    @property
    def is_beyond(self) -> bool:
        return bool(self._sampled) and not self._runtime.can_rewind

    def stop(self) -> Sequence[int]:
        run = [self._next[0], *self._sampled[:-1]] if self._next and self._sampled else ()
        self._sampled, self._next, self._sampler = [], None, None
        return () if self._runtime.can_rewind else run
