"""A runtime's cache: the pages and recurrent states of running sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.generation.kv_cache import (
    Checkpoints,
    Group,
    OutOfPages,
    PagedSequence,
    PagePool,
    Sequences,
)
from engine.model.forward.batch import MAX_AT_ONCE, Piece, Tables
from engine.model.forward.pages import GONE, PAGE, n_alike

if TYPE_CHECKING:
    from engine.runtime.interface import SlotState
    from engine.runtime.model_runner import ModelRunner

CHECKPOINT_BYTES = 2 << 30
"""Default host memory limit for checkpoints, in bytes."""


@dataclass(eq=False, slots=True)
class SequenceCache:
    """One sequence's part of the cache.

    Attributes:
        sequence: its tokens and pages.
        state_slot: slot with its recurrent states; 0 if the model has none.
        batch_index: index of the sequence among the running ones, from 0.
        draft_slots: slots for the states after each of its drafts, while a pass verifies them.
    """

    sequence: PagedSequence
    state_slot: int
    batch_index: int = 0
    draft_slots: list[int] = field(default_factory=list)

    @property
    def n(self) -> int:
        """Number of tokens that are in the cache."""
        return len(self.sequence.ids)

    @property
    def tables(self) -> Tables:
        """A copy of the sequence's current tables; empty if all pages are in identity order."""
        tables = self.sequence.tables
        if all(page in (n, GONE) for table in tables for n, page in enumerate(table)):
            return ()
        return tuple(tuple(table) for table in tables)

    def piece(self, n: int, *, skip: int = 0, shift: int = 0) -> Piece:
        """Return the piece for the next n tokens, after `skip` others; see `Piece` for `shift`."""
        slot, index = self.state_slot, self.batch_index
        return Piece(self.n + skip, n, self.tables, slot, index, shift=shift)


class KVCacheManager:
    """Pages, recurrent states and their checkpoints, shared by the running sequences.

    Args:
        checkpoint_bytes: maximum size of all checkpoints together.
    """

    def __init__(self, runtime: ModelRunner, checkpoint_bytes: int = CHECKPOINT_BYTES) -> None:
        self._runtime = runtime
        groups = [Group(PagePool(group.n_pages), group.window) for group in runtime.groups]
        self._sequences = Sequences(groups, lambda *pages: self._runtime.copy_page(*pages))
        self._checkpoints: Checkpoints[SlotState] = Checkpoints(checkpoint_bytes)
        self._has_states = not runtime.can_rewind
        self._holders: dict[int, SequenceCache] = {}
        self._batch_indices: set[int] = set()

    @property
    def max_sequences(self) -> int:
        """Maximum number of running sequences."""
        most = min(MAX_AT_ONCE, self._runtime.n_batch)
        return min(most, self._runtime.n_slots) if self._has_states else most

    @property
    def pools(self) -> list[PagePool]:
        """Page pools of the layer groups, in order."""
        return [group.pool for group in self._sequences.groups]

    @property
    def known_ranges(self) -> list[list[range]]:
        """For each layer group, the ranges of slots in pages with reusable content."""
        return [
            [range(page * PAGE, (page + 1) * PAGE) for page in pool.known] for pool in self.pools
        ]

    @property
    def usage(self) -> tuple[int, int]:
        """Number of tokens in used pages, and in idle pages that are kept for later sequences.

        If there are several attention windows, the counts are from the group with the most pages.
        """
        pool = max(self.pools, key=lambda pool: pool.n_pages, default=PagePool(0))
        return (pool.n_pages - pool.n_free) * PAGE, pool.n_idle * PAGE

    @property
    def checkpoints(self) -> Checkpoints[SlotState]:
        """Checkpoints of recurrent states."""
        return self._checkpoints

    def move(self, runtime: ModelRunner) -> None:
        """Continue on another runtime with the same pages and any number of state slots."""
        assert not self._holders, "no sequence has states while they are moved"
        self._runtime = runtime

    def allocate(self, ids: Sequence[int]) -> SequenceCache:
        """Return a sequence with the longest cached prefix of `ids`.

        Raises:
            OutOfPages: the page for the last tokens is in use.
        """
        if not self._has_states:
            return self._numbered(SequenceCache(self._sequences.open(ids), 0))
        sequence = self._sequences.open(ids, self._checkpoints.lengths(ids))
        slot = self._free_slots[0]
        try:
            if sequence.ids:
                self._runtime.load_slot(slot, self._checkpoints.state(sequence.ids))
            else:
                self._runtime.clear_slot(slot)
        except BaseException:
            sequence.close()
            raise
        cache = self._holders[slot] = self._numbered(SequenceCache(sequence, slot))
        return cache

    def _numbered(self, cache: SequenceCache) -> SequenceCache:
        """Assign the lowest free batch index to a sequence; return the sequence."""
        taken = self._batch_indices
        cache.batch_index = next(n for n in range(len(taken) + 1) if n not in taken)
        self._batch_indices.add(cache.batch_index)
        if cache.n and (drafter := self._runtime.drafter) is not None:
            drafter.forget_hidden_states(cache.batch_index)  # its last token's are gone
        return cache

    def free(self, cache: SequenceCache, *, is_kept: bool = True) -> None:
        """Free a sequence's pages and slot; the pages stay reusable until evicted.

        Args:
            is_kept: whether to checkpoint its recurrent states.
        """
        if is_kept:
            self.checkpoint(cache)
        cache.sequence.close()
        self._batch_indices.discard(cache.batch_index)
        if self._has_states:
            del self._holders[cache.state_slot]

    def checkpoint(self, cache: SequenceCache) -> None:
        """Keep a copy of a sequence's recurrent states, from which another can continue."""
        if self._has_states and cache.sequence.ids:
            self._checkpoints.keep(cache.sequence.ids, *self._runtime.save_slot(cache.state_slot))

    def rewind(self, cache: SequenceCache, ids: Sequence[int]) -> bool:
        """Drop all tokens after the common prefix with `ids`; return whether that was possible."""
        n = n_alike(cache.sequence.ids, ids)
        if n == cache.n:
            return True
        try:
            return not self._has_states and cache.sequence.cut(n)
        except OutOfPages:
            return False

    def n_free_tokens(self, cache: SequenceCache) -> int:
        """Return the number of additional tokens for which there are free pages."""
        groups = zip(self._sequences.groups, cache.sequence.tables, strict=True)
        found = [(len(table) + group.pool.n_free) * PAGE - cache.n for group, table in groups]
        return min(found, default=self._runtime.n_ctx)

    def has_room(self, cache: SequenceCache, n: int, others: Sequence[SequenceCache]) -> bool:
        """Return whether there are pages for a total of n tokens.

        Args:
            others: other sequences, each of which may need one more page, except in layers with an
                attention window.
        """
        most = -(-self._runtime.n_ctx // PAGE)
        n_growing = sum(-(-other.n // PAGE) < most for other in others)
        for group, table in zip(self._sequences.groups, cache.sequence.tables, strict=True):
            n_used = sum(page != GONE for page in table)
            needed = group.window.n_pages(n, self._runtime.n_batch)
            n_spare = n_growing if group.window.n is None else 0
            if group.pool.n_free < max(0, needed - n_used) + n_spare:
                return False
        return True

    @property
    def _free_slots(self) -> list[int]:
        held = self._holders.values()
        taken = {slot for cache in held for slot in (cache.state_slot, *cache.draft_slots)}
        return [slot for slot in range(self._runtime.n_slots) if slot not in taken]

    def max_drafts(self, n: int) -> int:
        """Return how many drafts per sequence there are slots for, given n sequences."""
        if not self._has_states:
            return MAX_AT_ONCE
        return len(self._free_slots) // max(1, n)

    def reserve_draft_slots(self, cache: SequenceCache, n: int) -> None:
        """Reserve slots for the states after each of a sequence's n drafts."""
        if self._has_states:
            cache.draft_slots = self._free_slots[:n]

    def accept_draft(self, cache: SequenceCache) -> None:
        """Continue from the states after the next draft, which was accepted."""
        if self._has_states:
            del self._holders[cache.state_slot]
            cache.state_slot = cache.draft_slots.pop(0)
            self._holders[cache.state_slot] = cache

    def clear(self) -> None:
        """Discard all reusable content; no sequence may be running."""
        self._sequences.clear()
        self._checkpoints.clear()
