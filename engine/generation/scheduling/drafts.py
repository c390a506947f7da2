"""Guesses of answers that run, and which of them a pass checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

from engine.drafting.control import LENGTHS, DraftControl
from engine.drafting.ngram import NgramDrafter
from engine.generation.work import Follow
from engine.paging.pool import OutOfPages

if TYPE_CHECKING:
    from engine.generation.scheduling.requests import Request
    from engine.runtime.interface import PagedRuntime

MOST_ROWS = 1 + LENGTHS[-1]
"""Largest number of rows of a pass that checks guesses."""


class Drafter(Protocol):
    """Source of guesses for one answer, see `NgramDrafter`."""

    @property
    def n_alike(self) -> int: ...

    def guess(self, ids: Sequence[int], most: int) -> list[int]: ...


class Drafts:
    """The guesses for the answers of one runtime.

    Args:
        most: largest number of guesses that a pass checks for an answer; 0 for none.
        make: returns what guesses for a new answer.
        control: chooses how many guesses a pass checks.
    """

    def __init__(
        self,
        most: int = 0,
        make: Callable[[], Drafter] = NgramDrafter,
        control: DraftControl | None = None,
    ) -> None:
        self._most, self._make = most, make
        self.control = control or DraftControl()
        self._drafters: WeakKeyDictionary[Request, Drafter] = WeakKeyDictionary()

    def guesses(
        self, runtime: PagedRuntime, requests: Sequence[Request]
    ) -> Mapping[Request, Sequence[int]]:
        """Return the tokens that a pass is to check behind the next one of each answer.

        There are pages for them. All answers have equally many, as a pass is recorded by its number
        of rows; empty where none are worth it.
        """
        room = min(self._most, min(MOST_ROWS, runtime.n_batch) // max(1, len(requests)) - 1)
        if room < 1 or not runtime.can_rewind or runtime.token_source is not None:
            return {}
        most = min((min(room, _room(request, runtime.n_ctx)) for request in requests), default=0)
        if most < 1:
            return {}
        drafters = {request: self._drafter(request) for request in requests}
        found = {request: d.guess(request.wanted, most) for request, d in drafters.items()}
        n_alike = [drafter.n_alike for drafter in drafters.values()]
        n = self.control.choose(n_alike, min(map(len, found.values())))
        if not n or not all(_has_pages(request, 1 + n) for request in requests):
            return {}
        return {request: guess[:n] for request, guess in found.items()}

    def _drafter(self, request: Request) -> Drafter:
        if request not in self._drafters:
            self._drafters[request] = self._make()
        return self._drafters[request]

    def note(self, request: Request, n_guessed: int, n_right: int) -> None:
        """Note how many of the guesses for an answer were right, the first ones."""
        # the drafter has not read on since it has guessed
        self.control.note_check(self._drafters[request].n_alike, n_guessed, n_right)


def _room(request: Request, n_ctx: int) -> int:
    """Return how many guesses an answer has a use for."""
    work, place = request.work, request.place
    if not isinstance(work, Follow) or work.is_timed or place is None:
        return 0
    return min(work.n_left - 1, n_ctx - place.n - 1)


def _has_pages(request: Request, n: int) -> bool:
    """Make sure that there are pages for n more tokens, if nobody has to give way."""
    assert request.place is not None
    try:
        request.place.sequence.reserve(n)
    except OutOfPages:
        return False
    return True
