"""Answers that are computed side by side say what each says alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.errors import ContextOverflow, EngineError, OutOfDeviceMemory, PromptError
from engine.generation.drafts import Drafts
from engine.generation.generate import Generation
from engine.generation.results import (
    ContextShifted,
    Finished,
    GenerationEvent,
    PrefillProgress,
    TokenText,
)
from engine.generation.scheduler import Scheduler
from engine.generation.sequence import MAX_UNREAD, TokenSequence
from engine.model.forward.pages import PAGE, AttentionWindow
from engine.sampling_params import SamplingParams
from tests.helpers.paged_toy import N_VOCAB, PagedToy, ToySource
from tests.helpers.prophet import Prophet, always
from tests.helpers.reading import read
from tests.helpers.tiers import swept

WHOLE = AttentionWindow()


def params(n: int, seed: int = 0, **changes: Any) -> SamplingParams:
    given = {"temperature": 1.0, "seed": seed, "max_tokens": n, "repeat_penalty": 1.2, **changes}
    return SamplingParams(**given)


def request(
    runtime: PagedToy, prompt: Sequence[int], wanted: SamplingParams, n_keep: int = 1, **more: Any
) -> TokenSequence:
    return TokenSequence(Generation(runtime.n_ctx, None, wanted, n_keep).run(prompt), **more)


def ids_of(events: Sequence[object]) -> list[int]:
    return [i for event in events if isinstance(event, TokenText) for i in event.ids]


def last_of(events: Sequence[GenerationEvent]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


def told(events: Sequence[GenerationEvent]) -> list[object]:
    """Return the part of an answer that must not depend on others."""
    kept: list[object] = [e for e in events if isinstance(e, TokenText | ContextShifted)]
    return [*kept, last_of(events).reason, last_of(events).usage.completion_tokens]


def alone(runtime: PagedToy, prompt: Sequence[int], wanted: SamplingParams) -> list[object]:
    """Return what an answer says on a model of its own, with more pages than it needs."""
    return list(
        _alone(tuple(runtime.windows), runtime.can_rewind, runtime.n_ctx, tuple(prompt), wanted)
    )


@cache
def _alone(
    windows: tuple[AttentionWindow, ...], can_rewind: bool, n_ctx: int, prompt: tuple[int, ...],
    wanted: SamplingParams,
) -> list[object]:  # fmt: skip
    n_pages = 2 + 2 * -(-n_ctx // PAGE)
    groups = [(n_pages, window) for window in windows]
    toy = PagedToy(*groups, n_ctx=n_ctx, n_batch=77, n_slots=not can_rewind)
    scheduler = Scheduler(toy)
    return told(read(scheduler, submitted(scheduler, toy, prompt, wanted)))


def submitted(
    scheduler: Scheduler, runtime: PagedToy, prompt: Sequence[int], wanted: SamplingParams,
    **more: Any,
) -> TokenSequence:  # fmt: skip
    asked = request(runtime, prompt, wanted, **more)
    scheduler.submit(asked)
    return asked


def prompt_of(n: int, seed: int = 0) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(N_VOCAB) for _ in range(n)]


KINDS = {
    "whole": ([WHOLE], 0),
    "windowed": ([WHOLE, AttentionWindow(20)], 0),
    "chunked": ([WHOLE, AttentionWindow(300, is_chunked=True)], 0),
    "recurrent": ([], 4),
    "hybrid": ([WHOLE], 5),
    "all": ([WHOLE, AttentionWindow(40)], 3),
}


def made(kind: str, n_pages: int = 40, **options: Any) -> PagedToy:
    windows, n_slots = KINDS[kind]
    return PagedToy(*((n_pages, s) for s in windows), **{"n_slots": n_slots, **options})


@pytest.mark.parametrize("kind", KINDS)
def test_each_says_what_it_says_alone(kind: str) -> None:
    """Devices sample some of the tokens, hosts the others."""
    runtime = made(kind, n_ctx=900)
    scheduler = Scheduler(runtime)
    prompts = [prompt_of(n, n) for n in (3, 300, 1, 40, 700, 41)]
    asked = [submitted(scheduler, runtime, p, params(30, n)) for n, p in enumerate(prompts)]
    found: list[list[GenerationEvent]] = [[] for _ in asked]
    while not all(one.is_over for one in asked):
        scheduler.step()
        for one, events in zip(asked, found, strict=True):
            while one.events:
                events.append(one.events.popleft())
    for n, (events, prompt) in enumerate(zip(found, prompts, strict=True)):
        assert told(events) == alone(runtime, prompt, params(30, n))
    assert max(len(batch.pieces) for batch in runtime.batches) >= min(
        4, scheduler.cache.max_sequences
    )
    assert runtime.n_sampled > 60
    assert all(pool.n_free == pool.n_pages for pool in scheduler.cache.pools)


class Alternating:
    """A form in which even and odd tokens take turns."""

    is_over = is_slow = False

    def __init__(self) -> None:
        self.said: list[int] = []

    def allowed(self, ends: object) -> np.ndarray:
        return np.arange(N_VOCAB) % 2 == len(self.said) % 2

    def restrict(self, logits: np.ndarray, ends: object) -> None:
        logits[~self.allowed(ends)] = -np.inf

    def accept(self, token: int) -> None:
        self.said.append(token)


def test_answers_with_a_form_are_sampled_on_devices_as_by_hosts() -> None:
    """Seeds that are even are sampled there, but for the first token."""
    runtime = made("whole")
    scheduler = Scheduler(runtime)
    asked = []
    for seed in (2, 3):
        made_by: Any = Alternating()
        generation = Generation(64, None, params(9, seed), 1, constraint=made_by)
        asked.append(TokenSequence(generation.run([5, 6])))
        scheduler.submit(asked[-1])
    for one in asked:
        said = ids_of(read(scheduler, one))
        assert [token % 2 for token in said] == [0, 1, 0, 1, 0, 1, 0, 1, 0]
        scheduler.step()
    assert runtime.n_sampled == 8


def test_a_long_prompt_delays_a_running_answer_by_no_more_than_one_pass() -> None:
    runtime = made("whole", n_ctx=2000, n_batch=64)
    scheduler = Scheduler(runtime)
    first = submitted(scheduler, runtime, prompt_of(5), params(100))
    while not any(isinstance(event, TokenText) for event in first.events):
        scheduler.step()
    later = submitted(scheduler, runtime, prompt_of(1500, 1), params(5))
    while not any(isinstance(event, TokenText) for event in later.events):
        first.events.clear()
        later.events.clear()
        scheduler.step()
        assert [type(event) for event in first.events] == [TokenText]
        assert runtime.batches[-1].n_rows <= 64


def test_the_cached_beginning_is_not_computed_again() -> None:
    runtime = made("whole", n_ctx=900)
    scheduler = Scheduler(runtime)
    prompt = prompt_of(600)
    first = read(scheduler, submitted(scheduler, runtime, prompt, params(10)))
    assert last_of(first).usage.cached_tokens == 0
    assert [e.done for e in first if isinstance(e, PrefillProgress)][-1] == 600
    longer = [*prompt, *ids_of(first), 1, 2, 3]
    second = read(scheduler, submitted(scheduler, runtime, longer, params(10)))
    assert last_of(second).usage.cached_tokens == len(prompt) + 9
    assert {e.total for e in second if isinstance(e, PrefillProgress)} == {4}
    assert told(second) == alone(runtime, longer, params(10))


@pytest.mark.parametrize("kind", ["recurrent", "hybrid", "all"])
def test_recurrent_states_are_found_where_they_are_worth_it(kind: str) -> None:
    runtime = made(kind, n_ctx=900)
    scheduler = Scheduler(runtime)
    prompt = prompt_of(500)

    def cached(wanted: Sequence[int], n: int = 10, marks: Sequence[int] = ()) -> int:
        steps = Generation(runtime.n_ctx, None, params(n), 1).run(wanted, marks)
        asked = TokenSequence(steps)
        scheduler.submit(asked)
        events = read(scheduler, asked)
        assert told(events) == alone(runtime, wanted, params(n))
        said.append(ids_of(events))
        return last_of(events).usage.cached_tokens

    said: list[list[int]] = []
    assert cached(prompt, marks=(30, 450)) == 0
    assert cached(prompt) == 499, "at the end of the prompt"
    assert cached([*prompt, *said[0], 5]) == 509, "at the end of the answer"
    assert cached([*prompt[:460], 5, 6]) == 450, "at the last turn's start"
    assert cached([*prompt[:40], 5, 6]) == 30, "behind what never changes"


def test_several_prompts_that_begin_alike_share_their_pages() -> None:
    runtime = made("whole", n_pages=8, n_ctx=900)
    scheduler = Scheduler(runtime)
    start = prompt_of(3 * PAGE)
    read(scheduler, submitted(scheduler, runtime, start, params(1)))
    asked = [submitted(scheduler, runtime, [*start, n], params(20, n)) for n in range(4)]
    for n, one in enumerate(asked):
        events = read(scheduler, one)
        assert last_of(events).usage.cached_tokens == 3 * PAGE
        assert told(events) == alone(runtime, [*start, n], params(20, n))
    assert max(len(batch.pieces) for batch in runtime.batches) == 4


@pytest.mark.parametrize("kind", swept(KINDS, ("chunked", "windowed", "hybrid")))
def test_who_came_last_is_computed_again_where_pages_run_out(kind: str) -> None:
    runtime = made(kind, n_pages=6, n_ctx=900)
    scheduler = Scheduler(runtime)
    asked = [submitted(scheduler, runtime, prompt_of(200, n), params(330, n)) for n in range(5)]
    for n, one in enumerate(asked):
        events = read(scheduler, one)
        assert told(events) == alone(runtime, prompt_of(200, n), params(330, n))
        assert last_of(events).usage.cached_tokens == 0
        progress = [e.done for e in events if isinstance(e, PrefillProgress)]
        assert progress == sorted(set(progress))
    assert not scheduler.sequences


@pytest.mark.parametrize("kind", ["whole", "windowed", "hybrid"])
def test_an_answer_too_long_for_all_pages_ends_as_with_a_full_context(kind: str) -> None:
    runtime = made(kind, n_pages=2, n_ctx=5000)
    scheduler = Scheduler(runtime)
    events = read(scheduler, submitted(scheduler, runtime, prompt_of(300), params(1000)))
    assert last_of(events).reason == "context"
    assert last_of(events).usage.total_tokens == 2 * PAGE + 1
    shifting = params(1000, on_overflow="shift")
    events = read(scheduler, submitted(scheduler, runtime, prompt_of(300), shifting))
    assert last_of(events).reason == "length"
    assert any(isinstance(event, ContextShifted) for event in events)
    with pytest.raises(ContextOverflow):
        read(scheduler, submitted(scheduler, runtime, prompt_of(600), params(5)))
    assert not scheduler.sequences


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_context_is_shifted_within_its_own_sequence(kind: str) -> None:
    runtime = made(kind, n_ctx=64)
    scheduler = Scheduler(runtime)
    wanted = params(200, on_overflow="shift")
    asked = [submitted(scheduler, runtime, prompt_of(40, n), wanted) for n in range(3)]
    for n, one in enumerate(asked):
        events = read(scheduler, one)
        assert any(isinstance(event, ContextShifted) for event in events)
        assert told(events) == alone(runtime, prompt_of(40, n), wanted)


def test_what_nobody_reads_is_not_computed_far_and_stands_in_nobodys_way() -> None:
    runtime = made("whole", n_pages=3, n_ctx=700)
    scheduler = Scheduler(runtime)
    idle = [submitted(scheduler, runtime, prompt_of(100, n), params(90, n)) for n in range(20)]
    asked = submitted(scheduler, runtime, prompt_of(600, 50), params(90))
    assert told(read(scheduler, asked)) == alone(runtime, prompt_of(600, 50), params(90))
    assert all(len(one.events) <= MAX_UNREAD + 1 for one in idle)
    for n, one in enumerate(idle):
        assert told(read(scheduler, one)) == alone(runtime, prompt_of(100, n), params(90, n))


def test_who_is_dropped_or_cancelled_frees_pages_with_the_next_step() -> None:
    runtime = made("whole", n_ctx=900)
    scheduler = Scheduler(runtime)
    stop: list[int] = []
    dropped = submitted(scheduler, runtime, prompt_of(300), params(90))
    cancelled = submitted(
        scheduler, runtime, prompt_of(300, 1), params(90), is_cancelled=lambda: bool(stop)
    )
    waiting = submitted(scheduler, runtime, [], params(9), is_cancelled=lambda: bool(stop))
    for _ in range(30):
        dropped.events.clear()
        cancelled.events.clear()
        scheduler.step()
    assert isinstance(waiting.error, PromptError)
    (pool,) = scheduler.cache.pools
    assert pool.n_free == pool.n_pages - 4
    dropped.is_dropped = True
    stop.append(1)
    late = submitted(scheduler, runtime, prompt_of(3), params(9), is_cancelled=lambda: True)
    scheduler.step()
    assert pool.n_free == pool.n_pages
    for one in (cancelled, late):
        assert one.is_over
        assert last_of(list(one.events)).reason == "cancelled"


@pytest.mark.parametrize("prompt", [[], [N_VOCAB], [-1], [1] * 901], ids=len)
def test_a_prompt_that_means_nothing_is_refused(prompt: list[int]) -> None:
    runtime = made("whole", n_ctx=900)
    scheduler = Scheduler(runtime)
    other = submitted(scheduler, runtime, prompt_of(300), params(9))
    with pytest.raises(PromptError if len(prompt) < 900 else ContextOverflow):
        read(scheduler, submitted(scheduler, runtime, prompt, params(9)))
    assert told(read(scheduler, other)) == alone(runtime, prompt_of(300), params(9))


@pytest.mark.parametrize("kind", ["whole", "all"])
def test_a_failed_pass_ends_its_answers_and_no_later_one(kind: str) -> None:
    runtime = made(kind, n_ctx=900)
    scheduler = Scheduler(runtime)
    asked = [submitted(scheduler, runtime, prompt_of(50, n), params(40, n)) for n in range(2)]
    for _ in range(6):
        scheduler.step()
    runtime.fail_next()
    scheduler.step()
    for one in asked:
        with pytest.raises(EngineError, match="a device failed"):
            read(scheduler, one)
    again = read(scheduler, submitted(scheduler, runtime, prompt_of(50), params(40)))
    assert last_of(again).usage.cached_tokens == 0, "nobody knows what is cached"
    assert told(again) == alone(runtime, prompt_of(50), params(40))


@pytest.mark.parametrize("kind", ["whole", "all"])
def test_memory_that_a_prompt_lacks_ends_nothing_but_that_prompt(kind: str) -> None:
    runtime = made(kind, n_ctx=900)
    scheduler = Scheduler(runtime)
    first = submitted(scheduler, runtime, prompt_of(50), params(40))
    for _ in range(4):
        scheduler.step()
    long = submitted(scheduler, runtime, prompt_of(700, 1), params(40))
    scheduler.step()
    runtime.fail_next(OutOfDeviceMemory("cpu", 2, 1, "to compute the next tokens"))
    with pytest.raises(OutOfDeviceMemory):
        read(scheduler, long)
    assert told(read(scheduler, first)) == alone(runtime, prompt_of(50), params(40))


@pytest.mark.parametrize("kind", ["whole", "all"])
def test_an_interruption_ends_no_answer(kind: str) -> None:
    runtime = made(kind, n_ctx=900)
    scheduler = Scheduler(runtime)
    asked = submitted(scheduler, runtime, prompt_of(50), params(40))
    for _ in range(4):
        scheduler.step()
    runtime.fail_next(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        scheduler.step()
    assert told(read(scheduler, asked)) == alone(runtime, prompt_of(50), params(40))


def test_logits_that_mean_nothing_end_one_answer_and_what_led_to_them_is_forgotten() -> None:
    runtime = made("whole", n_ctx=900)
    scheduler = Scheduler(runtime)
    asked = [submitted(scheduler, runtime, prompt_of(50, n), params(40, n)) for n in range(2)]
    for _ in range(6):
        scheduler.step()
    forward = runtime.forward

    def spoilt(ids: Sequence[int], batch: Any) -> Any:
        logits = forward(ids, batch)
        logits[-1] = float("nan")
        return logits

    runtime.forward = spoilt  # type: ignore[method-assign]
    scheduler.step()
    runtime.forward = forward  # type: ignore[method-assign]
    with pytest.raises(EngineError):
        read(scheduler, asked[1])
    assert told(read(scheduler, asked[0])) == alone(runtime, prompt_of(50), params(40))
    again = read(scheduler, submitted(scheduler, runtime, prompt_of(50, 1), params(40, 1)))
    assert last_of(again).usage.cached_tokens == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_samples_for_a_single_answer(kind: str) -> None:
    runtime = made(kind, n_ctx=900)
    runtime.token_source = source = ToySource(runtime, 3)
    scheduler = Scheduler(runtime)
    first = submitted(scheduler, runtime, prompt_of(250), params(80))
    events = [scheduler.step() or first.events.popleft() for _ in range(30) if not first.is_over]
    n_alone = source.n_delivered
    assert n_alone > 20
    second = submitted(scheduler, runtime, prompt_of(20, 1), params(20, 1))
    assert told(read(scheduler, second)) == alone(runtime, prompt_of(20, 1), params(20, 1))
    assert source.n_delivered < n_alone + 15, "two at once are sampled by the host"
    assert told([*events, *read(scheduler, first)]) == alone(runtime, prompt_of(250), params(80))
    assert source.n_delivered > n_alone + 20


@pytest.mark.parametrize("kind", KINDS)
def test_states_that_a_device_has_lost_are_computed_again(kind: str) -> None:
    runtime = made(kind, n_ctx=900)
    turns = iter([False, False, True] * 100)
    runtime.token_source = ToySource(runtime, 2, lambda: next(turns))
    scheduler = Scheduler(runtime)
    events = read(scheduler, submitted(scheduler, runtime, prompt_of(50), params(30)))
    assert told(events) == alone(runtime, prompt_of(50), params(30))


class Storm(RuleBasedStateMachine):
    """Answers that come, are read, cancelled and dropped in any order, with few pages."""

    @initialize(
        kind=st.sampled_from(list(KINDS)), n_pages=st.integers(3, 9), n_batch=st.integers(1, 40),
        n_bytes=st.sampled_from([0, 8, 40, 4000]), ahead=st.integers(-3, 3),
        wrong=st.integers(0, 7), n_slots=st.sampled_from([0, 2, 5, 16]),
    )  # fmt: skip
    def begin(
        self, kind: str, n_pages: int, n_batch: int, n_bytes: int, ahead: int, wrong: int,
        n_slots: int,
    ) -> None:  # fmt: skip
        placed = {"n_slots": n_slots} if n_slots and KINDS[kind][1] else {}
        self.runtime = made(kind, n_pages=n_pages, n_ctx=700, n_batch=n_batch, **placed)
        if ahead >= 0:
            self.runtime.token_source = ToySource(self.runtime, ahead)
        self.known: list[list[int]] = []
        n_draft = {-3: 15, -2: 7, 1: 3, 3: 7}.get(ahead, 0)
        drafts = Drafts(n_draft, [Prophet(self.known, lambda n: n * wrong % 17)], always())
        self.scheduler = Scheduler(self.runtime, n_bytes, drafts)
        self.asked: list[tuple[TokenSequence, list[int], SamplingParams]] = []
        self.found: list[list[GenerationEvent]] = []
        self.stopped: set[int] = set()
        self.n_made = 0

    @rule(
        fork=st.integers(0, 600), n=st.integers(1, 60), n_most=st.integers(0, 60),
        seed=st.integers(0, 3), is_shifting=st.booleans(),
    )  # fmt: skip
    def ask(self, fork: int, n: int, n_most: int, seed: int, is_shifting: bool) -> None:
        prompt = [*prompt_of(fork), *prompt_of(n, seed)]
        wanted = params(n_most, seed, on_overflow="shift" if is_shifting else "stop")
        number, self.n_made = self.n_made, self.n_made + 1
        asked = submitted(
            self.scheduler, self.runtime, prompt, wanted,
            is_cancelled=lambda: number in self.stopped,
        )  # fmt: skip
        self.asked.append((asked, prompt, wanted))
        self.known.append([*prompt, *ids_of(alone(self.runtime, prompt, wanted))])
        self.found.append([])

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), n=st.integers(1, 40))
    def read_some(self, data: st.DataObject, n: int) -> None:
        at = data.draw(st.integers(0, len(self.asked) - 1))
        asked = self.asked[at][0]
        for _ in range(n):
            n_steps = 0
            while not asked.events and not asked.is_over:
                self.scheduler.step()
                n_steps += 1
                assert n_steps < 5000, "nothing goes on"
            if asked.events:
                self.found[at].append(asked.events.popleft())

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), is_dropped=st.booleans())
    def end(self, data: st.DataObject, is_dropped: bool) -> None:
        at = data.draw(st.integers(0, len(self.asked) - 1))
        if is_dropped:
            self.asked[at][0].is_dropped = True
        self.stopped.add(at)

    @rule()
    def step(self) -> None:
        self.scheduler.step()

    @rule()
    def empty(self) -> None:
        with self.scheduler.emptied() as cache:
            assert all(pool.n_free == pool.n_pages for pool in cache.pools)

    @invariant()
    def each_says_what_it_says_alone(self) -> None:
        for at, (asked, prompt, wanted) in enumerate(getattr(self, "asked", ())):
            assert asked.error is None
            if not self.found[at] or not isinstance(self.found[at][-1], Finished):
                continue
            found, expected = told(self.found[at]), alone(self.runtime, prompt, wanted)
            self.found[at] = []
            if at in self.stopped and found[-2] == "cancelled":
                assert found[:-2] == expected[: len(found) - 2]
            else:
                assert found == expected

    def teardown(self) -> None:
        for at, (asked, prompt, wanted) in enumerate(getattr(self, "asked", ())):
            if at in self.stopped:
                continue
            rest = read(self.scheduler, asked)
            if self.found[at] or rest:
                assert told([*self.found[at], *rest]) == alone(self.runtime, prompt, wanted)
        if hasattr(self, "asked"):
            self.scheduler.step()
            assert not self.scheduler.sequences
            assert all(pool.n_free == pool.n_pages for pool in self.scheduler.cache.pools)


TestStorm = Storm.TestCase
TestStorm.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
