"""A runtime for tests: a model of a few torch operations that computes one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.model.forward.batch import Batch, Piece
from engine.model.forward.pages import PAGE, AttentionWindow
from engine.runtime.interface import PageGroup, SlotState, TokenSource
from engine.runtime.model_runner import ModelRunner


class ToyRuntime(ModelRunner):
    """Paged runtime of a toy model; all that differs from token to token lies in tensors.

    A sequence has one page at most.

    Args:
        is_recurrent: whether it has one recurrent state, which cannot go back, and no cache.
        sharpness: factor on its logits.

    Attributes:
        token: token that `compute` runs, (1,).
        position: position of that token, (1,).
        n_computed: number of tokens computed, (1,); a token that is computed again counts again.
        spoilt: values to add to all logits, (n_vocab,).
        states: recurrent states, (n_slots, 16).
    """

    n_running = 0
    drafter = None
    max_verify_rows = 16
    n_slots = 2

    def __init__(
        self, device: str = "cpu", *, n_vocab: int = 90, n_ctx: int = 64,
        is_recurrent: bool = False, sharpness: float = 1.5,
    ) -> None:  # fmt: skip
        made = torch.Generator().manual_seed(4)
        self.hp = SimpleNamespace(n_vocab=n_vocab)
        self.n_vocab = n_vocab
        self.n_ctx, self.n_batch, self.can_rewind = n_ctx, 8, not is_recurrent
        self.groups = [] if is_recurrent else [PageGroup(2, AttentionWindow())]
        self.ranks: list[Any] = []
        self.device = torch.device(device)
        self._rows = torch.randn(n_vocab, 16, generator=made).to(device)
        self._head = (torch.randn(n_vocab, 16, generator=made) * sharpness).to(device)
        self._places = torch.arange(n_ctx, device=device)
        self._cache = torch.zeros(2 * PAGE, 16, device=device)
        self.states = torch.zeros(self.n_slots, 16, device=device)
        self.token, self.position, self._first, self._slot, self.n_computed = (
            torch.zeros(1, dtype=torch.int64, device=device) for _ in range(5)
        )
        self.spoilt = torch.zeros(n_vocab, device=device)
        self.token_source: TokenSource | None = None

    def reset(self) -> None:
        """Fill cache and states with NaN, so that nobody can use them."""
        self._cache.fill_(torch.nan)
        self.states.fill_(torch.nan)
        self.n_computed.zero_()

    def forward(self, ids: Sequence[int], batch: Batch) -> np.ndarray:
        rows, left = [], iter(ids)
        for piece in batch.pieces:
            for place in range(piece.n_past, piece.stop):
                self.begin(next(left), piece._replace(n_past=place))
                rows.append(self.compute().cpu().numpy().copy())
        return np.stack(rows)[batch.first_logit :]

    def sample(
        self, ids: Sequence[int], batch: Batch, wishes: Sequence[object]
    ) -> Sequence[np.ndarray]:
        return list(self.forward(ids, batch))

    def finish(self) -> None:
        """Do nothing: every token is computed at once."""

    def copy_page(self, group: int, source: int, target: int) -> None:
        pages = self._cache.view(-1, PAGE, 16)
        pages[target].copy_(pages[source])

    def clear_slot(self, slot: int) -> None:
        self.states[slot].zero_()

    def save_slot(self, slot: int) -> tuple[SlotState, int]:
        state = self.states[slot].clone()
        return [{"state": state}], state.nbytes

    def load_slot(self, slot: int, state: SlotState) -> None:
        self.states[slot].copy_(state[0]["state"])

    def begin(self, token: int, piece: Piece) -> None:
        """Set the token that `compute` runs next, and its place."""
        self.token.fill_(token)
        self.position.fill_(piece.n_past)
        self._first.fill_(piece.tables[0][0] * PAGE if piece.tables else 0)
        self._slot.fill_(piece.state_slot)

    def compute(self) -> Tensor:
        """Return the logits after the token, (n_vocab,)."""
        self.n_computed.add_(1)
        row = self._rows.index_select(0, self.token)
        if not self.can_rewind:
            state = self.states.index_select(0, self._slot) * 0.6 + row
            self.states.index_copy_(0, self._slot, state)
            return self._head @ state[0] + self.spoilt
        self._cache.index_copy_(0, self._first + self.position, row)
        age = self.position - self._places
        weights = torch.where(age >= 0, torch.exp(-0.5 * age), 0.0)
        held = self._cache.index_select(0, self._first + self._places)
        seen = torch.where(age[:, None] >= 0, held, 0.0)
        return self._head @ (weights @ seen) + self.spoilt


class Letters:
    """Tokenizer whose tokens are letters."""

    never_ids = (2, 5)
    begun = b""

    def __init__(self, eog: Sequence[int] = ()) -> None:
        self.eog_ids = frozenset(eog)

    def stream(self, shown: Sequence[int] = ()) -> Letters:
        return self

    def feed(self, token: int) -> str:
        return chr(ord("0") + token)

    def flush(self) -> str:
        return ""

    def token_bytes(self, token: int) -> bytes:
        return self.feed(token).encode()


class SplitToy(ModelRunner):
    """Runtime of a toy model on several ranks, each with the logits of a slice of the vocabulary.

    Args:
        n_ranks: number of ranks; rank 1 has no logits if there are more than two.

    Attributes:
        toys: runtime of each rank; all of them compute everything.
        own: token ids of each rank's logits.
    """

    n_running = 0
    drafter = None
    max_verify_rows = 16

    def __init__(self, n_ranks: int, **options: Any) -> None:
        self.toys = [ToyRuntime(**options) for _ in range(n_ranks)]
        first = self.toys[0]
        self.hp, self.can_rewind, self.device = first.hp, first.can_rewind, first.device
        self.n_vocab, self.n_slots, self.groups = first.n_vocab, first.n_slots, first.groups
        self.n_ctx, self.n_batch, self.ranks = first.n_ctx, first.n_batch, first.ranks
        self.n_computed, self.spoilt = first.n_computed, first.spoilt
        for toy in self.toys:
            toy.spoilt = self.spoilt
        self.token_source: TokenSource | None = None
        shares = [rank != 1 or n_ranks < 3 for rank in range(n_ranks)]
        stops = [first.hp.n_vocab * sum(shares[: n + 1]) // sum(shares) for n in range(n_ranks)]
        self.own = [range(*span) for span in zip([0, *stops[:-1]], stops, strict=True)]

    def reset(self) -> None:
        """Fill the caches and states of all ranks with NaN, so that nobody can use them."""
        for toy in self.toys:
            toy.reset()

    def forward(self, ids: Sequence[int], batch: Batch) -> np.ndarray:
        first, *_ = [toy.forward(ids, batch) for toy in self.toys]
        return first

    def sample(
        self, ids: Sequence[int], batch: Batch, wishes: Sequence[object]
    ) -> Sequence[np.ndarray]:
        return list(self.forward(ids, batch))

    def finish(self) -> None:
        """Do nothing: every token is computed at once."""

    def copy_page(self, group: int, source: int, target: int) -> None:
        for toy in self.toys:
            toy.copy_page(group, source, target)

    def clear_slot(self, slot: int) -> None:
        for toy in self.toys:
            toy.clear_slot(slot)

    def save_slot(self, slot: int) -> tuple[SlotState, int]:
        found = [toy.save_slot(slot) for toy in self.toys]
        return [state for (state,), _ in found], sum(n for _, n in found)

    def load_slot(self, slot: int, state: SlotState) -> None:
        for toy, own in zip(self.toys, state, strict=True):
            toy.load_slot(slot, [own])

    def sliced(self, rank: int) -> Tensor | None:
        """Compute the token; return a rank's slice of the logits after it, None without one."""
        own, logits = self.own[rank], self.toys[rank].compute()
        return logits[own.start : own.stop] if len(own) else None
