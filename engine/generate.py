"""From a prompt to text: prefill in chunks, decode, stop rules, a full context.

Knows token ids and text, not devices. One `Session` holds what is in the KV cache, so that the part
that a new prompt has in common with the last one is not computed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine.config import SamplingParams
from engine.errors import ContextOverflow, EngineError, PromptError
from engine.events import (
    ContextShifted,
    Event,
    Finished,
    FinishReason,
    PrefillProgress,
    Timings,
    TokenText,
    Usage,
)
from engine.sampler import Sampler
from engine.timeline import TokenTimes, timed

if TYPE_CHECKING:
    from engine.runtime import Logits, Runtime
    from engine.text import StreamDecoder, Tokenizer


class Session:
    """The tokens that are in the KV cache of a runtime, and how more get there."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.n_ctx = runtime.n_ctx  # another split does not change it
        self.ids: list[int] = []
        self._saved: list[int] = []
        self._turn = 0

    @property
    def n_saved(self) -> int:
        """Of how many of the cached tokens the recurrent states are that were saved last."""
        n = len(self._saved)
        return n if self.ids[:n] == self._saved else 0

    def move(self, runtime: Runtime) -> None:
        """Go on with a runtime that holds the same as the one before."""
        self._runtime = runtime

    def hold(self, ids: Sequence[int], n_saved: int) -> None:
        """Note that the cache was filled from elsewhere; answers that used it cannot go on.

        Args:
            n_saved: of how many of `ids` the saved recurrent states are.
        """
        self.begin()
        self.ids = list(ids)
        self._saved = self.ids[:n_saved]

    def check(self, ids: Sequence[int]) -> None:
        """Raises:
        PromptError: no tokens, tokens that the model does not have, or more than fit.
        """
        if not ids:
            raise PromptError("The prompt is empty.", "Write something first.")
        n_vocab = self._runtime.hp.n_vocab
        if not 0 <= min(ids) <= max(ids) < n_vocab:
            raise PromptError(f"The prompt has token ids outside 0 to {n_vocab - 1}.")
        if len(ids) > self.n_ctx:
            raise ContextOverflow(len(ids), self.n_ctx)

    def begin(self) -> int:
        """Take the cache for one use; an earlier one cannot go on after that."""
        self._turn += 1
        return self._turn

    def keep_common(self, ids: Sequence[int]) -> int:
        """Forget what is cached behind the common prefix with `ids`; returns its length.

        The last token of `ids` never counts: its logits are wanted. A recurrent state cannot be
        cut; it goes back to where it was saved, or to the start.
        """
        n = 0
        limit = min(len(self.ids), len(ids) - 1)
        while n < limit and self.ids[n] == ids[n]:
            n += 1
        if n < len(self.ids) and not self._runtime.can_rewind:
            n = self._go_back(n)
        del self.ids[n:]
        return n

    def _go_back(self, n: int) -> int:
        """Restore a recurrent state of the first `n` tokens or fewer; returns of how many."""
        n_saved, found = len(self._saved), self.ids
        self.ids = []  # until the state is whole again
        if not 0 < n_saved <= n or found[:n_saved] != self._saved:
            return 0
        self._runtime.restore_recurrent()
        self.ids = found
        return n_saved

    def save(self) -> None:
        """Make a recurrent state able to come back to the tokens that are cached now."""
        if not self._runtime.can_rewind and self.ids:
            self._saved = []  # until the copy is whole
            self._runtime.save_recurrent()
            self._saved = list(self.ids)

    def forward(self, ids: Sequence[int], first_logit: int, turn: int) -> Logits:
        """Compute `ids` after what is cached; see `Runtime.forward`.

        Raises:
            PromptError: the cache was taken for another use since `turn` began.
        """
        if turn != self._turn:
            raise PromptError(
                "The model was asked something else in the meantime.", "Ask once more."
            )
        n_past = len(self.ids)
        try:
            logits = self._runtime.forward(ids, n_past, first_logit)
        except BaseException:
            self.ids.clear()
            raise
        self.ids.extend(ids)
        return logits

    def timed(self, token: int, turn: int) -> tuple[Logits, TokenTimes]:
        """Compute one token as `forward` does, and say what took how long."""
        at = len(self.ids)
        return timed(self._runtime, at, lambda: self.forward([token], 0, turn))

    def chunks(self, ids: Sequence[int]) -> Iterator[Sequence[int]]:
        """Cut what is not cached of `ids` into batches.

        Before the last token a recurrent state is saved: a next prompt that begins like this one,
        or is the same, goes on from there.
        """
        step, stop = self._runtime.n_batch, len(ids)
        if not self._runtime.can_rewind:
            stop -= 1
        for start in range(len(self.ids), stop, step):
            yield ids[start : min(start + step, stop)]
        if stop < len(ids):
            self.save()
            yield ids[stop:]


class StopMatcher:
    """Finds stop strings in a stream, holding back text that may turn out to be one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Add text; returns what can be shown and whether a stop string was completed."""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = self._longest_possible_start()
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown, False

    def flush(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _longest_possible_start(self) -> int:
        longest = max((len(stop) for stop in self._stops), default=0)
        for size in range(min(longest - 1, len(self._held)), 0, -1):
            tail = self._held[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0


class Generation:
    """One answer.

    Args:
        tokenizer: None for a model without vocabulary: token ids come without text.
        n_keep: tokens at the start of the prompt that a shift of the context never drops.
        is_cancelled: asked before each token and each chunk of the prompt.
        timed_every: of one token in so many it is told where its time went; 0 for none.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        n_keep: int,
        is_cancelled: Callable[[], bool],
        timed_every: int = 0,
    ) -> None:
        self._session = session
        self._params = params
        self._n_keep = n_keep
        self._is_cancelled = is_cancelled
        self._timed_every = timed_every
        self._sampler = Sampler(params)
        self._stop = StopMatcher(params.stop)
        self._decoder: StreamDecoder | None = tokenizer.stream() if tokenizer else None
        self._eog = tokenizer.eog_ids if tokenizer and not params.ignore_eos else frozenset[int]()
        self._never = list(tokenizer.never_ids) if tokenizer else []
        self._pending: list[int] = []
        self._is_stopped = False
        self._turn = self._n_prompt = self._n_cached = self._n_drawn = 0
        self._start = self._prefilled = self._first = self._last = 0.0

    def run(self, prompt: Sequence[int]) -> Iterator[Event]:
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

    def _prefill(self, ids: Sequence[int]) -> Generator[Event, None, Logits | None]:
        """Compute what is not cached of `ids`; returns the last row of logits, None if stopped."""
        logits = None
        total = len(ids) - len(self._session.ids)
        done = 0
        for chunk in self._session.chunks(ids):
            if self._is_cancelled():
                return None
            logits = self._session.forward(chunk, len(chunk) - 1, self._turn)[0]
            done += len(chunk)
            yield PrefillProgress(done, total)
        return logits

    def _decode(self, logits: Logits) -> Generator[Event, None, FinishReason]:
        """Draw tokens until something ends it; returns the reason."""
        while self._n_drawn < self._params.max_tokens:
            if self._is_cancelled():
                return "cancelled"
            token = self._draw(logits)
            if token in self._eog:
                return "stop"
            self._last = time.perf_counter()
            self._n_drawn += 1
            self._sampler.accept(token)
            self._pending.append(token)
            is_stopped = yield from self._emit(self._decoder.feed(token) if self._decoder else "")
            if is_stopped:
                return "stop"
            if self._n_drawn == self._params.max_tokens:
                break
            if len(self._session.ids) >= self._session.n_ctx:
                if self._params.on_overflow == "stop" or not self._can_shift():
                    return "context"
                shifted = yield from self._shift()
                if not shifted:
                    return "cancelled"
            logits = yield from self._next(token)
        return "length"

    def _next(self, token: int) -> Generator[Event, None, Logits]:
        """The logits after one more token."""
        if not self._timed_every or self._n_drawn % self._timed_every:
            row: Logits = self._session.forward([token], 0, self._turn)[0]
            return row
        logits, times = self._session.timed(token, self._turn)
        yield times
        row = logits[0]
        return row

    def _draw(self, logits: Logits) -> int:
        logits[self._never] = -np.inf
        try:
            token = self._sampler.sample(logits)
        except EngineError:
            self._session.ids.clear()  # the cache may hold what made the logits useless
            raise
        if not self._first:
            self._first = self._last = time.perf_counter()
        return token

    def _can_shift(self) -> bool:
        return self._session.n_ctx - self._n_keep >= 4

    def _shift(self) -> Generator[Event, None, bool]:
        """Drop the older half of what may be dropped and compute the rest again, exactly."""
        ids = list(self._session.ids)
        n_dropped = (len(ids) - self._n_keep) // 2
        kept = ids[: self._n_keep] + ids[self._n_keep + n_dropped :]
        yield ContextShifted(n_dropped)
        self._session.keep_common(kept)
        logits = yield from self._prefill(kept)
        return logits is not None

    def _emit(self, text: str) -> Generator[Event, None, bool]:
        """Yield what can be shown now; returns whether a stop string ended the answer."""
        shown, self._is_stopped = self._stop.feed(text)
        if shown or self._decoder is None:
            yield TokenText(shown, tuple(self._pending))
            self._pending.clear()
        return self._is_stopped

    def _flush(self) -> Generator[Event, None, None]:
        """Yield what was held back; behind a stop string nothing is shown."""
        rest = self._decoder.flush() if self._decoder else ""
        shown = ""
        if not self._is_stopped:
            shown, is_stopped = self._stop.feed(rest)
            shown += "" if is_stopped else self._stop.flush()
        if shown or self._pending:
            yield TokenText(shown, tuple(self._pending))
            self._pending.clear()

    def _usage(self) -> Usage:
        return Usage(self._n_prompt, self._n_cached, self._n_drawn)

    def _timings(self) -> Timings:
        prompt_s = self._prefilled - self._start
        decode_s = self._last - self._first
        n_computed = self._n_prompt - self._n_cached
        return Timings(
            prompt_s=prompt_s,
            decode_s=decode_s,
            first_token_s=self._first - self._start if self._first else 0.0,
            prompt_per_s=n_computed / prompt_s if prompt_s else 0.0,
            decode_per_s=(self._n_drawn - 1) / decode_s if self._n_drawn > 1 and decode_s else 0.0,
        )
