"""How much a model remembers: the same on all ranks, and for the planner as for the cache."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from engine.model.forward.attention_window import Sight
from engine.model.forward.batch import MOST_AT_ONCE
from engine.model.forward.batch_sizes import PROMPT_BATCH
from engine.model.forward.pages import PAGE

if TYPE_CHECKING:
    from engine.load_params import LoadParams

LEAST_SLOTS = 2
"""Least number of sequences whose recurrent states lie on the devices."""

FEW_GUESSED = 3
"""Largest number of guesses for an answer that have places for the state behind each in any case.

A state takes as much memory as one more sequence's: 79 MB for Qwen 3 Next 80B, 157 MB for Qwen 3.5
27B. Where there is more memory, each guess that `LoadParams.draft_max` allows has a place.
"""

TOLD_COUNTS = 1, 2, 3, 4, 6, 8, 12, MOST_AT_ONCE
"""Numbers of requests of which it is told at which length they have room."""


class RequestRoom(NamedTuple):
    """Room of a cache for some requests at once.

    Attributes:
        n: number of requests.
        n_tokens: most tokens that each of them may have.
    """

    n: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Sizes that decide how much memory keys, values and recurrent states take.

    Attributes:
        n_ctx: largest number of tokens of a sequence.
        kv_type: KV type, see `LoadParams.kv_type`.
        n_parallel: number of sequences of `n_ctx` tokens for which there is room.
        n_batch: largest number of prompt tokens that are computed at once.
        n_guessed: largest number of guesses for a sequence whose recurrent states have a place.
    """

    n_ctx: int
    kv_type: str = "f16"
    n_parallel: int = 1
    n_batch: int = PROMPT_BATCH
    n_guessed: int = 0

    @classmethod
    def asked(
        cls, params: LoadParams, n_ctx: int, n_batch: int | None = None,
        n_guessed: int | None = None,
    ) -> CacheSize:  # fmt: skip
        """Return the sizes that the parameters of a load ask for.

        Args:
            n_ctx: context in tokens, as the model allows it.
            n_batch: number of prompt tokens that are computed at once; None as the parameters say,
                or the default.
            n_guessed: see `CacheSize`; None for few.
        """
        n_batch = n_batch or params.n_batch or PROMPT_BATCH
        n_guessed = few_guessed(params) if n_guessed is None else n_guessed
        return cls(n_ctx, params.kv_type, params.parallel, n_batch, n_guessed)

    def n_pages(self, sight: Sight) -> int:
        """Return the number of pages of a group of layers.

        Layers that see everything have room for `n_parallel` whole sequences, or for more shorter
        ones. Layers with a window keep `n_windows` windows, and beside one of them the batch that
        is being computed. They never need more pages than layers that see everything.
        """
        whole = self.n_parallel * -(-self.n_ctx // PAGE)
        if sight.n is None:
            return whole
        computed = sight.n_pages(self.n_ctx, min(self.n_batch, self.n_ctx))
        return min(whole, computed + (self.n_windows - 1) * sight.n_pages(self.n_ctx, 1))

    @property
    def n_windows(self) -> int:
        """Number of sequences whose windows are kept, running or at rest.

        A chat goes on without computing its last window again if that has stayed. So each of
        `n_parallel` sequences has a second one at rest, and one more is there for a short request
        in between: three by default. Windows are much smaller than whole sequences, but those of
        large models are not small.
        """
        return min(MOST_AT_ONCE, 2 * self.n_parallel + 1)

    @property
    def n_slots(self) -> int:
        """Number of recurrent states that lie on the devices.

        Each of `n_parallel` sequences has one, and so has each of its guesses while a pass checks
        them. Those that no guess needs serve for further sequences.
        """
        n_checked = min(MOST_AT_ONCE, self.n_parallel * (1 + self.n_guessed))
        return max(LEAST_SLOTS, self.n_parallel, n_checked)

    def rooms(self, sights: Iterable[Sight], *, has_states: bool) -> tuple[RequestRoom, ...]:
        """Return for how many requests at once there is room at which length, the longest first.

        Args:
            sights: sights of the groups of layers, each of which has pages of its own.
            has_states: whether there are recurrent states, each sequence's in a slot.
        """
        sights = tuple(sights)
        most = min(MOST_AT_ONCE, self.n_slots) if has_states else MOST_AT_ONCE
        counts = sorted({n for n in TOLD_COUNTS if n < most} | {min(self.n_parallel, most), most})
        found = [RequestRoom(n, self._longest(n, sights)) for n in counts]
        shorter = [*(room.n_tokens for room in found[1:]), 0]
        return tuple(r for r, next_n in zip(found, shorter, strict=True) if r.n_tokens > next_n)

    def _longest(self, n: int, sights: tuple[Sight, ...]) -> int:
        """Return how many tokens each of `n` requests may have; 0 if not one page each."""
        if self._have_room(n, self.n_ctx, sights):
            return self.n_ctx
        n_pages = range(-(-self.n_ctx // PAGE))
        too_many = bisect_left(
            n_pages, True, key=lambda i: not self._have_room(n, i * PAGE, sights)
        )  # fmt: skip
        return max(0, too_many - 1) * PAGE

    def _have_room(self, n: int, n_tokens: int, sights: tuple[Sight, ...]) -> bool:
        """Return whether `n` requests of a length run at once, one of them still at its prompt."""
        n_batch = min(self.n_batch, n_tokens)
        return all(
            sight.n_pages(n_tokens, n_batch) + (n - 1) * sight.n_pages(n_tokens, 1)
            <= self.n_pages(sight)
            for sight in sights
        )

    def n_held(self, sight: Sight) -> int:
        """Return for how many tokens a layer has memory."""
        return self.n_pages(sight) * PAGE


def few_guessed(params: LoadParams) -> int:
    """Return the number of guesses for a sequence that have places for states in any case."""
    return min(params.n_draft, FEW_GUESSED)
