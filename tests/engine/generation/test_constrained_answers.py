"""Answers of whole models with a form: alone and side by side, with bans, thinking and limits."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from app.core.paths import demo_model
from engine import (
    AnswerRequest,
    ChatMessage,
    EngineError,
    Event,
    Finished,
    Grammar,
    GrammarError,
    LoadParams,
    Model,
    SamplingParams,
    TokenText,
    load_model,
)
from engine.generation.sequence import Decode
from tests.helpers.ahead import AheadSource
from tests.helpers.tiny_gguf import tiny_gguf

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 12}, "b": {"enum": [1, 2, None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ASKED = (ChatMessage("user", "What is Tandem?"),)
THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}<|im_start|><think>\n"


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    path = demo_model()
    assert path is not None
    with load_model(path, n_ctx=512, parallel=2) as loaded:
        yield loaded


def params(seed: int = 1, **others: object) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=200, **others)  # type: ignore[arg-type]


def text_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TokenText))


def reason_of(events: Sequence[Event]) -> str:
    assert isinstance(events[-1], Finished)
    return events[-1].reason


def test_answers_side_by_side_are_those_alone(model: Model) -> None:
    requests = [
        AnswerRequest(ASKED, sampling=params(3, json_schema=SCHEMA)),
        AnswerRequest(ASKED, sampling=params(4), grammar=Grammar("regex", "[a-z]{20}[0-9]")),
        AnswerRequest(prompt="Tandem is", sampling=replace(params(5), max_tokens=20)),
    ]
    alone = [text_of(list(model.answer(request))) for request in requests]
    streams = [model.answer(request) for request in requests]
    together = [list[Event]() for _ in requests]
    while not all(stream.is_over for stream in streams):
        for stream, events in zip(streams, together, strict=True):
            if (event := next(stream, None)) is not None:
                events.append(event)
    assert [text_of(events) for events in together] == alone
    assert json.loads(alone[0]).keys() == {"a", "b"}
    assert re.fullmatch("[a-z]{20}[0-9]", alone[1])


def test_no_device_samples_them(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", n_ctx=64)
    with load_model(path, n_ctx=64, kv_type="f32") as loaded:
        loaded.runtime.token_source = AheadSource(loaded.runtime.runner, 2)
        greedy = SamplingParams(temperature=0, regex="(hello|world) [0-9]{3}", max_tokens=40)
        events = list(loaded.generate("the", greedy))
    assert re.fullmatch("(hello|world) [0-9]{3}", text_of(events))
    assert reason_of(events) == "stop"


def test_banned_strings_are_left_out_of_the_form(model: Model) -> None:
    sampling = params(json_schema=SCHEMA, banned_strings=("null", "1", "e", '"a": '))
    text = text_of(list(model.answer(AnswerRequest(ASKED, sampling=sampling))))
    found = json.loads(text)
    assert found["b"] == 2
    assert "e" not in text


def test_a_form_that_is_banned_ends_in_a_sentence(model: Model) -> None:
    sampling = params(regex="abc", banned_strings=("bc",))
    with pytest.raises(EngineError, match="violates the output format"):
        list(model.answer(AnswerRequest(ASKED, sampling=sampling)))


def test_the_form_ends_the_answer_even_where_ends_are_ignored(model: Model) -> None:
    events = list(
        model.answer(AnswerRequest(ASKED, sampling=params(regex="[ab]{3}", ignore_eos=True)))
    )
    assert re.fullmatch("[ab]{3}", text_of(events))
    assert reason_of(events) == "stop"


def test_max_tokens_may_cut_it(model: Model) -> None:
    sampling = replace(params(json_schema=SCHEMA), max_tokens=4)
    events = list(model.answer(AnswerRequest(ASKED, sampling=sampling)))
    assert reason_of(events) == "length"
    assert text_of(events).startswith('{"a"')


def test_a_grammar_whose_masks_take_too_long_ends_its_answer(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.generation.structured_output.MAX_MASK_SECONDS", 0.002)
    monkeypatch.setattr("engine.generation.structured_output.USUAL_MASK_SECONDS", 0.0)
    ambiguous = Grammar("gbnf", 'root ::= w+\nw ::= [a-z ]+ | [a-z]+ " " | w w')
    sampling = replace(params(), max_tokens=14)  # each of them takes longer than the one before
    other = model.answer(AnswerRequest(prompt="A", sampling=replace(sampling, ignore_eos=True)))
    with pytest.raises(GrammarError, match="takes too long"):
        list(model.answer(AnswerRequest(prompt="Tandem is", sampling=sampling, grammar=ambiguous)))
    assert reason_of(list(other)) == "length"


@pytest.mark.parametrize("is_slow", [True, False])
def test_nothing_is_guessed_where_masks_are_slow(
    model: Model, monkeypatch: pytest.MonkeyPatch, *, is_slow: bool
) -> None:
    """A pass would compute a mask for each guess, while all other answers wait."""
    seconds = -1.0 if is_slow else 60.0
    monkeypatch.setattr("engine.generation.structured_output.DRAFTED_MASK_SECONDS", seconds)
    numbers = AnswerRequest(prompt="1", sampling=params(), grammar=Grammar("regex", "[0-9]{20}"))
    stream, n_left = model.answer(numbers), set[int]()
    while not stream.is_over:
        next(stream, None)
        if isinstance(step := stream._sequence.step, Decode):
            n_left.add(step.n_left)
    assert (n_left == {1}) == is_slow


def test_an_answer_is_continued_in_its_form(model: Model) -> None:
    begun = (*ASKED, ChatMessage("assistant", '{"a": "x'))
    sampling = params(json_schema=SCHEMA)
    rest = text_of(list(model.answer(AnswerRequest(begun, sampling=sampling, continue_last=True))))
    assert json.loads('{"a": "x' + rest)["a"].startswith("x")
    wrong = (*ASKED, ChatMessage("assistant", "Well"))
    with pytest.raises(GrammarError, match="answer to continue"):
        list(model.answer(AnswerRequest(wrong, sampling=sampling, continue_last=True)))


def test_errors_come_with_the_first_event(model: Model) -> None:
    for sampling in (params(json_schema='{"type": 1}'), params(regex="a", grammar='start: "a"')):
        with pytest.raises(GrammarError):
            next(model.answer(AnswerRequest(ASKED, sampling=sampling)))
        with pytest.raises(GrammarError):
            next(model.generate("a", sampling))


def test_the_form_begins_behind_a_thought() -> None:
    """The demo model's thoughts have no end, so the mark comes as the answer's beginning."""
    path = demo_model()
    assert path is not None
    with Model(LoadParams(str(path), ("cpu",), n_ctx=512, chat_template=THINKS)) as model:
        sampling = params(regex="[0-9]{4}")
        events = list(model.answer(AnswerRequest(ASKED, sampling=replace(sampling, max_tokens=30))))
        assert not text_of(events).strip().isdigit()
        assert reason_of(events) == "length", "it thinks, and must not end there"
        begun = (*ASKED, ChatMessage("assistant", "Hm.\n</think>\n\n"))
        events = list(model.answer(AnswerRequest(begun, sampling=sampling, continue_last=True)))
        assert re.fullmatch("[0-9]{4}", text_of(events))
