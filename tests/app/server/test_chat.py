"""Chat completions, asked for by OpenAI's own client on a real socket."""

from collections.abc import Iterator

import pytest
from openai import OpenAI

from app.core.paths import demo_model
from engine import (
    AnswerRequest,
    ChatMessage,
    Finished,
    Model,
    SamplingParams,
    TokenText,
    load_model,
)
from tests.helpers.served import EngineOnThread

QUESTION = "What is tensor parallelism?"
ASKED = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def alone() -> Iterator[Model]:
    """Return the served model, loaded once more without a server."""
    with load_model(str(demo_model())) as model:
        yield model


def answer_alone(model: Model, params: SamplingParams) -> tuple[str, Finished]:
    """Return the text and the end of the engine's own answer to the question."""
    events = list(model.answer(AnswerRequest((ChatMessage("user", QUESTION),), sampling=params)))
    text = "".join(event.text for event in events if isinstance(event, TokenText))
    assert isinstance(events[-1], Finished)
    return text, events[-1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_is_the_engines_own(client: OpenAI, alone: Model, temperature: float) -> None:
    done = client.chat.completions.create(
        model="tandem-demo", messages=ASKED, seed=7, temperature=temperature, max_tokens=24
    )
    text, end = answer_alone(alone, SamplingParams(24, temperature, seed=7))
    assert done.choices[0].message.content == text
    assert done.choices[0].message.role == "assistant"
    assert done.choices[0].finish_reason == "length"
    assert (done.object, done.model) == ("chat.completion", "tandem-demo")
    assert done.usage is not None
    assert done.usage.prompt_tokens == end.usage.prompt_tokens
    assert done.usage.completion_tokens == end.usage.completion_tokens == 24
    assert done.usage.total_tokens == end.usage.total_tokens


def test_a_stream_has_the_same_text(client: OpenAI, alone: Model) -> None:
    stream = client.chat.completions.create(
        model="tandem-demo", messages=ASKED, seed=3, max_tokens=40, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    first, *middle, last = chunks
    assert first.choices[0].delta.role == "assistant"
    text = "".join(one.choices[0].delta.content or "" for one in [first, *middle])
    wanted, end = answer_alone(alone, SamplingParams(40, seed=3))
    assert text == wanted
    assert [one.choices[0].finish_reason for one in middle[:-1]] == [None] * (len(middle) - 1)
    assert middle[-1].choices[0].finish_reason == end.reason
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == end.usage.completion_tokens
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens is not None
    assert all(one.usage is None for one in [first, *middle])
    assert len({one.id for one in chunks}) == 1


def test_a_stop_text_ends_the_answer(client: OpenAI, alone: Model) -> None:
    whole, _ = answer_alone(alone, SamplingParams(24, 0.0))
    stop = whole.split()[3]
    done = client.chat.completions.create(
        model="", messages=ASKED, temperature=0, max_tokens=24, stop=["never so", stop]
    )
    assert done.choices[0].message.content == whole.partition(stop)[0]
    assert done.choices[0].finish_reason == "stop"


def test_several_answers_have_the_seeds_behind_each_other(client: OpenAI, alone: Model) -> None:
    done = client.chat.completions.create(
        model="", messages=ASKED, seed=11, max_tokens=12, n=3, temperature=1.0
    )
    wanted = [answer_alone(alone, SamplingParams(12, 1.0, seed=11 + i)) for i in range(3)]
    assert [one.message.content for one in done.choices] == [text for text, _ in wanted]
    assert [one.index for one in done.choices] == [0, 1, 2]
    assert done.usage is not None
    assert done.usage.completion_tokens == 36
    assert done.usage.prompt_tokens == wanted[0][1].usage.prompt_tokens


def test_a_conversation_reaches_the_engine(client: OpenAI, demo_engine: EngineOnThread) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": part} for part in ("One", "two")]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "a", "content": "3"},
    ]  # fmt: skip
    client.chat.completions.create(model="", messages=messages, max_tokens=1)  # type: ignore[arg-type]
    system, user, assistant, tool = demo_engine.last_command().messages
    assert (system.role, system.content) == ("system", "Be short.")
    assert user.content == "One\ntwo"
    assert assistant.tool_calls[0].arguments == '{"x": 1}'
    assert assistant.reasoning == "hm"
    assert (tool.role, tool.tool_call_id, tool.name) == ("tool", "a", "add")
