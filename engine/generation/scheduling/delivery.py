"""What answers are sent: results, and the errors and wishes that end them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from engine.errors import ContextOverflow, GrammarError, PromptError
from engine.generation.work import Follow, Prefill

if TYPE_CHECKING:
    from engine.generation.scheduling.places import Places
    from engine.generation.scheduling.requests import Request
    from engine.generation.scheduling.seats import Seats
    from engine.generation.work import Found
    from engine.runtime.timeline import TokenTimes


class Delivery:
    """The way of results to the answers that wait for them; answers that are over are forgotten.

    Args:
        check: raises an error if the tokens of a prompt cannot be computed.
        forget: called with each answer that is over.
    """

    def __init__(
        self,
        seats: Seats,
        places: Places,
        check: Callable[[Prefill], None],
        forget: Callable[[Request], None],
    ) -> None:
        self._seats, self._places = seats, places
        self._check, self._forget = check, forget

    def deliver(self, request: Request, found: Found, times: TokenTimes | None) -> None:
        """Send a result to the answer that waits for it."""
        if times is not None and isinstance(request.work, Follow) and request.work.is_timed:
            request.events.append(replace(times, position=len(request.wanted) - 1))
        self.advance(request, partial(request.advance, found))

    def deliver_guessed(
        self, request: Request, guess: Sequence[int], found: Sequence[Found]
    ) -> tuple[int, int]:
        """Send the results behind guessed tokens for as long as the answer goes on like that.

        A token whose times are wanted is computed once more, alone.

        Returns:
            How many guesses were checked, and how many of these were right.
        """
        n_right, n_checked = 0, len(guess)
        request.n_drafted += len(guess)
        for token, result in zip(guess, found, strict=True):
            work = request.work
            if request.is_over or request.place is None or request.n_missing != 1:
                break
            if not isinstance(work, Follow) or work.token != token:
                break
            if work.is_timed:
                n_checked = n_right
                break
            request.place.sequence.append([token])
            self._places.follow(request.place)
            n_right += 1
            request.n_accepted += 1
            request.saved_s += request.saved_by_one_s
            self.deliver(request, result, None)
        if request.place is not None:
            request.place.ahead.clear()
        return n_checked, n_right

    def advance(self, request: Request, act: Callable[[], None]) -> None:
        """Let an answer go on, and look at what it wants then; an error ends that answer."""
        before = request.work
        try:
            act()
            is_new = not request.is_over and request.work is not before
            if is_new and isinstance(request.work, Prefill):
                self._check(request.work)
        except Exception as error:  # noqa: BLE001 bugs, too, concern nobody else
            request.fail(error)
            self._seats.release(request, is_kept=False)
            is_its_own = isinstance(error, PromptError | ContextOverflow | GrammarError)
            if before is not None and not is_its_own:
                self._places.clear()  # it may hold what made the logits useless
        if request.is_over:
            self.end(request)
        elif is_new and request.place and isinstance(request.work, Prefill):
            self._seats.rewind(request)

    def end_unwanted(self) -> None:
        """End the answers that nobody reads any more, and those that were cancelled."""
        for request in tuple(self._seats.requests):
            if request.is_dropped:
                request.close()
                self.end(request)
            else:
                self.advance(request, partial(_ask, request))

    def end(self, request: Request) -> None:
        """Forget an answer that is over."""
        self._forget(request)
        if request in self._seats.requests:
            self._seats.release(request)
            self._seats.requests.remove(request)


def _ask(request: Request) -> None:
    """Cancel an answer if somebody wants it to end."""
    if request.is_cancelled():
        request.cancel()
