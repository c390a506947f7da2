"""Computes several answers side by side on one model.

A step is one forward pass: a token of each running answer, and within the rest of the budget a
piece of one prompt. Answers that came first come first. Where pages run out, the answer that came
last loses its own and is computed again later, which its reader does not notice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Protocol, TypeVar

from engine.errors import Cancelled, ContextOverflow, GrammarError, OutOfDeviceMemory, PromptError
from engine.generation.cache_manager import CHECKPOINT_BYTES, CachePlace, Places
from engine.generation.drafts import Drafts
from engine.generation.kv_cache import OutOfPages
from engine.generation.sequence import Follow, Prefill, Request, check_prompt
from engine.model.forward.batch import Batch, PictureRows, Piece
from engine.model.forward.pages import PAGE
from engine.runtime.timeline import timed
from engine.vision.images.placed import FIRST_ID, NO_PICTURES

if TYPE_CHECKING:
    from torch import Tensor

    from engine.decoding.sampling.sampler import Logits, SamplingWish
    from engine.generation.sequence import Found
    from engine.runtime.interface import PagedRuntime
    from engine.runtime.timeline import TokenTimes
    from engine.util.progress import IsCancelled
    from engine.vision.images.placed import Picture, PlacedPictures


class Ahead:
    """The token source of a runtime, and the answer that it serves.

    Where a device has computed tokens that nobody has read, and recurrent states cannot go back,
    they become a part of the sequence: mostly it is the token that has ended the answer, with which
    the next turn begins.

    Attributes:
        request: the answer; None while there is none.
        sampled_at: when its last token was read, in seconds of `time.perf_counter`, as the device
            has computed the next one since then; None if it has not.
    """

    def __init__(self, runtime: PagedRuntime) -> None:
        self._runtime = runtime
        self.request: Request | None = None
        self.sampled_at: float | None = None
        self._lost: Follow | None = None  # what the device could not do, so that the host does it

    def move(self, runtime: PagedRuntime) -> None:
        """Go on with another runtime."""
        self._runtime = runtime

    @property
    def is_beyond(self) -> bool:
        """Whether states have seen the answer's last token already, and cannot go back."""
        source = self._runtime.token_source
        return self.request is not None and source is not None and source.is_beyond

    def can_serve(self, work: Follow) -> bool:
        """Return whether a device can do some work, and sample the next token."""
        source = self._runtime.token_source
        is_open = not work.wants_logits and work.allowed is None
        if source is None or not is_open or work is self._lost:
            return False
        return source.serve(work.sampler, work.never)

    def follow(
        self, request: Request, work: Follow, piece: Piece, n_left: int
    ) -> int | Logits | None:
        """Have the device compute a token and sample the next one; see `TokenSource.next`.

        Args:
            n_left: number of tokens for which there are pages.
        """
        source = self._runtime.token_source
        assert source is not None, "it can serve"
        self.request = request
        found = source.next(work.token, piece, n_left)
        self.sampled_at = time.perf_counter() if isinstance(found, int) else None
        if found is None:
            request.is_ahead, self._lost = True, work
        return found

    def stop(self, request: Request | None = None) -> None:
        """End sampling there, and note if the answer's states have seen what nobody has read.

        Args:
            request: answer to do it for, if it is served; None for any.
        """
        served, source = self.request, self._runtime.token_source
        if served is None or request not in (None, served):
            return
        self.request = self.sampled_at = None
        beyond = source.stop() if source is not None else ()
        if beyond:
            served.note_ahead(beyond)


class Seats:
    """The answers that are not over, and those of them that have a place in the cache.

    Args:
        places: the cache that the answers share.
        ahead: ends sampling on a device, which only one answer can have.

    Attributes:
        requests: the answers that are not over, in order of arrival.
        last: tokens of the sequence that was computed last, as far as they were cached then.
    """

    def __init__(self, places: Places, ahead: Ahead) -> None:
        self.requests: list[Request] = []
        self.last: Sequence[int] = ()
        self._places, self._ahead = places, ahead
        self._blocked: tuple[Request, int] | None = None
        self._n_freed = 0

    @property
    def active(self) -> list[Request]:
        """The answers that are to be computed further, in order of arrival."""
        return [r for r in self.requests if r.background is None and not r.has_unread]

    @property
    def placed(self) -> list[Request]:
        """The answers that have a place, in order of arrival."""
        return [request for request in self.requests if request.place]

    def open(self, request: Request) -> bool:
        """Give an answer a place; return whether there was room for it."""
        others = [r for r in self.active if r.place]
        if others and self._blocked == (request, self._n_freed):
            return False  # nothing has changed since the last time
        self.stop_ahead()
        while len(self.placed) >= self._places.most:
            if not self.preempt_unread(request):
                return False
        place = self._found_place(request)
        while place and self.placed:
            held = [other.place for other in self.placed if other.place]
            if self._places.has_room(place, len(request.wanted), held):
                break
            if not self.preempt_unread(request):
                self._places.close(place, is_kept=False)
                place = None
        if place is None:
            self._blocked = (request, self._n_freed)
            return False
        request.place = place
        request.note_place()
        return True

    def _found_place(self, request: Request) -> CachePlace | None:
        """Return a place with what is cached of an answer's tokens; None if there is none.

        It does not end within a picture whose tokens see each other.
        """
        wanted = request.wanted[:-1]
        while True:
            try:
                place = self._places.open(wanted)
            except OutOfPages:
                if not self._make_room(request):
                    return None
                continue
            n = request.pictures.whole(place.n)
            if n == place.n:
                return place
            self._places.close(place)
            wanted = wanted[:n]

    def reserve(self, request: Request, n: int) -> bool:
        """Make sure that there are pages for n more tokens; return False if there are none.

        The answer has lost its place then, unless it is the only one that has one.
        """
        while True:
            assert request.place is not None
            try:
                request.place.sequence.reserve(n)
            except OutOfPages:
                if not self._make_room(request):
                    return False
            else:
                return True

    def _make_room(self, request: Request) -> bool:
        """Preempt another answer for one; return False where that one has to wait itself."""
        if self.preempt_unread(request):
            return True
        placed = self.placed
        newer = placed and self.requests.index(placed[-1]) > self.requests.index(request)
        if newer:
            self.release(placed[-1])
        elif request.place and len(placed) > 1:
            self.release(request)
        return bool(newer)

    def preempt_unread(self, request: Request) -> bool:
        """Preempt the newest of the other answers whose events nobody reads, if there is one."""
        found = [r for r in self.placed if r is not request and r.has_unread]
        if found:
            self.release(found[-1])
        return bool(found)

    def stop_ahead(self) -> None:
        """End sampling on a device, so that something else can be computed."""
        request = self._ahead.request
        self._ahead.stop()
        if request is not None and request.is_ahead:
            self.release(request)

    def release(self, request: Request, *, is_kept: bool = True) -> None:
        """Take an answer's place away; what it computed can be found until it is overwritten."""
        self._ahead.stop(request)
        place, request.place = request.place, None
        if place is not None:
            self.last = place.sequence.ids
            self._n_freed += 1
            self._places.close(place, is_kept=is_kept)
        request.is_ahead = False

    def rewind(self, request: Request) -> None:
        """Cut an answer's sequence to what its work goes on from, or have it opened anew."""
        self.stop_ahead()
        place, wanted = request.place, request.wanted[:-1]
        if place and self._places.rewind(place, wanted):
            n = request.pictures.whole(place.n)
            if n == place.n or self._places.rewind(place, wanted[:n]):
                request.note_place()
                return
        if place:
            self.release(request, is_kept=False)
        request.note_place()


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


LONGEST_S = 0.25
"""Seconds that a pass may take where somebody reads other answers meanwhile."""

LEAST = 32
"""Smallest piece of a prompt, in tokens: with fewer, products wait for weights."""

FIRST = 128
"""Piece of a prompt, in tokens, until a pass has been measured."""


class Pace:
    """Measured time of prompts' pieces, and the piece that takes about `LONGEST_S`."""

    def __init__(self) -> None:
        self._token_s: float | None = None

    @property
    def n(self) -> int:
        """Number of tokens of a piece."""
        if self._token_s is None:
            return FIRST
        return max(LEAST, int(LONGEST_S / self._token_s))

    def note(self, n: int, seconds: float) -> None:
        """Note how long a pass with n tokens of a prompt took."""
        token_s = max(seconds, 1e-9) / n
        before = token_s if self._token_s is None else self._token_s
        self._token_s = (before + token_s) / 2


def pass_rows(
    requests: Sequence[Request], guesses: Mapping[Request, Sequence[int]], n_first: int
) -> tuple[list[int], tuple[Piece, ...]]:
    """Return the tokens of a pass and where they belong.

    Args:
        guesses: the tokens to compute behind the next ones of answers.
        n_first: number of tokens of the first answer.
    """
    ids, pieces = list[int](), list[Piece]()
    for request in requests:
        place, guess = request.place, guesses.get(request, ())
        assert place is not None
        n = 1 if pieces else n_first
        at, tables, shift = place.n, place.tables, request.pictures.shift(place.n)
        slots = [place.slot, place.slot, *(place.ahead or [place.slot] * len(guess))]
        for i, (source, goal) in enumerate(pairwise(slots)):
            pieces.append(Piece(at + i, 1 if i else n, tables, goal, place.seat, source, shift))
        ids += [*request.wanted[at : at + n], *guess]
    return ids, tuple(pieces)


def sampling_wishes(
    requests: Sequence[Request], guesses: Mapping[Request, Sequence[int]]
) -> list[SamplingWish | None]:
    """Return for each row with logits how its token may be sampled where they are.

    There is None for a row whose logits are wanted, as for all rows of an answer with guesses.
    """
    wishes: list[SamplingWish | None] = []
    for request in requests:
        guess = guesses.get(request, ())
        wish = request.work.wish if isinstance(request.work, Follow) and not guess else None
        wishes += [wish] + [None] * len(guess)
    return wishes


class PictureFeatures(Protocol):
    """The features of pictures, of which the last ones are kept."""

    def has(self, picture: Picture) -> bool:
        """Return whether the result for a picture is kept."""
        ...

    def encode(self, picture: Picture, is_cancelled: IsCancelled) -> Tensor:
        """Return the features of a picture, (tokens, n_embd).

        Raises:
            Cancelled: `is_cancelled` has returned True.
        """
        ...


def n_with_one_new(request: Request, n: int, encoder: PictureFeatures | None) -> int:
    """Return how many of the next n tokens of a prompt to compute while other answers wait.

    Of the pictures and tiles among them, one at most is not encoded yet.
    """
    assert request.place is not None
    at = request.place.n
    new = [
        placed.start
        for placed in request.pictures.among(at, at + n)
        if encoder is not None and not encoder.has(placed.picture)
    ]
    return n if len(new) < 2 else new[1] - at


def picture_rows(
    request: Request, n: int, encoder: PictureFeatures | None
) -> tuple[PictureRows, ...]:
    """Return the rows of pictures among the next n tokens of an answer's prompt.

    Raises:
        EngineError: a picture cannot be encoded.
        Cancelled: the answer was cancelled meanwhile.
    """
    assert request.place is not None
    at, found = request.place.n, list[PictureRows]()
    for start, picture in request.pictures.among(at, at + n):
        assert encoder is not None, "who has prompts with pictures can encode them"
        first, stop = max(at, start), min(at + n, start + picture.n)
        features = encoder.encode(picture, request.is_cancelled)[first - start : stop - start]
        rule = picture.rule
        whole = (start, stop) if rule.is_two_way else None
        found.append(PictureRows(first - at, features, whole, rule.only_in_windows))
    return tuple(found)


def with_text_alone(ids: Sequence[int]) -> list[int]:
    """Return ids in which some token of the vocabulary stands for those of pictures."""
    return [token if token < FIRST_ID else 0 for token in ids]


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
        runtime: PagedRuntime,
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

    def move(self, runtime: PagedRuntime) -> None:
        """Go on with another runtime that has the same pages; see `emptied`."""
        self._runtime = runtime
        self.places.move(runtime)
        self._ahead.move(runtime)
