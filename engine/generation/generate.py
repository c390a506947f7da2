"""Generation of an answer: prefill in batches, decode, stop rules, a full context.

Knows token ids and text, not devices; a `Session` holds what is in the KV cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine.config.sampling import SamplingParams
from engine.errors import EngineError
from engine.generation.banned import BannedStrings, Said
from engine.generation.results import (
    ContextShifted,
    Finished,
    FinishReason,
    GenerationEvent,
    PrefillProgress,
    Timings,
    TokenText,
    Usage,
)
from engine.sampling.sampler import Sampler

if TYPE_CHECKING:
    from engine.generation.session import Session
    from engine.sampling.token_source import Logits
    from engine.text.stream import StreamDecoder
    from engine.text.tokenizer import Tokenizer


class StopMatcher:
    """Search for stop strings in streamed text, holding back what may turn out to be one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Add text; return what can be shown, and whether a stop string was completed."""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = self._longest_possible_start()
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown, False

    def would_stop(self, text: str) -> bool:
        """Return whether a stop string would be complete with more text."""
        return any(stop in self._held + text for stop in self._stops)

    def flush(self) -> str:
        """Return the text that was held back and did not become a stop string."""
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
    """Return `ids` if an answer of these tokens has shown exactly `text` so far; else none."""
    if not all(0 <= token < tokenizer.n_vocab for token in ids):
        return ()
    decoder, stop = tokenizer.stream(), StopMatcher(stops)
    shown = "".join(stop.feed(decoder.feed(token))[0] for token in ids)
    return tuple(ids) if shown == text else ()


class Generation:
    """One answer of a model, from its prompt to its end.

    Args:
        tokenizer: tokenizer of the model; None without a vocabulary: token ids come without text.
        n_keep: number of tokens at the start of the prompt that a context shift never drops.
        is_cancelled: asked before each token and each batch of the prompt.
        timed_every: interval, in tokens, at which a token's times are measured; 0 for none.
        begun: tokens at the end of the prompt that an earlier part of this answer has had.
        said: text of that part.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        n_keep: int,
        is_cancelled: Callable[[], bool],
        timed_every: int = 0,
        begun: Sequence[int] = (),
        said: str = "",
    ) -> None:
        self._session = session
        self._params = params
        self._n_keep = n_keep
        self._is_cancelled = is_cancelled
        self._timed_every = timed_every
        self._sampler = Sampler(params, tokenizer.token_bytes if tokenizer else None)
        self._stop = StopMatcher(params.stop)
        self._decoder: StreamDecoder | None = tokenizer.stream() if tokenizer else None
        self._eog = tokenizer.eog_ids if tokenizer and not params.ignore_eos else frozenset[int]()
        self._never = list(tokenizer.never_ids) if tokenizer else []
        self._pending: list[int] = []
        self._is_stopped = False
        for token in begun:  # leave half a character, or half a stop string, where it was
            self._stop.feed(self._decoder.feed(token) if self._decoder else "")
        self._banned = BannedStrings(params.banned_strings if tokenizer else (), said)
        self._not_here: dict[int, list[int]] = {}  # tokens, by the number of sampled ones before
        self._most = params.most_tokens - len(begun)
        self._turn = self._n_prompt = self._n_cached = self._n_sampled = 0
        self._start = self._prefilled = self._first = self._last = 0.0

    def run(self, prompt: Sequence[int]) -> Iterator[GenerationEvent]:
        """Yield progress and text, and at the end `Finished`.

        Raises:
            EngineError: the prompt cannot be used, or a device failed.
        """
        self._session.check(prompt)
        self._turn = self._session.begin()
        self._start = time.perf_counter()
        self._n_prompt = len(prompt)
        self._n_cached = self._session.keep_common(prompt)
        for token in prompt:
            self._sampler.accept(token)
        logits = yield from self._prefill(prompt)
        self._prefilled = time.perf_counter()
        reason: FinishReason = "cancelled"
        if logits is not None:
            reason = yield from self._decode(logits)
        yield from self._flush()
        yield Finished(reason, self._usage(), self._timings())

    def _prefill(
        self, ids: Sequence[int], *, is_told: bool = True
    ) -> Generator[GenerationEvent, None, Logits | None]:
        """Compute the tokens of `ids` that are not cached.

        Args:
            is_told: whether to yield the progress.

        Returns:
            Logits of the last token; None if cancelled.
        """
        logits = None
        total = len(ids) - len(self._session.ids)
        done = 0
        for chunk, first_logit in self._session.chunks(ids):
            if self._is_cancelled():
                return None
            logits = self._session.forward(chunk, first_logit, self._turn)
            done += len(chunk)
            if is_told:
                yield PrefillProgress(done - self._session.n_running, total)
        return None if logits is None else logits[0]

    def _decode(self, found: int | Logits) -> Generator[GenerationEvent, None, FinishReason]:
        """Generate tokens until a stop rule ends the answer; return the reason.

        Args:
            found: the first token, or the logits to sample it from.
        """
        while self._n_sampled < self._most:
            if self._is_cancelled():
                return "cancelled"
            token = self._token_from(found)
            if token in self._eog:
                return "stop"
            self._last = time.perf_counter()
            self._n_sampled += 1
            self._sampler.accept(token)
            if n_wrong := self._hear(token):
                logits = yield from self._go_back(token, n_wrong)
                if logits is None:
                    return "cancelled"
                found = logits
                continue
            is_stopped = yield from self._show()
            if is_stopped:
                return "stop"
            if self._n_sampled == self._most:
                break
            self._session.check_turn(self._turn)
            if self._session.is_full:
                if self._params.on_overflow == "stop" or not self._can_shift():
                    return "context"
                shifted = yield from self._shift()
                if not shifted:
                    return "cancelled"
            found = yield from self._next(token)
        return "length"

    def _hear(self, token: int) -> int:
        """Add a token to the text; return how many to take back, as they make a banned string."""
        if self._decoder is None:
            return self._banned.feed(Said(token, ""))
        begun = self._decoder.begun
        return self._banned.feed(Said(token, self._decoder.feed(token), begun))

    def _go_back(self, token: int, n: int) -> Generator[GenerationEvent, None, Logits | None]:
        """Take back the last n tokens; return the logits for another one in place of the first.

        Args:
            token: the last token, which is not computed yet.

        Returns:
            None if cancelled.
        """
        wrong = self._banned.take_back(n)
        self._n_sampled -= n
        self._sampler.take_back(n)
        if self._decoder is not None:
            self._decoder.begun = wrong.begun
        here, tokens = self._n_sampled, self._not_here
        self._not_here = {at: tokens[at] for at in tokens if at <= here}
        self._not_here.setdefault(here, []).append(wrong.token)
        self._session.check_turn(self._turn)
        kept = [*self._session.read_ids, token][:-n]
        self._session.keep_common(kept)
        logits = yield from self._prefill(kept, is_told=False)
        return logits

    def _next(self, token: int) -> Generator[GenerationEvent, None, int | Logits]:
        """Compute a token; return the next one, or the logits to sample it from."""
        n_left = self._most - self._n_sampled
        wanted = (token, self._sampler, self._never, n_left, self._turn)
        if not self._timed_every or self._n_sampled % self._timed_every:
            return self._session.follow(*wanted)
        found, times = self._session.timed(*wanted)
        yield times
        return found

    def _token_from(self, found: int | Logits) -> int:
        token = found if isinstance(found, int) else self._sample(found)
        if not self._first:
            self._first = self._last = time.perf_counter()
        return token

    @property
    def _forbidden(self) -> list[int]:
        """Tokens that must not come next."""
        return self._never + self._not_here.get(self._n_sampled, [])

    def _sample(self, logits: Logits) -> int:
        forbidden = self._forbidden
        could_come = np.isfinite(logits.max())
        logits[forbidden] = -np.inf
        if could_come and len(forbidden) > len(self._never) and logits.max() == -np.inf:
            raise EngineError(
                "Whatever the answer goes on with would be a banned string.",
                "Ban fewer or longer strings.",
            )
        try:
            return self._sampler.sample(logits)
        except EngineError:
            self._session.ids.clear()  # the cache may hold what made the logits useless
            raise

    def _can_shift(self) -> bool:
        return self._session.n_ctx - self._n_keep >= 4

    def _shift(self) -> Generator[GenerationEvent, None, bool]:
        """Drop the older half of the tokens after the kept ones, and compute the rest again.

        Returns:
            False if cancelled.
        """
        ids = list(self._session.ids)
        n_dropped = (len(ids) - self._n_keep) // 2
        kept = ids[: self._n_keep] + ids[self._n_keep + n_dropped :]
        yield ContextShifted(n_dropped)
        self._session.check_turn(self._turn)  # the cache may be another answer's by now
        yield from self._settle(len(self._banned.held) - 1 - (len(kept) - self._n_keep))
        self._session.keep_common(kept)
        logits = yield from self._prefill(kept)
        return logits is not None

    def _show(self) -> Generator[GenerationEvent, None, bool]:
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
        """Yield the text of the first n tokens that were held back, if they are any."""
        for said in self._banned.release(max(0, n)):
            self._pending.append(said.token)
            yield from self._emit(said.text)

    def _emit(self, text: str) -> Generator[GenerationEvent, None, None]:
        """Yield what of a text is not held back as the beginning of a stop string."""
        shown, self._is_stopped = self._stop.feed(text)
        if shown or self._decoder is None:
            yield TokenText(shown, tuple(self._pending))
            self._pending.clear()

    def _flush(self) -> Generator[GenerationEvent, None, None]:
        """Yield the text that was held back, unless a stop string has ended the answer."""
        if not self._is_stopped:
            yield from self._settle(len(self._banned.held))
        rest = self._decoder.flush() if self._decoder else ""
        shown = ""
        if not self._is_stopped:
            shown, is_stopped = self._stop.feed(rest)
            shown += "" if is_stopped else self._stop.flush()
        if shown or self._pending:
            yield TokenText(shown, tuple(self._pending))
            self._pending.clear()

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
