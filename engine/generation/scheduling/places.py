"""Places of sequences in a cache: their pages, and where their recurrent states lie."""

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
from engine.model.forward.batch import MAX_AT_ONCE, Tables
from engine.model.forward.pages import GONE, PAGE, n_alike

if TYPE_CHECKING:
    from engine.runtime.interface import SlotState
    from engine.runtime.model_runner import ModelRunner

CHECKPOINT_BYTES = 2 << 30
"""Default of the largest number of bytes of host memory for kept recurrent states."""


@dataclass(eq=False, slots=True)
class CachePlace:
    """Place of one sequence in the cache.

    Attributes:
        sequence: its tokens and pages.
        slot: place of its recurrent states; 0 for models without any.
        seat: number of the sequence among those that have a place, from 0.
        ahead: places of the states behind each of its guesses, while a pass checks them.
    """

    sequence: PagedSequence
    slot: int
    seat: int = 0
    ahead: list[int] = field(default_factory=list)

    @property
    def n(self) -> int:
        """Number of tokens that are in the cache."""
        return len(self.sequence.ids)

    @property
    def tables(self) -> Tables:
        """Tables of the sequence as they are now; they do not change with it.

        There are none where each page that is there is the one of its number.
        """
        tables = self.sequence.tables
        if all(page in (n, GONE) for table in tables for n, page in enumerate(table)):
            return ()
        return tuple(tuple(table) for table in tables)


class Places:
    """The cache of a runtime as sequences see it: pages, recurrent states and kept ones.

    Args:
        checkpoint_bytes: largest number of bytes of recurrent states that are kept.
    """

    def __init__(self, runtime: ModelRunner, checkpoint_bytes: int = CHECKPOINT_BYTES) -> None:
        self._runtime = runtime
        groups = [Group(PagePool(group.n_pages), group.window) for group in runtime.groups]
        self._sequences = Sequences(groups, lambda *pages: self._runtime.copy_page(*pages))
        self._states: Checkpoints[SlotState] = Checkpoints(checkpoint_bytes)
        self._has_states = not runtime.can_rewind
        self._holders: dict[int, CachePlace] = {}
        self._seats: set[int] = set()

    @property
    def most(self) -> int:
        """Largest number of sequences that have a place at once."""
        most = min(MAX_AT_ONCE, self._runtime.n_batch)
        return min(most, self._runtime.n_slots) if self._has_states else most

    @property
    def pools(self) -> list[PagePool]:
        """Pools of the groups of layers, in order."""
        return [group.pool for group in self._sequences.groups]

    @property
    def used(self) -> list[list[range]]:
        """For each group, the neighbouring slots of pages that hold what may be found."""
        return [
            [range(page * PAGE, (page + 1) * PAGE) for page in pool.known] for pool in self.pools
        ]

    @property
    def use(self) -> tuple[int, int]:
        """Numbers of tokens in pages that sequences use, and in those kept for later ones.

        Where layers see differently far back, those that see farthest count.
        """
        pool = max(self.pools, key=lambda pool: pool.n_pages, default=PagePool(0))
        return (pool.n_pages - pool.n_free) * PAGE, pool.n_idle * PAGE

    @property
    def states(self) -> Checkpoints[SlotState]:
        """The recurrent states that are kept."""
        return self._states

    def move(self, runtime: ModelRunner) -> None:
        """Go on with another runtime that has the same pages, but no recurrent states.

        It may have places for more or fewer of these.
        """
        assert not self._holders, "no sequence has states while they are moved"
        self._runtime = runtime

    def open(self, ids: Sequence[int]) -> CachePlace:
        """Return a place of a sequence that begins with as many of `ids` as are cached.

        Raises:
            OutOfPages: others use the page that the last tokens would need.
        """
        if not self._has_states:
            return self._seated(CachePlace(self._sequences.open(ids), 0))
        sequence = self._sequences.open(ids, self._states.lengths(ids))
        slot = self._free[0]
        try:
            if sequence.ids:
                self._runtime.load_slot(slot, self._states.state(sequence.ids))
            else:
                self._runtime.clear_slot(slot)
        except BaseException:
            sequence.close()
            raise
        place = self._holders[slot] = self._seated(CachePlace(sequence, slot))
        return place

    def _seated(self, place: CachePlace) -> CachePlace:
        """Give a place a number that no other one has, and return it."""
        place.seat = next(seat for seat in range(len(self._seats) + 1) if seat not in self._seats)
        self._seats.add(place.seat)
        if place.n and (drafter := self._runtime.drafter) is not None:
            drafter.forget_hidden_states(place.seat)  # those of its last token are gone
        return place

    def close(self, place: CachePlace, *, is_kept: bool = True) -> None:
        """Free a place; its tokens can be found until their memory is needed.

        Args:
            is_kept: whether to keep its recurrent states, with which it could go on.
        """
        if is_kept:
            self.keep(place)
        place.sequence.close()
        self._seats.discard(place.seat)
        if self._has_states:
            del self._holders[place.slot]

    def keep(self, place: CachePlace) -> None:
        """Keep a sequence's recurrent states, so that another one can go on from there."""
        if self._has_states and place.sequence.ids:
            self._states.keep(place.sequence.ids, *self._runtime.save_slot(place.slot))

    def rewind(self, place: CachePlace, ids: Sequence[int]) -> bool:
        """Forget the tokens that are not those of `ids`, if that is possible."""
        n = n_alike(place.sequence.ids, ids)
        if n == place.n:
            return True
        try:
            return not self._has_states and place.sequence.cut(n)
        except OutOfPages:
            return False

    def room(self, place: CachePlace) -> int:
        """Return for how many more tokens there are pages that nobody uses."""
        groups = zip(self._sequences.groups, place.sequence.tables, strict=True)
        found = [(len(table) + group.pool.n_free) * PAGE - place.n for group, table in groups]
        return min(found, default=self._runtime.n_ctx)

    def has_room(self, place: CachePlace, n: int, others: Sequence[CachePlace]) -> bool:
        """Return whether there are pages for n tokens in all.

        Args:
            others: places of other sequences, each of which may need a page more meanwhile, except
                where layers have a window.
        """
        most = -(-self._runtime.n_ctx // PAGE)
        n_growing = sum(-(-other.n // PAGE) < most for other in others)
        for group, table in zip(self._sequences.groups, place.sequence.tables, strict=True):
            n_used = sum(page != GONE for page in table)
            wanted = group.window.n_pages(n, self._runtime.n_batch)
            n_spare = n_growing if group.window.n is None else 0
            if group.pool.n_free < max(0, wanted - n_used) + n_spare:
                return False
        return True

    @property
    def _free(self) -> list[int]:
        """Slots that no sequence has."""
        taken = {slot for place in self._holders.values() for slot in (place.slot, *place.ahead)}
        return [slot for slot in range(self._runtime.n_slots) if slot not in taken]

    def most_guesses(self, n: int) -> int:
        """Return for how many guesses of each of n sequences there is a slot."""
        if not self._has_states:
            return MAX_AT_ONCE
        return len(self._free) // max(1, n)

    def set_apart(self, place: CachePlace, n: int) -> None:
        """Set slots apart for the states behind each of n guesses of a sequence."""
        if self._has_states:
            place.ahead = self._free[:n]

    def follow(self, place: CachePlace) -> None:
        """Go on from the states behind the next guess, as it was right."""
        if self._has_states:
            del self._holders[place.slot]
            place.slot = place.ahead.pop(0)
            self._holders[place.slot] = place

    def clear(self) -> None:
        """Make sure that nothing is found any more; no sequence may have a place."""
        self._sequences.clear()
        self._states.clear()
