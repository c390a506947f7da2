"""Generation of an answer: decoding, stop rules, banned strings, context shift.

It handles token ids and text, and yields the steps to compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from engine.decoding.sampling.sampler import Sampler, likeliest, logprobs_of
from engine.errors import ContextOverflow, EngineError
from engine.generation.results import (
    ContextShifted,
    Finished,
    FinishReason,
    GenerationEvent,
    Timings,
    TokenLogprob,
    TokenText,
    Usage,
)
from engine.generation.sequence import Decode, NotDone, Prefill, Step, StepResult, Steps
from engine.sampling_params import SamplingParams
from engine.vision.images.placed import NO_IMAGES, text_ids

if TYPE_CHECKING:
    from engine.decoding.grammar.matcher import Mask
    from engine.decoding.sampling.sampler import Logits
    from engine.generation.structured_output import AnswerConstraint
    from engine.text.tokenizer import StreamDecoder, Tokenizer
    from engine.vision.images.placed import PlacedImages


@dataclass(frozen=True, slots=True)
class AnswerToken:
    """A token of an answer.

    Attributes:
        text: characters that it completes.
        begun: bytes of an incomplete character before it.
        logprobs: its log probabilities, if requested.
    """

    token: int
    text: str
    begun: bytes = b""
    logprobs: tuple[TokenLogprob, ...] = ()


class BannedStrings:
    """Search for banned strings in streamed text; tokens that may be part of one are held back.

    Case is ignored. If a token completes several strings, the one that starts last counts, so that
    as little as possible is rolled back.

    Args:
        banned: strings to search for.
        said: text of the answer so far, which cannot be rolled back.

    Attributes:
        held: tokens held back because they may be part of a banned string, oldest first.
    """

    def __init__(self, banned: Sequence[str], said: str = "") -> None:
        self._banned = [_folded(text) for text in banned]
        self._n_tail = max((len(text) for text in self._banned), default=1) - 1
        self.held: list[AnswerToken] = []
        self._tail = ""  # end of the released text, in which a string may have started
        self._keep_tail(said)

    @property
    def held_text(self) -> str:
        """Text of the tokens that are held back."""
        return "".join(token.text for token in self.held)

    def feed(self, token: AnswerToken) -> int:
        """Add a token; return how many of the last tokens to roll back."""
        n_before = len(self._tail) + len(self.held_text)
        self.held.append(token)
        if not self._banned:
            return 0
        text = self._tail + _folded(self.held_text)
        begins = [text.rfind(ban, max(0, n_before - len(ban) + 1)) for ban in self._banned]
        begin = max(begins, default=-1)
        return 0 if begin < 0 else len(self.held) - self._token_at(begin)

    def take_back(self, n: int) -> AnswerToken:
        """Drop the last n tokens; return the first of them."""
        first = self.held[-n]
        del self.held[-n:]
        return first

    def n_settled(self, *, is_half: bool) -> int:
        """Return the number of tokens that cannot become part of a banned string.

        Args:
            is_half: whether the last token ends in the middle of a character.
        """
        text = self._tail + _folded(self.held_text)
        begin = len(text) - self._possible_start(text)
        is_over = not self._banned or (begin == len(text) and not is_half)
        return len(self.held) if is_over else self._token_at(begin)

    def release(self, n: int) -> list[AnswerToken]:
        """Release the first n tokens, which can no longer be rolled back, and return them."""
        released, self.held = self.held[:n], self.held[n:]
        self._keep_tail(self._tail + "".join(token.text for token in released))
        return released

    def _keep_tail(self, text: str) -> None:
        self._tail = _folded(text[max(0, len(text) - self._n_tail) :])

    def _possible_start(self, text: str) -> int:
        for size in range(min(self._n_tail, len(text)), 0, -1):
            tail = text[-size:]
            if any(len(ban) > size and ban.startswith(tail) for ban in self._banned):
                return size
        return 0

    def _token_at(self, place: int) -> int:
        """Return the index of the held token that contains a character; 0 if it is in the tail."""
        index_of, start = 0, len(self._tail)
        for index, token in enumerate(self.held):
            if start > place or (start == place and token.begun):
                break
            index_of = index
            start += len(token.text)
        return index_of


def _folded(text: str) -> str:
    return text.lower() if text.isascii() else "".join(map(_folded_character, text))


def _folded_character(char: str) -> str:
    for fold in (str.lower, str.casefold):
        if len(folded := fold(char)) == 1:
            char = folded
    return char


TextEvents = Generator[GenerationEvent, None, bool]
"""Generator of a text's events; returns whether a stop string ended the answer."""


MAX_LOGPROBS = 20
"""Maximum number of likeliest tokens per position, as in OpenAI's API."""


def check_n_logprobs(n: int) -> None:
    """Check the number of likeliest tokens to return per position.

    Raises:
        EngineError: it is not between 0 and `MAX_LOGPROBS`.
    """
    if not 0 <= n <= MAX_LOGPROBS:
        raise EngineError(
            "Log probabilities of {n} tokens per position are not available.",
            "Request 0 to {most}.",
            n=n,
            most=MAX_LOGPROBS,
        )


def token_logprob(logits: Logits, token: int, n: int) -> TokenLogprob:
    """Return the log probabilities of a token and of the n likeliest ones.

    Args:
        logits: logits as the model computed them, (n_vocab,).
    """
    logprobs = logprobs_of(logits)
    return TokenLogprob(token, float(logprobs[token]), tuple(likeliest(logprobs, n)))


class StopMatcher:
    """Search for stop strings in streamed text; what may be the start of one is held back.

    Attributes:
        found: the completed stop string; "" until then.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.found = ""
        self._stops = stops
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Add text; return the text to show, and whether a stop string was completed."""
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.found = min(found)
            shown, self._held = self._held[:at], ""
            return shown, True
        keep = self._longest_possible_start()
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown, False

    def would_stop(self, text: str) -> bool:
        """Return whether more text would complete a stop string."""
        return any(stop in self._held + text for stop in self._stops)

    def flush(self) -> str:
        """Return the held-back text, which did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _longest_possible_start(self) -> int:
        longest = max((len(stop) for stop in self._stops), default=0)
        for size in range(min(longest - 1, len(self._held)), 0, -1):
            tail = self._held[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0


def fitting_tokens(
    ids: Sequence[int], text: str, tokenizer: Tokenizer, stops: Sequence[str]
) -> tuple[int, ...]:
    """Return `ids` if an answer with these tokens would have shown exactly `text`, else no ids."""
    if not all(0 <= token < tokenizer.n_vocab for token in ids):
        return ()
    decoder, stop = tokenizer.stream(), StopMatcher(stops)
    shown = "".join(stop.feed(decoder.feed(token))[0] for token in ids)
    return tuple(ids) if shown == text else ()


class Generation:
    """One answer of a model, from its prompt to its end.

    Args:
        n_ctx: context size in tokens.
        tokenizer: the model's tokenizer; if None, token ids come without text.
        n_keep: number of tokens at the start of the prompt that a context shift never drops.
        timed_every: interval, in tokens, at which a token is timed; 0 for none.
        begun: tokens at the end of the prompt that are an earlier part of this answer.
        said: text of that part.
        n_logprobs: see `AnswerRequest`. Unless it is None, no device may sample; see `Decode`.
        shown: control tokens whose text is part of the answer.
        constraint: constraint on the answer, which has read that part; None for any text.
        is_read: returns whether the answer's parser needs no more text.

    Attributes:
        ids: tokens that were computed, from the start of the prompt.
        is_useless: whether the logits were invalid, so that the cache may be corrupted.
    """

    def __init__(
        self, n_ctx: int, tokenizer: Tokenizer | None, params: SamplingParams, n_keep: int,
        timed_every: int = 0, begun: Sequence[int] = (), said: str = "",
        n_logprobs: int | None = None, shown: Collection[int] = frozenset(),
        constraint: AnswerConstraint | None = None, is_read: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self.ids: list[int] = []
        self.is_useless = False
        self._n_ctx = n_ctx
        self._params = params
        self._n_keep = n_keep
        self._images = NO_IMAGES
        self._timed_every = timed_every
        self._constraint, self._is_read = constraint, is_read
        self._sampler = Sampler(params, tokenizer.token_bytes if tokenizer else None)
        self._stop = StopMatcher(params.stop)
        self._decoder: StreamDecoder | None = tokenizer.stream(shown=shown) if tokenizer else None
        self._eog = tokenizer.eog_ids if tokenizer and not params.ignore_eos else frozenset[int]()
        self._never = list(tokenizer.never_ids) if tokenizer else []
        self._n_logprobs = n_logprobs
        self._end: TokenLogprob | None = None
        self._pending: list[AnswerToken] = []
        self._is_stopped = False
        for token in begun:  # restore an incomplete character or stop string
            self._stop.feed(self._decoder.feed(token) if self._decoder else "")
        self._banned = BannedStrings(params.banned_strings if tokenizer else (), said)
        self._not_here: dict[int, list[int]] = {}  # excluded tokens, by number of sampled ones
        self._most = params.most_tokens - len(begun)
        self._n_prompt = self._n_cached = self._n_sampled = 0
        self._start = self._prefilled = self._first = self._last = 0.0

    def run(
        self, prompt: Sequence[int], marks: Sequence[int] = (),
        images: PlacedImages = NO_IMAGES,
    ) -> Steps:  # fmt: skip
        """Yield text, steps to compute, and finally `Finished`.

        Args:
            marks, images: see `Prefill`.

        Raises:
            EngineError: the prompt or the logits cannot be used.
        """
        self._start = time.perf_counter()
        self._n_prompt, self._images = len(prompt), images
        step = Prefill(prompt, marks, images=images)
        found = yield from self._prefill(step)
        self._n_cached = step.n_cached
        self._sampler.accept_all(text_ids(prompt))
        self._prefilled = time.perf_counter()
        reason: FinishReason
        if not isinstance(found, str):
            reason = yield from self._decode(found)
        elif found == "cancelled":
            reason = found
        else:
            raise ContextOverflow(self._n_prompt, self._n_ctx)
        yield from self._flush()
        yield Finished(reason, self._usage(), self._timings(), self._stop.found, self._end)

    def _prefill(self, step: Prefill) -> Generator[Step, StepResult | None, StepResult]:
        self.ids = list(step.ids)
        found = yield step
        assert found is not None, "a step has a result"
        return found

    def _decode(
        self, found: int | Logits
    ) -> Generator[GenerationEvent | Step, StepResult | None, FinishReason]:
        while self._n_sampled < self._most:
            token, logprobs = self._token_from(found)
            if token in self._eog:
                self._end = logprobs[0] if logprobs else None
                return "stop"
            self._last = time.perf_counter()
            self._n_sampled += 1
            self._sampler.accept(token)
            if n_wrong := self._hear(token, logprobs):
                following = yield from self._prefill(self._without(token, n_wrong))
            else:
                is_stopped = yield from self._show()
                if is_stopped or self._is_over:
                    return "stop"
                if self._n_sampled == self._most:
                    break
                following = yield from self._next(token)
            if isinstance(following, str):
                return following
            found = following
        return "length"

    @property
    def _is_over(self) -> bool:
        is_whole = self._constraint is not None and self._constraint.is_over
        return is_whole or self._is_read()

    def _hear(self, token: int, logprobs: tuple[TokenLogprob, ...]) -> int:
        """Add a token to the text; return the number of tokens to roll back."""
        if self._constraint is not None:
            self._constraint.accept(token)
        if self._decoder is None:
            return self._banned.feed(AnswerToken(token, "", b"", logprobs))
        begun = self._decoder.begun
        return self._banned.feed(AnswerToken(token, self._decoder.feed(token), begun, logprobs))

    def _without(self, token: int, n: int) -> Prefill:
        """Roll back the last n tokens; return the prefill that resamples the first of them."""
        wrong = self._banned.take_back(n)
        self._n_sampled -= n
        self._sampler.take_back(n)
        if self._constraint is not None:
            self._constraint.take_back(n)
        if self._decoder is not None:
            self._decoder.begun = wrong.begun
        here, tokens = self._n_sampled, self._not_here
        self._not_here = {at: tokens[at] for at in tokens if at <= here}
        self._not_here.setdefault(here, []).append(wrong.token)
        return Prefill([*self.ids, token][:-n], reports_progress=False, images=self._images)

    def _next(self, token: int) -> Generator[GenerationEvent | Step, StepResult | None, StepResult]:
        if len(self.ids) >= self._n_ctx:
            shifted = yield from self._shift()
            if shifted is not None:
                return shifted
        is_timed = bool(self._timed_every) and not self._n_sampled % self._timed_every
        n_left = self._most - self._n_sampled
        if self._constraint is not None and self._constraint.is_slow:
            n_left = 1  # so that nothing is drafted
        while True:
            found = yield Decode(
                token, self._sampler, self._never, n_left, is_timed,
                self._n_logprobs is not None, self._allowed,
            )  # fmt: skip
            assert found is not None, "a step has a result"
            if not (isinstance(found, str) and found == "context"):
                self.ids.append(token)
                return found
            shifted = yield from self._shift()
            if shifted is not None:
                return shifted

    def _token_from(self, found: int | Logits) -> tuple[int, tuple[TokenLogprob, ...]]:
        n = self._n_logprobs
        before = None if n is None or isinstance(found, int) else found.copy()
        token = found if isinstance(found, int) else self._sample(found)
        if not self._first:
            self._first = self._last = time.perf_counter()
        if n is None or before is None:
            return token, ()
        return token, (token_logprob(before, token, n),)

    @property
    def _allowed(self) -> Callable[[], Mask] | None:
        return None if self._constraint is None else partial(self._constraint.allowed, self._eog)

    @property
    def _forbidden(self) -> list[int]:
        return self._never + self._not_here.get(self._n_sampled, [])

    def _sample(self, logits: Logits) -> int:
        forbidden = self._forbidden
        was_possible = np.isfinite(logits.max())
        if self._constraint is not None:
            self._constraint.restrict(logits, self._eog)
        logits[forbidden] = -np.inf
        is_bound = self._constraint is not None or len(forbidden) > len(self._never)
        if was_possible and is_bound and logits.max() == -np.inf:
            message = "Every possible continuation is banned."
            if self._constraint is not None:
                message = "Every possible continuation is banned or violates the output format."
            raise EngineError(message, "Ban fewer or longer strings.")
        try:
            return self._sampler.sample(logits)
        except EngineError:
            self.is_useless = True
            raise

    def _shift(self) -> Generator[GenerationEvent | Step, StepResult | None, NotDone | None]:
        """Drop the older half of the tokens after the kept ones; if impossible, return why."""
        is_kept = self._params.on_overflow == "stop" or bool(self._images)
        if is_kept or len(self.ids) - self._n_keep < 4:
            return "context"
        n_dropped = (len(self.ids) - self._n_keep) // 2
        kept = self.ids[: self._n_keep] + self.ids[self._n_keep + n_dropped :]
        yield ContextShifted(n_dropped)
        yield from self._settle(len(self._banned.held) - 1 - (len(kept) - self._n_keep))
        found = yield from self._prefill(Prefill(kept))
        return found if isinstance(found, str) else None

    def _show(self) -> TextEvents:
        """Yield the text that can be shown now; return whether a stop string ended the answer."""
        banned = self._banned
        if self._stop.would_stop(banned.held_text):
            n_settled = len(banned.held)
        else:
            n_settled = banned.n_settled(
                is_half=self._decoder is not None and bool(self._decoder.begun)
            )
        yield from self._settle(n_settled)
        return self._is_stopped

    def _settle(self, n: int) -> Generator[GenerationEvent, None, None]:
        for token in self._banned.release(max(0, n)):
            self._pending.append(token)
            yield from self._emit(token.text)

    def _emit(self, text: str) -> Generator[GenerationEvent, None, None]:
        """Yield a text, except what may be the start of a stop string."""
        shown, self._is_stopped = self._stop.feed(text)
        if shown or self._decoder is None:
            yield self._event(shown)

    def _flush(self) -> Generator[GenerationEvent, None, None]:
        if not self._is_stopped:
            yield from self._settle(len(self._banned.held))
        rest = self._decoder.flush() if self._decoder else ""
        shown = ""
        if not self._is_stopped:
            shown, is_stopped = self._stop.feed(rest)
            shown += "" if is_stopped else self._stop.flush()
        if shown or self._pending:
            yield self._event(shown)

    def _event(self, text: str) -> TokenText:
        tokens, self._pending = self._pending, []
        logprobs = tuple(found for one in tokens for found in one.logprobs)
        return TokenText(text, tuple(one.token for one in tokens), logprobs=logprobs)

    def _usage(self) -> Usage:
        return Usage(self._n_prompt, self._n_cached, self._n_sampled)

    def _timings(self) -> Timings:
        prompt_s = self._prefilled - self._start
        decode_s = self._last - self._first
        n_computed, n_sampled = self._n_prompt - self._n_cached, self._n_sampled
        return Timings(
            prompt_s=prompt_s,
            decode_s=decode_s,
            first_token_s=self._first - self._start if self._first else 0.0,
            prompt_per_s=n_computed / prompt_s if prompt_s else 0.0,
            decode_per_s=(n_sampled - 1) / decode_s if n_sampled > 1 and decode_s else 0.0,
        )
