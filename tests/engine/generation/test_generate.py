"""Generation of answers: stop rules, prefix reuse, a full context, cancelling."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import (
    AnswerRequest,
    ChatMessage,
    ContextOverflow,
    ContextShifted,
    Event,
    Finished,
    Model,
    PrefillProgress,
    PromptError,
    SamplingParams,
    TokenText,
    load_model,
)
from engine.generation.generate import StopMatcher
from engine.runtime.timeline import TokenTimes
from tests.helpers.ahead import AheadSource
from tests.helpers.tiny_gguf import tiny_gguf

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return tiny_gguf(folder / "m.gguf", n_ctx=64, chat_template=TEMPLATE)


@pytest.fixture(params=["host", "ahead"])
def model(path: Path, request: pytest.FixtureRequest) -> Iterator[Model]:
    """Yield a model whose tokens the host samples, and one that samples two tokens ahead."""
    with load_model(path, n_ctx=64, n_batch=8, kv_type="f32") as loaded:
        if request.param == "ahead":
            loaded.runtime.token_source = AheadSource(loaded.runtime.runner, 2)
        yield loaded


def ids_of(events: Sequence[Event]) -> list[int]:
    return [i for event in events if isinstance(event, TokenText) for i in event.ids]


def text_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TokenText))


def finish(events: Sequence[Event]) -> Finished:
    last = events[-1]
    assert isinstance(last, Finished)
    assert sum(isinstance(event, Finished) for event in events) == 1
    return last


def test_decode_continues_what_a_whole_pass_would_say(model: Model) -> None:
    prompt = list(range(5, 25))
    sampled = ids_of(list(model.generate(prompt, GREEDY)))
    logits = model.logits(prompt + sampled)
    assert sampled == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_a_seed_repeats_an_answer_and_another_changes_it(model: Model) -> None:
    def draw(seed: int) -> list[int]:
        params = SamplingParams(temperature=1.5, top_k=0, max_tokens=12, seed=seed, ignore_eos=True)
        return ids_of(list(model.generate([5, 6], params)))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_the_common_prefix_is_not_computed_again(model: Model) -> None:
    prompt = list(range(5, 25))
    first = finish(list(model.generate(prompt, GREEDY)))
    assert first.usage.cached_tokens == 0
    longer = [*prompt, 30, 31]
    events = list(model.generate(longer, GREEDY))
    assert finish(events).usage.cached_tokens == len(prompt)
    with_cache = ids_of(events)
    model.logits([1])  # forgets
    assert ids_of(list(model.generate(longer, GREEDY))) == with_cache


def test_progress_counts_what_is_computed(model: Model) -> None:
    events = list(model.generate(list(range(5, 25)), GREEDY))
    progress = [event for event in events if isinstance(event, PrefillProgress)]
    assert [p.done for p in progress] == [8, 16, 20]
    assert {p.total for p in progress} == {20}


def test_usage_and_timings_add_up(model: Model) -> None:
    done = finish(list(model.generate([5, 6, 7], GREEDY)))
    assert done.reason == "length"
    assert done.usage.prompt_tokens == 3
    assert done.usage.completion_tokens == 12
    assert done.usage.total_tokens == 15
    timings = done.timings
    assert 0 < timings.prompt_s <= timings.first_token_s
    assert timings.decode_per_s == pytest.approx(11 / timings.decode_s)
    assert timings.prompt_per_s == pytest.approx(3 / timings.prompt_s)


def test_no_tokens_are_sampled_when_none_are_wanted(model: Model) -> None:
    events = list(model.generate([5, 6], SamplingParams(max_tokens=0)))
    assert ids_of(events) == []
    assert finish(events).reason == "length"


def test_the_end_token_ends_and_is_not_shown(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = ids_of(list(model.generate([5, 6], GREEDY)))
    monkeypatch.setattr(model.tokenizer, "eog_ids", frozenset({sampled[3]}))
    stopped = list(model.generate([5, 6], SamplingParams(temperature=0, max_tokens=12)))
    assert ids_of(stopped) == sampled[: sampled.index(sampled[3])]
    assert finish(stopped).reason == "stop"


def test_a_stop_text_ends_and_is_not_shown(model: Model) -> None:
    text = text_of(list(model.generate([5, 6], GREEDY)))
    stop = text[4:7]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=(stop,))
    events = list(model.generate([5, 6], params))
    assert text_of(events) == text[: text.index(stop)]
    assert finish(events).reason == "stop"


def test_cancelling_takes_effect_within_a_token(model: Model) -> None:
    n_seen = 0

    def is_cancelled() -> bool:
        return n_seen >= 3

    events: list[Event] = []
    for event in model.generate([5, 6], GREEDY, is_cancelled):
        events.append(event)
        n_seen += isinstance(event, TokenText)
    assert finish(events).reason == "cancelled"
    assert n_seen <= 4


def test_cancelling_during_the_prompt_takes_effect_within_a_chunk(model: Model) -> None:
    events = list(model.generate(list(range(5, 45)), GREEDY, lambda: True))
    assert [type(event) for event in events] == [Finished]
    assert finish(events).reason == "cancelled"


def test_a_full_context_stops(model: Model) -> None:
    params = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
    done = finish(list(model.generate(list(range(5, 45)), params)))
    assert done.reason == "context"
    assert done.usage.total_tokens == 65, "the last token needs no place in the cache"


def test_an_answer_without_a_limit_ends_with_the_context(model: Model) -> None:
    events = list(model.generate([5, 6], SamplingParams(temperature=0, ignore_eos=True)))
    assert finish(events).reason == "context"
    assert finish(events).usage.total_tokens == model.n_ctx + 1, "the last one is not computed"


def test_a_full_context_can_shift_and_keeps_the_start(model: Model) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, on_overflow="shift")
    prompt = list(range(5, 45))
    events = list(model.generate(prompt, params))
    assert finish(events).usage.completion_tokens == 60
    shifts = [event.n_dropped for event in events if isinstance(event, ContextShifted)]
    assert shifts
    assert all(n > 0 for n in shifts)
    cached = model.scheduler.last
    assert cached[0] == prompt[0], "the beginning-of-text token stays"
    assert len(cached) <= 64


def test_after_a_shift_the_model_goes_on_from_exactly_what_was_kept(model: Model) -> None:
    params = SamplingParams(temperature=0, max_tokens=27, ignore_eos=True, on_overflow="shift")
    sampled = ids_of(list(model.generate(list(range(5, 45)), params)))
    kept = list(model.scheduler.last)
    assert model.logits(kept)[-1].argmax() == sampled[-1]


def test_a_shifted_chat_drops_old_turns_but_not_the_system_prompt(model: Model) -> None:
    old = [ChatMessage("user", "x" * 20), ChatMessage("assistant", "y" * 20)]
    messages = (ChatMessage("system", "S"), *old, ChatMessage("user", "now"))
    sampling = SamplingParams(temperature=0, max_tokens=2, on_overflow="shift")
    events = list(model.answer(AnswerRequest(messages, sampling=sampling)))
    assert isinstance(events[0], ContextShifted)
    text = model.tokenizer.decode(model.scheduler.last)
    assert "[system]S[user]now[assistant]" in text
    with pytest.raises(ContextOverflow):
        list(model.answer(AnswerRequest(messages, sampling=SamplingParams(max_tokens=2))))


def test_continuing_writes_on_the_last_message(model: Model) -> None:
    turns = (ChatMessage("user", "a"), ChatMessage("assistant", "b"))
    request = AnswerRequest(turns, sampling=GREEDY, continue_last=True)
    finish(list(model.answer(request)))
    assert "[user]a[assistant]b" in model.tokenizer.decode(model.scheduler.last)


@pytest.mark.parametrize("n_events", [1, 4, 9])
def test_an_answer_that_broke_off_goes_on_from_its_tokens(model: Model, n_events: int) -> None:
    """Its text alone would be cut into other tokens; here it has characters cut in half, too."""
    question = ChatMessage("user", "a")
    stops = ("never", "\u2028")
    sampling = replace(GREEDY, max_tokens=24, stop=stops)
    whole = list(model.answer(AnswerRequest((question,), sampling=sampling)))
    said = [event for event in whole if isinstance(event, TokenText)]
    begun, text = ids_of(said[:n_events]), text_of(said[:n_events])
    assert 0 < len(begun) < 24
    turns = (question, ChatMessage("assistant", text))
    request = AnswerRequest(turns, sampling=sampling, continue_last=True, begun=tuple(begun))
    rest = list(model.answer(request))
    assert text + text_of(rest) == text_of(whole)
    assert begun + ids_of(rest) == ids_of(whole)
    assert finish(rest).reason == "length"
    assert finish(rest).usage.completion_tokens == 24 - len(begun)


@pytest.mark.parametrize("begun", [(5, 6, 7), (10**9,), (-1,)], ids=str)
def test_tokens_that_are_not_the_answers_text_are_not_used(
    model: Model, begun: tuple[int, ...]
) -> None:
    """So is an answer that somebody has edited."""
    turns = (ChatMessage("user", "a"), ChatMessage("assistant", "b"))
    request = AnswerRequest(turns, sampling=GREEDY, continue_last=True, begun=begun)
    assert finish(list(model.answer(request))).usage.completion_tokens == GREEDY.max_tokens
    assert "[user]a[assistant]b" in model.tokenizer.decode(model.scheduler.last)


def test_an_answer_longer_than_the_context_is_continued_from_its_end(model: Model) -> None:
    """The question stays, and half of the room is left for more of the answer."""
    answer = "".join(chr(ord("a") + n % 26) for n in range(100))
    turns = (ChatMessage("user", "Q"), ChatMessage("assistant", answer))
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, on_overflow="shift")
    events = list(model.answer(AnswerRequest(turns, sampling=sampling, continue_last=True)))
    assert isinstance(events[0], ContextShifted)
    n_generated = finish(events).usage.completion_tokens
    prompt = model.tokenizer.decode(
        model.scheduler.last[: len(model.scheduler.last) - n_generated + 1]
    )
    question, _, kept = prompt.partition("[assistant]")
    assert question.endswith("[user]Q")
    assert answer.endswith(kept)
    assert len(answer) // 8 < len(kept) < model.n_ctx // 2
    stopping = replace(sampling, on_overflow="stop")
    with pytest.raises(ContextOverflow):
        list(model.answer(AnswerRequest(turns, sampling=stopping, continue_last=True)))


@pytest.mark.parametrize("prompt", [[], [10**9], [-1]], ids=str)
def test_a_prompt_that_means_nothing_is_refused(model: Model, prompt: list[int]) -> None:
    with pytest.raises(PromptError):
        list(model.generate(prompt, GREEDY))
    assert ids_of(list(model.generate([5, 6], GREEDY))), "usable after"


def test_a_prompt_longer_than_the_context_is_refused(model: Model) -> None:
    with pytest.raises(ContextOverflow, match="65 tokens exceeds the available context size of 64"):
        list(model.generate([5] * 65, GREEDY))


def test_a_model_without_vocabulary_generates_ids_without_text(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", tokenizer=False, extra={"tokenizer.ggml.model": "none"})
    with load_model(path) as model:
        events = list(model.generate([1, 2, 3], GREEDY))
        assert len(ids_of(events)) == 12
        assert text_of(events) == ""
        with pytest.raises(PromptError, match="no vocabulary"):
            list(model.generate("text", GREEDY))


def follow(path: Path, stream: bool, is_able: Callable[[], bool], **changes: Any) -> list[Event]:
    """Return the events of an answer; a token source, if any, samples what it can."""
    params = SamplingParams(max_tokens=20, seed=3, temperature=1, ignore_eos=True, **changes)
    with load_model(path, n_ctx=64, kv_type="f32") as model:
        if stream:
            model.runtime.token_source = source = AheadSource(model.runtime.runner, 1, is_able)
        events = list(model.generate([5, 6, 7], params))
        assert not stream or 0 < source.n_delivered < 20
    return events


def test_the_host_samples_where_the_runtime_cannot(path: Path) -> None:
    """And all random numbers are used once, by one or the other."""
    turns = iter([True, False, True, True, True, False, False] * 20)
    changes = {"repeat_penalty": 1.2}
    sampled = follow(path, True, lambda: next(turns), **changes)
    assert ids_of(sampled) == ids_of(follow(path, False, lambda: True, **changes))


def test_what_the_runtime_does_not_serve_is_sampled_by_the_host(path: Path) -> None:
    params = SamplingParams(max_tokens=5, seed=3, typical_p=0.9, ignore_eos=True)
    with load_model(path, n_ctx=64, kv_type="f32") as model:
        wanted = ids_of(list(model.generate([5, 6, 7], params)))
        model.runtime.token_source = source = AheadSource(model.runtime.runner, 1)
        assert ids_of(list(model.generate([5, 6, 7], params))) == wanted
        assert source.n_delivered == 0


def test_timed_tokens_take_the_time_since_the_one_before(model: Model) -> None:
    events = list(model.generate([5, 6], GREEDY, timed_every=4))
    times = [event for event in events if isinstance(event, TokenTimes)]
    assert [t.position for t in times] == [5, 9]
    assert all(t.seconds > 0 for t in times)
    assert ids_of(events) == ids_of(list(model.generate([5, 6], GREEDY)))


def test_an_answer_goes_on_with_another_runtime(model: Model) -> None:
    """Tokens that were sampled ahead and that nobody has read are not part of the conversation."""
    wanted = ids_of(list(model.generate([5, 6], GREEDY)))
    events = model.generate([5, 6], GREEDY)
    begun = ids_of([next(events) for _ in range(4)])
    model.resplit([1, 1], devices=["cpu", "cpu"])
    assert begun + ids_of(list(events)) == wanted


def test_an_answer_goes_on_beside_another(model: Model) -> None:
    wanted = [ids_of(list(model.generate(prompt, GREEDY))) for prompt in ([5, 6], [9, 9])]
    first, second = model.generate([5, 6], GREEDY), model.generate([9, 9], GREEDY)
    begun = [next(first) for _ in range(4)]
    assert ids_of(list(second)) == wanted[1]
    assert ids_of([*begun, *first]) == wanted[0]


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_texts_are_found_wherever_a_stream_is_cut(text: str, stops: list[str]) -> None:
    def run(pieces: Sequence[str]) -> tuple[str, bool]:
        matcher, shown = StopMatcher(stops), ""
        for piece in pieces:
            new, is_stopped = matcher.feed(piece)
            shown += new
            if is_stopped:
                return shown, True
        return shown + matcher.flush(), False

    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    streamed, is_stopped = run(list(text))
    assert is_stopped == bool(ends)
    if not ends:
        assert streamed == text == run([text])[0]
    else:
        assert text.startswith(streamed)
        assert not any(stop in streamed for stop in stops)
