"""Computes several answers side by side on one model.

A step is one forward pass: a token of each running answer, and within the rest of the budget a
piece of one prompt. Answers that came first come first. Where pages run out, the answer that came
last loses its own and is computed again later, which its reader does not notice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from engine.errors import Cancelled, OutOfDeviceMemory
from engine.generation.scheduling.ahead import Ahead
from engine.generation.scheduling.delivery import Delivery
from engine.generation.scheduling.drafts import Drafts
from engine.generation.scheduling.pace import Pace
from engine.generation.scheduling.places import CHECKPOINT_BYTES, Places
from engine.generation.scheduling.requests import Request
from engine.generation.scheduling.rows import pass_rows, sampling_wishes
from engine.generation.scheduling.seats import Seats
from engine.generation.scheduling.seeing import (
    PictureFeatures,
    n_with_one_new,
    picture_rows,
    with_text_alone,
)
from engine.generation.work import Follow, check_prompt
from engine.model.forward.batch import Batch, PictureRows, Piece
from engine.model.forward.pages import PAGE
from engine.runtime.timeline import timed
from engine.vision.images.placed import NO_PICTURES

if TYPE_CHECKING:
    from engine.generation.work import Found
    from engine.runtime.model_runner import ModelRunner
    from engine.runtime.timeline import TokenTimes
    from engine.vision.images.placed import PlacedPictures

T = TypeVar("T")


class Scheduler:
    """The answers that are computed on one runtime.

    One thread may call it at a time.

    Args:
        checkpoint_bytes: largest number of bytes of host memory for kept recurrent states.
        drafts: guesses of what answers go on with; None for none.

    Attributes:
        places: the cache that the answers share.
        drafts: the guesses; may be replaced between two steps.
        encoder: encoder of pictures; None where the model cannot see.
    """

    def __init__(
        self,
        runtime: ModelRunner,
        checkpoint_bytes: int = CHECKPOINT_BYTES,
        drafts: Drafts | None = None,
    ) -> None:
        self._runtime = runtime
        self.n_ctx = runtime.n_ctx
        self.places = Places(runtime, checkpoint_bytes)
        self._ahead = Ahead(runtime)
        self._seats = Seats(self.places, self._ahead)
        self._delivery = Delivery(
            self._seats,
            self.places,
            check=lambda work: self.check(work.ids, work.pictures),
            forget=lambda request: self.drafts.forget(request),  # which may be others by then
        )
        self._pace = Pace()
        self.drafts = drafts or Drafts()
        self.encoder: PictureFeatures | None = None

    @property
    def requests(self) -> Sequence[Request]:
        """The answers that are not over, in the order in which they came."""
        return tuple(self._seats.requests)

    @property
    def last(self) -> Sequence[int]:
        """Tokens of the sequence that was computed last, as far as they were cached then."""
        return self._seats.last

    @property
    def is_idle(self) -> bool:
        """Whether no answer can be computed: all are unread, or wait for their background work."""
        return not self._seats.active

    def note_last(self, ids: Sequence[int]) -> None:
        """Note that a sequence was put into the cache from elsewhere."""
        self._seats.last = ids

    def submit(self, request: Request) -> None:
        """Take a new answer, which begins with the next step."""
        self._seats.requests.append(request)

    def step(self) -> None:
        """Compute a pass for the answers whose events are read.

        What fails ends the answers concerned; their `error` says so.

        Raises:
            BaseException: what is no `Exception`, such as a person's interruption.
        """
        try:
            self._delivery.end_unwanted()
            for request in self.requests:
                background = request.background
                is_new = request.work is None and background is None and not request.has_unread
                if is_new or (background is not None and background.is_done):
                    self._delivery.advance(request, partial(request.advance, None))
            self._admit()
            self._compute()
        except Exception as error:  # noqa: BLE001 what one answer has caused has ended that one
            self._fail(error)
        except BaseException:
            self.forget()
            raise

    # who is computed

    def _admit(self) -> None:
        """Give places to answers that have none, in their order, as long as there is room.

        One prompt at a time is computed: others would only hold pages meanwhile.
        """
        active = self._seats.active
        for request in active:
            if any(other.place and other.n_missing > 1 for other in active):
                return
            if request.place is None and not self._seats.open(request):
                return

    # computing

    def _compute(self) -> None:
        """Compute a pass of tokens that are next, and a piece of a prompt."""
        active = self._seats.active
        guesses = self._guesses_ahead(active)
        is_followed = not guesses or self._ahead.is_beyond
        if len(active) == 1 and is_followed and self._follow_ahead(active[0], bool(guesses)):
            return
        begun = time.perf_counter()
        self._seats.stop_ahead()
        lost_s = time.perf_counter() - begun
        singles = [r for r in active if r.place and r.n_missing == 1 and self._can_add(r)]
        prompt = next((r for r in active if r.place and r.n_missing > 1), None)
        singles = singles[: self._runtime.n_batch - bool(prompt)]
        n = self._cut(prompt, len(singles)) if prompt else 0
        seen = self._see(prompt, n) if n and prompt and prompt.pictures else ()
        singles = [r for r in singles if r.place]  # the prompt may be older, and have taken one's
        if seen is None:
            return
        if n and prompt:
            self._run(prompt, n, singles, seen)
        elif singles:
            self._run(None, 0, singles, guesses=guesses, lost_s=lost_s)

    def _see(self, request: Request, n: int) -> tuple[PictureRows, ...] | None:
        """Return the rows of pictures among the next n tokens of a prompt.

        Returns:
            None if that has failed, which ends the answer.
        """
        found: list[PictureRows] = []

        def look() -> None:
            try:
                found.extend(picture_rows(request, n, self.encoder))
            except Cancelled:
                request.cancel()

        self._delivery.advance(request, look)
        return None if request.is_over else tuple(found)

    def _can_add(self, request: Request) -> bool:
        """Make room for one more token; tell the answer if there can be none."""
        if not self._seats.reserve(request, 1):
            if request.place is not None:
                self._delivery.advance(request, request.refuse)
            return False
        return True

    def _cut(self, request: Request, n_singles: int) -> int:
        """Return how many tokens of a prompt to compute next, for which there are pages."""
        assert request.place is not None
        n = min(request.n_missing, self._runtime.n_batch - n_singles)
        if n_singles:
            n = n_with_one_new(request, min(n, self._pace.n), self.encoder)
        if not self._runtime.can_rewind:
            n = min([n, *(mark - request.place.n for mark in request.marks(request.place.n))])
        while self.places.room(request.place) < n and self._seats.preempt_unread(request):
            pass
        n = max(1, min(n, self.places.room(request.place)))
        n = request.pictures.piece(request.place.n, n)
        if self._seats.reserve(request, n):
            return n
        if request in self._seats.placed:
            self._delivery.advance(request, request.refuse)
        return 0

    def _run(
        self, prompt: Request | None, n: int, rows: Sequence[Request],
        seen: tuple[PictureRows, ...] = (), *,
        guesses: Mapping[Request, Sequence[int]] | None = None, lost_s: float = 0.0,
    ) -> None:  # fmt: skip
        """Compute n tokens of a prompt and the next token of each of `rows`; hand out the results.

        Without a prompt, guesses of what follows those tokens are computed as well.

        Args:
            seen: rows of pictures among the tokens of the prompt.
            guesses: these guesses; None if they are yet to be made.
            lost_s: seconds that have passed before, which a device has computed in vain.
        """
        requests = [prompt, *rows] if prompt else list(rows)
        begun, made_s = time.perf_counter() - lost_s, self.drafts.made_s
        if guesses is None:
            guesses = {} if prompt else self._guesses(rows)
        is_whole = prompt is not None and prompt.n_missing == n
        done = requests if is_whole else list(rows)
        ids, pieces = pass_rows(requests, guesses, n if prompt else 1)
        ids = with_text_alone(ids) if seen else ids
        places = prompt.pictures.places(pieces[0].n_past, n) if prompt and seen else ()
        batch = Batch(pieces, n - is_whole, pictures=seen, places=places)
        wishes = sampling_wishes(done, guesses)
        try:
            passed = time.perf_counter()
            found, times = self._timed(done, lambda: self._runtime.sample(ids, batch, wishes))
            passed = time.perf_counter() - passed
        except OutOfDeviceMemory as error:
            self._fail(error, [prompt] if prompt else requests)
            return
        if prompt is not None and rows:  # somebody has waited for it
            self._pace.note(n, passed)
        for request in requests:
            assert request.place is not None
            at = request.place.n
            request.place.sequence.append(request.wanted[at : at + (n if request is prompt else 1)])
            self._seats.last = request.place.sequence.ids
        if prompt is not None:
            self._note_progress(prompt)
        if guesses:
            self.drafts.note_seconds(rows, time.perf_counter() - begun)
        self._hand_out(done, guesses, found, times)
        if prompt is None:  # with what the host does around a pass, which a small model waits for
            seconds = time.perf_counter() - begun - (self.drafts.made_s - made_s)
            self.drafts.control.note_pass(len(ids), seconds)

    def _hand_out(
        self, requests: Sequence[Request], guesses: Mapping[Request, Sequence[int]],
        found: Iterable[Found], times: TokenTimes | None,
    ) -> None:  # fmt: skip
        """Send the results of a pass to its answers, in the order of its rows."""
        results = iter(found)
        for request in requests:
            self._delivery.deliver(request, next(results), times)
            guess = guesses.get(request, ())
            if guess:
                behind = list(islice(results, len(guess)))
                checked = self._delivery.deliver_guessed(request, guess, behind)
                self.drafts.note(request, *checked)

    def _guesses_ahead(self, active: Sequence[Request]) -> Mapping[Request, Sequence[int]] | None:
        """Return the guesses for which a device is to stop sampling ahead; none if it goes on.

        Returns:
            None where there is nothing to stop: they are made when the pass is.
        """
        if len(active) != 1 or self._runtime.token_source is None:
            return None
        (request,) = active
        if request.place is None or request.n_missing != 1:
            return None
        return self._guesses(active)

    def _guesses(self, rows: Sequence[Request]) -> Mapping[Request, Sequence[int]]:
        """Return the tokens to check behind the next ones of answers, and set places apart."""
        most = self.places.most_guesses(len(rows))
        guesses = self.drafts.guesses(self._runtime, rows, most)
        for request, guess in guesses.items():
            assert request.place is not None
            self.places.set_apart(request.place, len(guess))
        return guesses

    def _timed(
        self, requests: Sequence[Request], compute: Callable[[], T]
    ) -> tuple[T, TokenTimes | None]:
        """Compute, and measure it if one of the answers wants to know the times."""
        asking = [r for r in requests if isinstance(r.work, Follow) and r.work.is_timed]
        if not asking:
            return compute(), None
        assert asking[0].place is not None
        return timed(self._runtime.ranks, asking[0].place.n, compute, self._ahead.sampled_at)

    def _note_progress(self, request: Request) -> None:
        """Tell how far a prompt is, and keep its recurrent states where that is worth it."""
        assert request.place is not None
        request.tell_progress(self._runtime.n_running)
        if not self._runtime.can_rewind and request.place.n in request.marks(0):
            self.places.keep(request.place)

    def check(self, ids: Sequence[int], pictures: PlacedPictures = NO_PICTURES) -> None:
        """Check that tokens can be computed.

        Args:
            pictures: pictures among them.

        Raises:
            PromptError: no tokens, tokens that the model does not have, or more than fit.
        """
        check_prompt(ids, self._runtime.n_vocab, self.n_ctx, pictures)

    def _fail(self, error: Exception, failed: Sequence[Request] | None = None) -> None:
        """End answers with an error; what is cached may be spoilt, so others are computed again.

        Args:
            failed: the answers; None for all that are computed.
        """
        for request in self._seats.active if failed is None else failed:
            request.fail(error)
        self.forget()
        for request in self.requests:
            if request.is_over:
                self._delivery.end(request)

    def _follow_ahead(self, request: Request, is_last: bool) -> bool:
        """Have a device compute a token and sample the next one; return False if it cannot.

        Args:
            is_last: whether it is not to go beyond that token, behind which guesses are checked.
        """
        work, place = request.work, request.place
        if not isinstance(work, Follow) or place is None or request.n_missing > 1:
            return False
        if self._ahead.request is not request:
            self._seats.stop_ahead()
        if not self._seats.reserve(request, 1):
            return False
        shift = request.pictures.shift(place.n)
        piece = Piece(place.n, 1, place.tables, place.slot, place.seat, shift=shift)
        if not self._ahead.can_serve(work):
            return False
        n_left = min(work.n_left, self.n_ctx - place.n, PAGE - place.n % PAGE)
        if is_last:
            n_left = 1
            place.ahead.clear()
        begun = time.perf_counter()
        found, times = self._timed(
            [request], lambda: self._ahead.follow(request, work, piece, n_left)
        )
        if found is None:  # nobody knows what the states hold
            self._seats.release(request, is_kept=False)
            return True
        place.sequence.append([work.token])
        self._seats.last = place.sequence.ids
        self._delivery.deliver(request, found, times)
        self.drafts.control.note_pass(1, time.perf_counter() - begun)
        return True

    # everything between two steps

    def forget(self) -> None:
        """Forget all that is cached; answers under way are computed again."""
        with suppress(Exception):  # who has failed need not be able to stop
            self._seats.stop_ahead()
        for request in self._seats.placed:
            self._seats.release(request, is_kept=False)
        self.places.clear()
        self._seats.last = ()

    def settle(self) -> None:
        """Wait until devices have computed all that was started, and sample nothing ahead.

        Raises:
            EngineError: a device has failed; all that is cached is forgotten then.
        """
        try:
            self._seats.stop_ahead()
            self._runtime.finish()
        except BaseException:
            self.forget()
            raise

    @contextmanager
    def emptied(self) -> Iterator[Places]:
        """Yield the cache while no answer has a place; they get theirs back with later steps."""
        self.settle()
        for request in self._seats.placed:
            self._seats.release(request)
        yield self.places

    def move(self, runtime: ModelRunner) -> None:
        """Go on with another runtime that has the same pages; see `emptied`."""
        self._runtime = runtime
        self.places.move(runtime)
        self._ahead.move(runtime)
