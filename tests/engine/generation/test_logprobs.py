"""Probabilities of tokens: those of the model's own logits, for each token that is told of."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import (
    AnswerRequest,
    ChatMessage,
    EngineError,
    Finished,
    Model,
    SamplingParams,
    TokenText,
    load_model,
)
from engine.decoding.sampling.sampler import likeliest, logprobs_of
from tests.helpers.ahead import AheadSource
from tests.helpers.tiny_gguf import tiny_gguf

PROMPT = "hello the world"


@pytest.fixture(scope="module", params=["host", "ahead"])
def model(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Model]:
    """Yield a model whose tokens the host samples, and one that samples two tokens ahead."""
    path = tiny_gguf(tmp_path_factory.mktemp("model") / "m.gguf", n_ctx=96)
    with load_model(path, ["cpu", "cpu"], n_ctx=96, n_batch=8, kv_type="f32") as loaded:
        if request.param == "ahead":
            loaded.runtime.token_source = AheadSource(loaded.runtime.runner, 2)
        yield loaded


def answer(model: Model, n: int | None, **settings: Any) -> list[TokenText]:
    given = {"max_tokens": 24, "ignore_eos": True, "temperature": 0, "seed": 1, **settings}
    asked = AnswerRequest(prompt=PROMPT, sampling=SamplingParams(**given), n_logprobs=n)
    return [event for event in model.answer(asked) if isinstance(event, TokenText)]


def check(model: Model, events: list[TokenText], n: int) -> None:
    """Check an answer's probabilities against PyTorch's of the model's logits."""
    for event in events:
        assert [found.id for found in event.logprobs] == list(event.ids)
    found = [logprob for event in events for logprob in event.logprobs]
    assert len(found) == 24
    prompt = model.tokenize(PROMPT, add_special=True)
    ids = [*prompt, *(one.id for one in found)]
    rows = torch.from_numpy(model.logits(ids)[len(prompt) - 1 : -1]).double()
    expected = rows.log_softmax(-1).tolist()
    for one, row in zip(found, expected, strict=True):
        assert one.logprob == pytest.approx(row[one.id], abs=1e-12)
        top = sorted(range(len(row)), key=lambda token: (-row[token], token))[:n]
        assert [token for token, _ in one.top] == top
        assert [logprob for _, logprob in one.top] == pytest.approx([row[i] for i in top])


@pytest.mark.parametrize(
    ("n", "settings"),
    [
        (0, {}),
        (3, {"temperature": 2.0, "top_k": 5, "repeat_penalty": 1.8}),
        (20, {"logit_bias": ((70, 50.0), (71, 51.0)), "presence_penalty": 2.0}),
    ],
    ids=["greedy", "random", "biased"],
)
def test_each_token_has_its_probability_before_anything_changes_it(
    model: Model, n: int, settings: dict[str, Any]
) -> None:
    check(model, answer(model, n, **settings), n)


@pytest.mark.parametrize("what", ["banned_strings", "stop"])
def test_tokens_that_are_held_back_keep_theirs_and_those_taken_back_have_none(
    model: Model, what: str
) -> None:
    said = "".join(event.text for event in answer(model, None))
    bans = {
        "banned_strings": (said[7:12], said[20:21]),
        "stop": tuple(said[at : at + 9] + "~" for at in range(0, 40, 7)),
    }
    events = answer(model, 2, **{what: bans[what]})
    assert max(len(event.ids) for event in events) > 1, "some are held back"
    is_same = "".join(event.text for event in events) == said
    assert is_same == (what == "stop"), "some are taken back"
    check(model, events, 2)


def test_an_answer_is_the_same_with_them_and_without(model: Model) -> None:
    with_them = answer(model, 5, temperature=1.0)
    without = answer(model, None, temperature=1.0)
    assert [e.text for e in with_them] == [e.text for e in without]
    assert not any(event.logprobs for event in without)


def test_an_answer_in_parts_has_them_as_well(model: Model) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    asked = AnswerRequest((ChatMessage("user", "hello"),), sampling=sampling, n_logprobs=1)
    plain, parts = (
        [event for event in model.answer(one) if isinstance(event, TokenText)]
        for one in (asked, replace(asked, in_parts=True))
    )
    for event in parts:
        assert [found.id for found in event.logprobs] == list(event.ids)
    told = [
        [logprob for event in events for logprob in event.logprobs] for events in (plain, parts)
    ]
    assert len(told[0]) == 24
    assert told[0] == told[1]


def test_the_token_that_ends_an_answer_has_its_probability_at_the_end(model: Model) -> None:
    end = min(model.tokenizer.eog_ids)
    sampling = SamplingParams(temperature=0, logit_bias=((end, 1000.0),))
    for n in (None, 2):
        asked = AnswerRequest(prompt=PROMPT, sampling=sampling, n_logprobs=n)
        *events, last = model.answer(asked)
        assert not any(isinstance(event, TokenText) for event in events)
        assert isinstance(last, Finished)
        assert (last.end is None) == (n is None)
    assert last.end is not None
    row = torch.from_numpy(model.logits(model.prompt_ids(PROMPT))[-1]).double().log_softmax(-1)
    assert last.end.id == end
    assert last.end.logprob == pytest.approx(row[end].item(), abs=1e-12)
    assert len(last.end.top) == 2


@pytest.mark.parametrize("n", [-1, 21])
def test_more_than_twenty_or_fewer_than_none_are_refused(model: Model, n: int) -> None:
    with pytest.raises(EngineError, match=f"probabilities of {n} tokens"):
        answer(model, n)


def test_tokens_of_a_text_are_scored_from_the_second_on(model: Model) -> None:
    ids = model.tokenize("hello world, the split model hello world", add_special=True)
    assert len(ids) > 8, "more than a batch"
    found = model.score(ids, 3)
    assert [one.id for one in found] == ids[1:]
    expected = torch.from_numpy(model.logits(ids)[:-1]).double().log_softmax(-1)
    told = [row[token].item() for row, token in zip(expected, ids[1:], strict=True)]
    assert [one.logprob for one in found] == pytest.approx(told, abs=1e-12)
    assert [one.top[0][0] for one in found] == expected.argmax(-1).tolist()
    assert {len(one.top) for one in found} == {3}
    assert model.score(ids[:1]) == []
    assert model.prompt_ids(ids) == ids
    with pytest.raises(EngineError, match="probabilities of 21 tokens"):
        model.score(ids, 21)


LEVELS = st.sampled_from([-np.inf, -2.0, 0.0, 1.0, 5000.0])


@given(st.lists(LEVELS, min_size=1, max_size=9), st.integers(0, 11))
def test_the_likeliest_come_first_and_equal_ones_by_id(levels: list[float], n: int) -> None:
    levels.append(0.0)  # something can come
    logprobs = logprobs_of(np.array(levels, np.float32))
    assert np.exp(logprobs).sum() == pytest.approx(1)
    possible = [(-level, token) for token, level in enumerate(levels) if level > -np.inf]
    found = likeliest(logprobs, n)
    assert [token for token, _ in found] == [token for _, token in sorted(possible)[:n]]
    assert all(logprob == logprobs[token] for token, logprob in found)
