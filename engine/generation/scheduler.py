"""Scheduler: decides which sequences to compute in each step, and delivers the results.

A step has three parts. `schedule` decides which sequences are admitted to the cache or preempted,
and plans a forward pass: one token, with its drafts, per running sequence, and a piece of one
prompt within the remaining budget. `StepRunner.execute` computes the pass. `commit` appends the
tokens to their sequences and sends the results to the answers.

Sequences are served in order of arrival: if pages run out, the newest is preempted and recomputed
later, unnoticed by its reader. The scheduler handles token ids and pages, not text; it imports no
torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, TypeVarTuple

from engine.errors import Cancelled, ContextOverflow, GrammarError, OutOfDeviceMemory, PromptError
from engine.generation.cache_manager import CHECKPOINT_BYTES, KVCacheManager, SequenceCache
from engine.generation.drafts import Drafts
from engine.generation.kv_cache import OutOfPages
from engine.generation.sequence import Decode, Prefill, Status, check_prompt
from engine.generation.step_runner import StepPlan, StepRunner
from engine.model.forward.pages import PAGE
from engine.vision.images.placed import NO_IMAGES

if TYPE_CHECKING:
    from engine.generation.sequence import StepResult, TokenSequence
    from engine.generation.step_runner import StepOutput
    from engine.runtime.model_runner import ModelRunner
    from engine.runtime.timeline import TokenTimes
    from engine.vision.images.placed import PlacedImages

Args = TypeVarTuple("Args")

MAX_PASS_S = 0.25
"""Maximum seconds per pass while other answers are being read."""

MIN_PIECE = 32
"""Smallest piece of a prompt, in tokens; with fewer, reading weights limits the matmuls."""

FIRST_PIECE = 128
"""Size of a prompt's pieces, in tokens, until a pass has been measured."""


class PrefillBudget:
    """Number of prompt tokens per pass that fit in `MAX_PASS_S`, if there are other answers."""

    def __init__(self) -> None:
        self._token_s: float | None = None

    @property
    def n(self) -> int:
        """Number of tokens per piece."""
        if self._token_s is None:
            return FIRST_PIECE
        return max(MIN_PIECE, int(MAX_PASS_S / self._token_s))

    def note(self, n: int, seconds: float) -> None:
        """Note how long a pass with n prompt tokens took."""
        token_s = max(seconds, 1e-9) / n
        before = token_s if self._token_s is None else self._token_s
        self._token_s = (before + token_s) / 2


class Scheduler:
    """The sequences that are computed on one runtime.

    Only one thread may call it at a time.

    Args:
        checkpoint_bytes: host memory limit for checkpoints of recurrent states, in bytes.
        drafts: drafts for the sequences; None for none.

    Attributes:
        sequences: unfinished sequences, in order of arrival.
        cache: the cache that they share.
        runner: computes the steps.
        drafts: may be replaced between two steps.
        last: cached tokens of the sequence that was computed last.
    """

    def __init__(
        self,
        runtime: ModelRunner,
        checkpoint_bytes: int = CHECKPOINT_BYTES,
        drafts: Drafts | None = None,
    ) -> None:
        self._runtime = runtime
        self.n_ctx = runtime.n_ctx
        self.cache = KVCacheManager(runtime, checkpoint_bytes)
        self.runner = StepRunner(runtime)
        self.drafts = drafts or Drafts()
        self.sequences: list[TokenSequence] = []
        self.last: Sequence[int] = ()
        self._async = self.runner.async_decode
        self._budget = PrefillBudget()
        self._blocked: tuple[TokenSequence, int] | None = None
        self._n_freed = 0

    @property
    def running(self) -> list[TokenSequence]:
        """The sequences that are in the cache, in order of arrival."""
        return [sequence for sequence in self.sequences if sequence.cache]

    @property
    def _active(self) -> list[TokenSequence]:
        return [s for s in self.sequences if s.background is None and not s.has_unread]

    @property
    def is_idle(self) -> bool:
        """Whether nothing can be computed, as all answers wait for a reader or background work."""
        return not self._active

    def submit(self, sequence: TokenSequence) -> None:
        """Add a sequence, which starts with the next step."""
        self.sequences.append(sequence)

    def step(self) -> None:
        """Compute a pass for the answers that are being read.

        A failure ends the affected answers, which get the error.

        Raises:
            BaseException: for example KeyboardInterrupt.
        """
        try:
            self._finish_unwanted()
            self._begin()
            plan = self.schedule()
            if plan is None:
                return
            try:
                output = self.runner.execute(plan)
            except OutOfDeviceMemory as error:
                self._fail(error, [plan.prefill] if plan.prefill else plan.sequences)
                return
            self.commit(plan, output)
        except Exception as error:  # noqa: BLE001 an error in a single answer has already ended it
            self._fail(error)
        except BaseException:
            self.forget()
            raise

    def _finish_unwanted(self) -> None:
        for sequence in tuple(self.sequences):
            if sequence.is_dropped:
                sequence.close()
                self._finish(sequence)
            else:
                self._advance(sequence, sequence.cancel_if_asked)

    def _begin(self) -> None:
        for sequence in tuple(self.sequences):
            if sequence.step is None or sequence.background is not None:
                background = sequence.background
                is_new = sequence.status is Status.NEW and not sequence.has_unread
                if is_new or (background is not None and background.is_done):
                    self._advance(sequence, sequence.advance, None)

    # schedule: admission, preemption, and planning of a pass

    def schedule(self) -> StepPlan | None:
        """Plan the next step; return None if there is nothing to compute."""
        self._admit()
        active = self._active
        drafts = self._drafts_ahead(active)
        if len(active) == 1 and (not drafts or self._async.is_beyond):
            plan = self._plan_ahead(active[0], is_last=bool(drafts))
            if plan is not None:
                return plan
        begun = time.perf_counter()
        self._stop_ahead()
        lost_s = time.perf_counter() - begun
        decodes = [s for s in active if s.cache and s.n_missing == 1 and self._has_page(s)]
        prefill = next((s for s in active if s.cache and s.n_missing > 1), None)
        decodes = decodes[: self._runtime.n_batch - bool(prefill)]
        n = self._n_prefill(prefill, len(decodes)) if prefill else 0
        decodes = [s for s in decodes if s.cache]  # making room for a prompt may preempt one
        if prefill and n:
            is_last = prefill.n_missing == n
            return StepPlan(prefill, n, is_last, decodes, begun=time.perf_counter())
        if not decodes:
            return None
        begun, made_s = time.perf_counter() - lost_s, self.drafts.made_s
        if drafts is None:
            drafts = self._drafts(decodes)
        return StepPlan(decodes=decodes, drafts=drafts, begun=begun, made_s=made_s)

    def _admit(self) -> None:
        """Admit sequences in order while there is room, but only one prompt at a time."""
        active = self._active
        for sequence in active:
            if any(other.cache and other.n_missing > 1 for other in active):
                return
            if sequence.cache is None and not self._try_admit(sequence):
                return

    def _try_admit(self, sequence: TokenSequence) -> bool:
        others = [s for s in self._active if s.cache]
        if others and self._blocked == (sequence, self._n_freed):
            return False  # nothing has changed since the last attempt
        self._stop_ahead()
        while len(self.running) >= self.cache.max_sequences:
            if not self._preempt_unread(sequence):
                return False
        cache = self._allocate(sequence)
        while cache and self.running:
            held = [other.cache for other in self.running if other.cache]
            if self.cache.has_room(cache, len(sequence.tokens), held):
                break
            if not self._preempt_unread(sequence):
                self.cache.free(cache, is_kept=False)
                cache = None
        if cache is None:
            self._blocked = (sequence, self._n_freed)
            return False
        sequence.cache = cache
        sequence.note_cached()
        return True

    def _allocate(self, sequence: TokenSequence) -> SequenceCache | None:
        """Return a cache that does not end inside a two-way image; None if there is no room."""
        prefix = sequence.tokens[:-1]
        while True:
            try:
                cache = self.cache.allocate(prefix)
            except OutOfPages:
                if not self._make_room(sequence):
                    return None
                continue
            n = sequence.images.whole(cache.n)
            if n == cache.n:
                return cache
            self.cache.free(cache)
            prefix = prefix[:n]

    def _reserve(self, sequence: TokenSequence, n: int) -> bool:
        """Reserve pages for n more tokens; otherwise preempt the sequence, unless it is alone."""
        while True:
            assert sequence.cache is not None
            try:
                sequence.cache.sequence.reserve(n)
            except OutOfPages:
                if not self._make_room(sequence):
                    return False
            else:
                return True

    def _make_room(self, sequence: TokenSequence) -> bool:
        """Preempt another sequence to make room; return False if this one has to wait."""
        if self._preempt_unread(sequence):
            return True
        running = self.running
        newer = running and self.sequences.index(running[-1]) > self.sequences.index(sequence)
        if newer:
            self._preempt(running[-1])
        elif sequence.cache and len(running) > 1:
            self._preempt(sequence)
        return bool(newer)

    def _preempt_unread(self, sequence: TokenSequence) -> bool:
        """Preempt the newest other sequence with enough unread events, if any."""
        unread = [s for s in self.running if s is not sequence and s.has_unread]
        if unread:
            self._preempt(unread[-1])
        return bool(unread)

    def _preempt(self, sequence: TokenSequence, *, is_kept: bool = True) -> None:
        self._async.stop(sequence)
        cache, sequence.cache = sequence.cache, None
        if cache is not None:
            self.last = cache.sequence.ids
            self._n_freed += 1
            self.cache.free(cache, is_kept=is_kept)
        sequence.is_ahead = False

    def _stop_ahead(self) -> None:
        sequence = self._async.sequence
        self._async.stop()
        if sequence is not None and sequence.is_ahead:
            self._preempt(sequence)

    def _has_page(self, sequence: TokenSequence) -> bool:
        """Reserve a page for the next token; end the answer if that is impossible."""
        if not self._reserve(sequence, 1):
            if sequence.cache is not None:
                self._advance(sequence, sequence.refuse)
            return False
        return True

    def _n_prefill(self, sequence: TokenSequence, n_decodes: int) -> int:
        assert sequence.cache is not None
        cache, images = sequence.cache, sequence.images
        n = min(sequence.n_missing, self._runtime.n_batch - n_decodes)
        if n_decodes:
            n = self.runner.n_with_one_new_image(sequence, min(n, self._budget.n))
        if not self._runtime.can_rewind:
            n = min([n, *(mark - cache.n for mark in sequence.marks(cache.n))])
        while self.cache.n_free_tokens(cache) < n and self._preempt_unread(sequence):
            pass
        n = max(1, min(n, self.cache.n_free_tokens(cache)))
        n = images.piece(cache.n, n)
        if self._reserve(sequence, n):
            return n
        if sequence.cache is not None:
            self._advance(sequence, sequence.refuse)
        return 0

    def _plan_ahead(self, sequence: TokenSequence, *, is_last: bool) -> StepPlan | None:
        """Plan a token that a device computes and samples; its last one if `is_last`."""
        step = sequence.step
        if not isinstance(step, Decode) or sequence.cache is None or sequence.n_missing > 1:
            return None
        if self._async.sequence is not sequence:
            self._stop_ahead()
        if not self._reserve(sequence, 1) or not self._async.can_serve(step):
            return None
        cache = sequence.cache
        n_left = min(step.n_left, self.n_ctx - cache.n, PAGE - cache.n % PAGE)
        if is_last:
            n_left = 1
            cache.draft_slots.clear()
        begun, made_s = time.perf_counter(), self.drafts.made_s
        return StepPlan(decodes=[sequence], n_ahead=n_left, begun=begun, made_s=made_s)

    def _drafts_ahead(
        self, active: Sequence[TokenSequence]
    ) -> Mapping[TokenSequence, Sequence[int]] | None:
        """Return the drafts for which to stop sampling ahead; None if it is not running."""
        if len(active) != 1 or self._runtime.token_source is None:
            return None
        (sequence,) = active
        if sequence.cache is None or sequence.n_missing != 1:
            return None
        return self._drafts(active)

    def _drafts(self, decodes: Sequence[TokenSequence]) -> Mapping[TokenSequence, Sequence[int]]:
        most = self.cache.max_drafts(len(decodes))
        drafts = self.drafts.draft_tokens(self._runtime, decodes, most)
        for sequence, tokens in drafts.items():
            assert sequence.cache is not None
            self.cache.reserve_draft_slots(sequence.cache, len(tokens))
        return drafts

    # commit

    def commit(self, plan: StepPlan, output: StepOutput) -> None:
        """Append a step's tokens to their sequences, and send the results to the answers."""
        prefill = plan.prefill
        if output.error is not None and prefill:
            self._advance(prefill, _raise_or_cancel, prefill, output.error)
            return
        if output.is_lost:  # the contents of the states are unknown
            for sequence in plan.sequences:
                self._preempt(sequence, is_kept=False)
            return
        if prefill and plan.decodes:  # other answers were waiting for this prompt
            self._budget.note(plan.n_prefill, output.seconds)
        for sequence in plan.sequences:
            assert sequence.cache is not None
            at = sequence.cache.n
            n = plan.n_prefill if sequence is prefill else 1
            sequence.cache.sequence.append(sequence.tokens[at : at + n])
            self.last = sequence.cache.sequence.ids
        if prefill:
            self._note_progress(prefill)
        if plan.drafts:
            self.drafts.note_seconds(plan.decodes, time.perf_counter() - plan.begun)
        results = iter(output.results)
        for sequence in plan.sampled:
            self._deliver(sequence, next(results), output.times)
            if drafts := plan.drafts.get(sequence, ()):
                verified = list(islice(results, len(drafts)))
                self.drafts.note(sequence, *self._verify(sequence, drafts, verified))
        if not prefill:  # includes the host's work, for which small models wait
            seconds = time.perf_counter() - plan.begun - (self.drafts.made_s - plan.made_s)
            self.drafts.control.note_pass(plan.n_rows, seconds)

    def _note_progress(self, sequence: TokenSequence) -> None:
        assert sequence.cache is not None
        sequence.report_progress(self._runtime.n_running)
        if not self._runtime.can_rewind and sequence.cache.n in sequence.marks(0):
            self.cache.checkpoint(sequence.cache)

    def _deliver(
        self, sequence: TokenSequence, result: StepResult, times: TokenTimes | None
    ) -> None:
        if times is not None and isinstance(sequence.step, Decode) and sequence.step.is_timed:
            sequence.events.append(replace(times, position=len(sequence.tokens) - 1))
        self._advance(sequence, sequence.advance, result)

    def _verify(
        self, sequence: TokenSequence, drafts: Sequence[int], results: Sequence[StepResult]
    ) -> tuple[int, int]:
        """Deliver the results of accepted drafts; return how many were verified and accepted."""
        n_right, n_checked = 0, len(drafts)
        sequence.n_drafted += len(drafts)
        for token, result in zip(drafts, results, strict=True):
            step = sequence.step
            if sequence.is_over or sequence.cache is None or sequence.n_missing != 1:
                break
            if not isinstance(step, Decode) or step.token != token:
                break
            if step.is_timed:
                n_checked = n_right
                break
            sequence.cache.sequence.append([token])
            self.cache.accept_draft(sequence.cache)
            n_right += 1
            sequence.n_accepted += 1
            sequence.saved_s += sequence.saved_by_one_s
            self._deliver(sequence, result, None)
        if sequence.cache is not None:
            sequence.cache.draft_slots.clear()
        return n_checked, n_right

    def _advance(self, sequence: TokenSequence, act: Callable[[*Args], None], *args: *Args) -> None:
        """Let an answer continue to its next step; an error ends that answer."""
        before, is_new = sequence.step, False
        try:
            act(*args)
            is_new = not sequence.is_over and sequence.step is not before
            if is_new and isinstance(sequence.step, Prefill):
                self.check(sequence.step.ids, sequence.step.images)
        except Exception as error:  # noqa: BLE001 even a bug affects only this answer
            sequence.fail(error)
            self._preempt(sequence, is_kept=False)
            is_its_own = isinstance(error, PromptError | ContextOverflow | GrammarError)
            if before is not None and not is_its_own:
                self.cache.clear()  # corrupt contents may have caused the error
        if sequence.is_over:
            self._finish(sequence)
        elif is_new and sequence.cache and isinstance(sequence.step, Prefill):
            self._rewind(sequence)

    def _rewind(self, sequence: TokenSequence) -> None:
        """Cut a sequence's cache to the prefix it shares with its step, or have it readmitted."""
        self._stop_ahead()
        cache, prefix = sequence.cache, sequence.tokens[:-1]
        if cache and self.cache.rewind(cache, prefix):
            n = sequence.images.whole(cache.n)
            if n == cache.n or self.cache.rewind(cache, prefix[:n]):
                sequence.note_cached()
                return
        if cache:
            self._preempt(sequence, is_kept=False)
        sequence.note_cached()

    def _finish(self, sequence: TokenSequence) -> None:
        self.drafts.forget(sequence)
        if sequence in self.sequences:
            self._preempt(sequence)
            self.sequences.remove(sequence)

    def _fail(self, error: Exception, failed: Sequence[TokenSequence] | None = None) -> None:
        """End answers with an error; recompute the others, as the cache may be corrupted."""
        for sequence in self._active if failed is None else failed:
            sequence.fail(error)
        self.forget()
        for sequence in tuple(self.sequences):
            if sequence.is_over:
                self._finish(sequence)

    # between two steps

    def check(self, ids: Sequence[int], images: PlacedImages = NO_IMAGES) -> None:
        """Check that tokens can be computed.

        Raises:
            PromptError: there are no tokens, unknown ones, or too many.
        """
        check_prompt(ids, self._runtime.n_vocab, self.n_ctx, images)

    def forget(self) -> None:
        """Forget everything cached; unfinished answers are recomputed."""
        with suppress(Exception):  # after a failure, stopping may fail as well
            self._stop_ahead()
        for sequence in self.running:
            self._preempt(sequence, is_kept=False)
        self.cache.clear()
        self.last = ()

    def settle(self) -> None:
        """Stop sampling ahead, and wait until devices have computed everything that was started.

        Raises:
            EngineError: a device has failed; everything cached is then forgotten.
        """
        try:
            self._stop_ahead()
            self._runtime.finish()
        except BaseException:
            self.forget()
            raise

    @contextmanager
    def emptied(self) -> Iterator[KVCacheManager]:
        """Yield the cache while no sequence is running; later steps readmit the sequences."""
        self.settle()
        for sequence in self.running:
            self._preempt(sequence)
        yield self.cache

    def move(self, runtime: ModelRunner) -> None:
        """Continue on another runtime with the same pages; see `emptied`."""
        self._runtime = runtime
        self.cache.move(runtime)
        self.runner.move(runtime)


def _raise_or_cancel(sequence: TokenSequence, error: Exception) -> None:
    if not isinstance(error, Cancelled):
        raise error
    sequence.cancel()
