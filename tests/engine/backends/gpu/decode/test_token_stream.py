"""Tokens that a device samples for itself, read a little later: as if the host had."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import EngineError, Event, Finished, SamplingParams, load_model
from engine.backends.cpu.thread_comm import ThreadGroup
from engine.backends.executor import RankExecutor
from engine.backends.gpu.comm.one_shot import OneShotGroups
from engine.backends.gpu.decode import token_stream
from engine.backends.gpu.decode.token_stream import TokenStep, TokenStream
from engine.backends.gpu.launch import graph
from engine.decoding.sampling.sampler import Sampler
from engine.errors import CommError
from engine.generation.scheduler import Scheduler
from engine.model.forward.batch import Piece
from engine.runtime.timeline import TokenTimes
from tests.helpers.passes import forward_alone
from tests.helpers.reading import events_of
from tests.helpers.tiers import paired, swept
from tests.helpers.token_streams import (
    PROMPT,
    Slow,
    answer,
    attach,
    close_executors,
    executor_of,
    ids_of,
    new_executor,
    request,
    split_toy,
    step_of,
    told,
    toy,
)
from tests.helpers.toy_runtime import Letters, ToyRuntime

DEMO = Path(__file__).resolve().parents[5] / "resources" / "demo" / "tandem-demo.gguf"
RANDOM = {"seed": 11, "temperature": 1.2, "repeat_penalty": 1.2, "repeat_last_n": 7}


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    close_executors()


WAYS = [0, 1, 2, token_stream.AHEAD, "recurrent", "split"]


@pytest.fixture(params=swept(WAYS, (1, token_stream.AHEAD, "recurrent", "split")))
def both(request: pytest.FixtureRequest, device: str) -> tuple[ToyRuntime, ToyRuntime]:
    """Return a toy model that samples on the host, and one that runs `ahead` steps ahead."""
    if request.param == "recurrent":
        return toy(device, is_recurrent=True), toy(device, 2, is_recurrent=True)
    if request.param == "split":
        made: Any = split_toy(2, device)
        return toy(device), made
    return toy(device), toy(device, request.param)


def most_ahead(runtime: ToyRuntime) -> int:
    """Return how many tokens are computed beyond the one that is read; 0 if the host samples."""
    source = runtime.token_source
    return source._wanted if isinstance(source, TokenStream) else 0


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "random": RANDOM,
    "top-p": {**RANDOM, "top_k": 0, "frequency_penalty": 0.2},
    "by id": {**RANDOM, "top_k": 0, "top_p": 1.0, "repeat_last_n": -1},
    "none": {"temperature": 0, "max_tokens": 0},
    "one": {"temperature": 0, "max_tokens": 1},
    "two": {"temperature": 0, "max_tokens": 2},
    "context": {"temperature": 0, "max_tokens": 200},
    "shift": {**RANDOM, "max_tokens": 24, "on_overflow": "shift"},
}


@pytest.mark.parametrize(("both", "name"), paired(WAYS, list(SETTINGS)), indirect=["both"])
def test_an_answer_is_the_same_whoever_samples_it(
    both: tuple[ToyRuntime, ToyRuntime], name: str
) -> None:
    changes = SETTINGS[name]
    params = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **changes})
    host, ahead = (answer(runtime, params) for runtime in both)
    assert told(host) == told(ahead)
    if "seed" not in changes:
        assert both[0].n_computed.item() == both[1].n_computed.item(), "the number is known before"


def test_what_is_sampled_behind_the_end_is_forgotten(both: tuple[ToyRuntime, ToyRuntime]) -> None:
    """The next prompt continues only from the tokens that were read."""
    params = SamplingParams(**RANDOM, max_tokens=8)
    sampled = ids_of(answer(both[0], params, tokenizer=Letters()))
    eog = next(token for token in sampled[2:] if token not in sampled[:2])
    letters = Letters([eog])
    both[0].n_computed.zero_()
    schedulers = [Scheduler(runtime) for runtime in both]
    for prompt in (PROMPT, [*PROMPT, *sampled[:3]]):
        host, ahead = (
            answer(runtime, params, tokenizer=letters, scheduler=scheduler, prompt=prompt)
            for runtime, scheduler in zip(both, schedulers, strict=True)
        )
        is_first = both[1].can_rewind or prompt == PROMPT
        assert told(host, is_first=is_first) == told(ahead, is_first=is_first)
        by_host, by_device = (scheduler.last for scheduler in schedulers)
        assert by_host == by_device[: len(by_host)]
        assert len(by_device) == len(by_host) or not both[1].can_rewind
    if both[1].can_rewind:
        assert 0 <= both[1].n_computed.item() - both[0].n_computed.item() <= 2 * most_ahead(both[1])


def test_a_stop_text_ends_an_answer(both: tuple[ToyRuntime, ToyRuntime]) -> None:
    letters = Letters()
    params = SamplingParams(**RANDOM, max_tokens=8)
    sampled = ids_of(answer(both[0], params, tokenizer=letters))
    stop = letters.feed(sampled[3]) + letters.feed(sampled[4])
    params = SamplingParams(**RANDOM, max_tokens=8, stop=(stop,))
    host, ahead = (told(answer(runtime, params, tokenizer=letters)) for runtime in both)
    assert host == ahead
    assert "stop" in ahead


@pytest.mark.parametrize(("both", "name"), paired(WAYS, ["greedy", "random"]), indirect=["both"])
def test_an_answer_goes_back_from_a_banned_string(
    both: tuple[ToyRuntime, ToyRuntime], name: str
) -> None:
    """The host samples the token that replaces it, the device the following ones."""
    letters, params = Letters(), SamplingParams(**{**SETTINGS[name], "max_tokens": 12})
    plain = "".join(map(letters.feed, ids_of(answer(both[0], params, tokenizer=letters))))
    params = replace(params, banned_strings=(plain[3:5], plain[7]))
    host, ahead = (answer(runtime, params, tokenizer=letters) for runtime in both)
    assert told(host) == told(ahead)
    text = "".join(map(letters.feed, ids_of(ahead)))
    assert len(text) == 12
    assert not any(ban.lower() in text.lower() for ban in params.banned_strings)


def test_cancelling_takes_effect_within_a_token(both: tuple[ToyRuntime, ToyRuntime]) -> None:
    schedulers = [Scheduler(runtime) for runtime in both]
    params = SamplingParams(**RANDOM, max_tokens=12)
    cancelled = []
    for runtime, scheduler in zip(both, schedulers, strict=True):
        asked = iter([False] * 4 + [True] * 99)
        events = answer(runtime, params, scheduler=scheduler, is_cancelled=lambda a=asked: next(a))
        cancelled.append(told(events))
    assert cancelled[0] == cancelled[1]
    assert "cancelled" in cancelled[1]
    assert 0 <= both[1].n_computed.item() - both[0].n_computed.item() <= most_ahead(both[1])
    again = [
        told(answer(runtime, params, scheduler=scheduler), is_first=False)
        for runtime, scheduler in zip(both, schedulers, strict=True)
    ]
    assert again[0] == again[1]


def test_a_state_holds_the_end_of_an_answer(device: str) -> None:
    """A chat that continues the answer finds all of it cached."""
    host, ahead = toy(device, is_recurrent=True), toy(device, 1, is_recurrent=True)
    params = SamplingParams(**RANDOM, max_tokens=6)
    sampled = ids_of(answer(host, params, tokenizer=Letters()))
    eog = next(token for token in sampled[2:] if token not in sampled[:2])
    heard = [*PROMPT, *sampled[: sampled.index(eog)], eog]
    scheduler, letters = Scheduler(ahead), Letters([eog])
    answer(ahead, params, scheduler=scheduler, tokenizer=letters)
    assert scheduler.last == heard
    for prompt, n_cached in (([*heard, 4, 8], len(heard)), ([*heard, 4, 9], len(heard) + 1)):
        events = answer(ahead, params, scheduler=scheduler, tokenizer=letters, prompt=prompt)
        wanted = answer(host, params, tokenizer=letters, prompt=prompt)
        assert told(events, is_first=False) == told(wanted, is_first=False)
        assert isinstance(events[-1], Finished)
        assert events[-1].usage.cached_tokens == n_cached


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_an_answer_goes_on_after_a_look_at_the_cache(is_recurrent: bool, device: str) -> None:
    """A state saved in the middle of an answer has all that the cache holds."""
    host, ahead = toy(device, is_recurrent=is_recurrent), toy(device, 1, is_recurrent=is_recurrent)
    params = SamplingParams(**RANDOM, max_tokens=6)
    scheduler, asked = Scheduler(ahead), request(ahead, params)
    scheduler.submit(asked)
    events: list[Event] = []
    for event in events_of(scheduler, asked):
        events.append(event)
        if len(ids_of(events)) in (3, 5):
            read = [*PROMPT, *ids_of(events)]
            with scheduler.emptied():
                assert scheduler.last == (read if is_recurrent else read[:-1])
    assert told(events) == told(answer(host, params))


def test_states_that_cannot_be_told_are_computed_again(device: str) -> None:
    """More tokens have equal logits than the device can sort, and the host learns that too late."""
    params = SamplingParams(**{**RANDOM, "repeat_penalty": 1}, max_tokens=4)
    host, ahead = (
        ToyRuntime(device, n_vocab=1500, sharpness=0, is_recurrent=True) for _ in range(2)
    )
    attach(ahead, 1)
    assert told(answer(host, params)) == told(answer(ahead, params))


def test_where_the_device_cannot_sample_the_host_does(device: str) -> None:
    """Flat probabilities have more candidates than the device can sort."""
    params = SamplingParams(seed=5, temperature=1, top_k=0, top_p=0.999, min_p=0, max_tokens=6)
    for is_recurrent in (False, True):
        host, ahead = (
            ToyRuntime(device, n_vocab=1500, sharpness=0.25, is_recurrent=is_recurrent)
            for _ in range(2)
        )
        attach(ahead, 2)
        assert told(answer(host, params)) == told(answer(ahead, params))


def test_where_no_rank_can_sample_the_host_joins_their_logits(device: str) -> None:
    params = SamplingParams(seed=5, temperature=1, top_k=0, top_p=0.999, min_p=0, max_tokens=6)
    options = {"n_vocab": 1500, "sharpness": 0.25}
    host, ahead = ToyRuntime(device, **options), split_toy(2, device, **options)
    asked: list[int] = []
    forward = ahead.forward
    ahead.forward = lambda ids, *rest: asked.append(len(ids)) or forward(ids, *rest)
    runtime: Any = ahead
    assert told(answer(host, params)) == told(answer(runtime, params))
    assert asked == [len(PROMPT)], "what the devices have computed is not computed again"


def test_ranks_that_compute_other_numbers_are_an_error(device: str) -> None:
    """And the stream reports that before the error is raised, so that everything is dropped."""
    ahead = split_toy(3, device)
    runtime: Any = ahead
    stream, failed = ahead.token_source, []
    assert isinstance(stream, TokenStream)
    stream._on_failure = lambda error: failed.append(1)
    asked = request(runtime, SamplingParams(temperature=0, max_tokens=9))
    scheduler = Scheduler(runtime)
    scheduler.submit(asked)
    events, found = events_of(scheduler, asked), list[Event]()
    while len(ids_of(found)) < 2:
        found.append(next(events))
    ahead.toys[2].token.fill_(7)
    stream._step.token.fill_(8)
    with pytest.raises(CommError, match="different numbers"):
        list(events)
    assert failed == [1]
    assert stream.stop() == ()


def test_a_kernel_that_waited_in_vain_is_an_error(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an error even if the ring has a token, sampled from unknown numbers."""
    ahead = split_toy(2, device)
    stream, failed = ahead.token_source, []
    assert isinstance(stream, TokenStream)
    stream._on_failure = lambda error: failed.append(1)
    assert stream.serve(Sampler(SamplingParams(temperature=0)), [])
    problem = CommError(1, "did not answer", "cuda:1")
    monkeypatch.setattr(OneShotGroups, "problem", lambda self: problem)
    with pytest.raises(CommError, match="cuda:1"):
        stream.next(7, Piece(0, 1), 9)
    assert failed == [1]


def test_one_of_several_devices_is_not_waited_for_without_end(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = split_toy(2, device)
    stream, failed = ahead.token_source, []
    assert isinstance(stream, TokenStream)
    stream._on_failure = lambda error: failed.append(1)
    assert stream.serve(Sampler(SamplingParams(temperature=0)), [])
    monkeypatch.setattr("engine.backends.executor.STALL_S", 0.05)
    monkeypatch.setattr(graph.Tape, "replay", lambda self: None)
    monkeypatch.setattr(RankExecutor, "is_idle", lambda self, rank: False)
    with pytest.raises(CommError, match="has not computed a token"):
        stream.next(7, Piece(0, 1), 9)
    assert failed == [1]


def test_it_is_careful_for_a_while_after_the_host_had_to_sample(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_stream, "CALM", 3)
    runtime = toy(device)
    source = attach(runtime, 2)
    assert source.serve(Sampler(SamplingParams(temperature=0)), [])
    forward_alone(runtime, PROMPT, 0)
    token, n_computed, by_host = 7, [], []
    for place in range(6, 15):
        if place == 8:
            runtime.spoilt.fill_(torch.nan)
        before = runtime.n_computed.item()
        found = source.next(token, Piece(place, 1), 50)
        n_computed.append(runtime.n_computed.item() - before)
        if isinstance(found, int):
            token = found
        else:
            by_host.append(place)
            runtime.spoilt.zero_()
    assert by_host == [10], "two steps were sampled already"
    assert n_computed == [3, 1, 1, 1, 1, 1, 1, 1, 3]


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_it_comes_to_a_stop_without_work_in_vain(device: str, is_recurrent: bool) -> None:
    """Others then compute, also in the token's memory; and the answer continues after them."""
    runtime = toy(device, is_recurrent=is_recurrent)
    source, host = attach(runtime, 2), toy(device, is_recurrent=is_recurrent)
    assert source.serve(Sampler(SamplingParams(temperature=0)), [])
    for each in (runtime, host):
        each.clear_slot(0)
        forward_alone(each, PROMPT, 0)
    runtime.n_computed.zero_()
    token, n_computed = 7, []
    for place in range(6, 16):
        if place in (8, 9, 10):
            is_idle = source.hold(3)
            assert is_idle == (place == 10 or (is_recurrent and place == 9))
            assert not (is_idle and source.is_beyond)
            if place == 10:
                runtime.token.fill_(0)
        expected = int(forward_alone(host, [token], place)[-1].argmax())
        before = runtime.n_computed.item()
        found = source.next(token, Piece(place, 1), 50)
        n_computed.append(runtime.n_computed.item() - before)
        assert found == expected
        token = found
    ahead = 1 if is_recurrent else 2
    assert n_computed[:3] == [1 + ahead, 1, 0]
    assert sum(n_computed) == 10 + ahead, "nothing is computed twice"


def test_useless_logits_end_an_answer(both: tuple[ToyRuntime, ToyRuntime]) -> None:
    runtime = both[1]
    scheduler, asked = Scheduler(runtime), request(runtime, SamplingParams(**RANDOM))
    scheduler.submit(asked)
    events = events_of(scheduler, asked)
    for _ in range(3):
        next(events)
    runtime.spoilt[4] = torch.inf
    with pytest.raises(EngineError, match="no usable probabilities"):
        list(events)
    runtime.spoilt.zero_()
    params = SamplingParams(**RANDOM, max_tokens=4)
    found = answer(runtime, params, scheduler=scheduler)
    assert told(found) == told(answer(both[0], params)), "nothing is cached that made them useless"


def test_what_is_not_served_is_sampled_by_the_host(device: str) -> None:
    params = SamplingParams(**RANDOM, typical_p=0.8, max_tokens=5)
    host, ahead = toy(device), toy(device, 1)
    assert told(answer(host, params)) == told(answer(ahead, params))
    assert host.n_computed.item() == ahead.n_computed.item()


def test_answers_in_turn_share_a_stream(device: str) -> None:
    """Each has other settings, timed or not, and replays the same captured step."""
    host, ahead = toy(device), toy(device, 1)
    for seed in range(4):
        params = SamplingParams(seed=seed, temperature=seed / 2, top_k=3 * seed, max_tokens=5)
        events = answer(ahead, params, timed_every=seed)
        times = [event for event in events if isinstance(event, TokenTimes)]
        assert len(times) == (4 // seed if seed else 0)
        assert told(answer(host, params)) == told(events)


def test_it_is_captured_where_an_answer_begins_if_not_before(device: str) -> None:
    host, ahead = toy(device), toy(device)
    ahead.token_source = TokenStream([step_of(ahead)], executor_of(ahead))
    params = SamplingParams(**RANDOM, max_tokens=5)
    assert told(answer(host, params)) == told(answer(ahead, params))


def test_the_host_waits_for_a_device_that_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Slow] = []

    def capture(device: torch.device, compute: Callable[[], torch.Tensor]) -> Slow:
        made.append(Slow(graph.capture(device, compute)))
        return made[-1]

    monkeypatch.setattr(token_stream, "capture", capture)
    monkeypatch.setattr(
        RankExecutor, "is_idle", lambda self, rank: not any(x.n_pending for x in made)
    )
    host, ahead = toy("cpu"), toy("cpu", 2)
    for params in (SamplingParams(**RANDOM, max_tokens=6), SamplingParams(seed=1, max_tokens=5)):
        letters = Letters([ids_of(answer(host, params))[-2]])
        wanted = told(answer(host, params, tokenizer=letters))
        assert told(answer(ahead, params, tokenizer=letters)) == wanted
    made[0].end()


def test_a_window_that_is_painted_does_not_stop_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tokens are in flight when one is read, but only requested ones."""
    runtime = toy("cpu", token_stream.AHEAD)
    source = runtime.token_source
    assert isinstance(source, TokenStream)
    started: list[int] = []
    replay = graph.Tape.replay
    monkeypatch.setattr(
        graph.Tape, "replay", lambda self: started.append(len(started)) or replay(self)
    )
    forward_alone(runtime, PROMPT, 0)
    assert source.serve(Sampler(SamplingParams(temperature=0)), [])
    token, behind = 7, []
    for n in range(6):
        token = source.next(token, Piece(len(PROMPT) + n, 1), 6 - n)  # type: ignore[assignment]
        behind.append(len(started) - (n + 1))
    assert behind == [3, 3, 3, 2, 1, 0]


def test_a_device_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = toy("cpu", 1)
    source = runtime.token_source
    assert isinstance(source, TokenStream)
    assert source.serve(Sampler(SamplingParams(temperature=0)), [])
    forward_alone(runtime, PROMPT, 0)
    monkeypatch.setattr(graph.Tape, "replay", lambda self: None)
    with pytest.raises(EngineError, match="did not report"):
        source.next(7, Piece(6, 1), 9)


class Rerun:
    """Stand-in for a capture: a replay computes again."""

    is_whole = True

    def __init__(self, device: torch.device, compute: Callable[[], torch.Tensor]) -> None:
        self._compute = compute
        self.replay()

    def replay(self) -> None:
        self.result = self._compute()


def test_the_demo_model_writes_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_stream, "capture", Rerun)
    with load_model(DEMO, n_ctx=128) as model:
        runner, device = model.runtime.runner, torch.device("cpu")
        token, position = (torch.zeros(1, dtype=torch.int64) for _ in range(2))

        def begin(this: int, piece: Piece) -> None:
            token.fill_(this)
            position.fill_(piece.n_past)

        def forward() -> tuple[torch.Tensor, None]:
            return torch.from_numpy(forward_alone(runner, [int(token)], int(position))[0]), None

        step = TokenStep(device, runner.n_vocab, token, position, begin, forward, True)
        ahead = TokenStream([step], new_executor([device], ThreadGroup()))
        ahead.prepare()
        for params in (
            SamplingParams(seed=1, max_tokens=16),
            SamplingParams(seed=2, max_tokens=16, temperature=1.5, repeat_penalty=1.1),
            SamplingParams(temperature=0, max_tokens=16),
        ):
            runner.token_source = None
            wanted = list(model.generate("One day", params))
            runner.token_source = ahead
            assert ids_of(list(model.generate("One night", params))) != ids_of(wanted)
            assert ids_of(list(model.generate("One day", params))) == ids_of(wanted)
