"""Thoughts, calls of functions and failures of an engine that follows a script."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from openai import APIError, APIStatusError, InternalServerError, OpenAI

from app.server.openai.conversation import ANY_OBJECT
from engine import (
    EngineCrashed,
    Event,
    Grammar,
    ModelFileError,
    PrefillProgress,
    TokenLogprob,
    TokenText,
    Tool,
    ToolCallBegun,
    ToolCallEnded,
    ToolCallText,
)
from tests.helpers.fake_host import FakeHost, Script
from tests.helpers.served import EngineOnThread, Served

USER: Any = [{"role": "user", "content": "Add 1 and 2"}]

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
}

CALLS: list[Event] = [
    PrefillProgress(1, 4),
    TokenText("I shall ", (1, 2), "reasoning"),
    TokenText("add.", (3,), "reasoning"),
    ToolCallBegun(0, "call_a", "add"),
    ToolCallText(0, '{"x":'),
    ToolCallText(0, " 1}"),
    ToolCallEnded(0, is_whole=True),
    ToolCallBegun(1, "call_b", "add"),
    ToolCallText(1, "{}"),
    ToolCallEnded(1, is_whole=True),
]


@pytest.fixture
def script() -> Script:
    return Script(answer="", extra=[*CALLS])


@pytest.fixture
def scripted(script: Script) -> Iterator[EngineOnThread]:
    engine = EngineOnThread(lambda on_event: FakeHost(on_event, script))
    yield engine
    engine.close()


@pytest.fixture
def asked(scripted: EngineOnThread) -> Iterator[OpenAI]:
    with Served(scripted) as server, server.client() as client:
        yield client


def test_calls_and_thoughts_are_parts_of_a_message(asked: OpenAI) -> None:
    done = asked.chat.completions.create(model="", messages=USER, tools=[TOOL])  # type: ignore[list-item]
    (choice,) = done.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.reasoning_content == "I shall add."  # type: ignore[attr-defined]
    calls = [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]  # type: ignore[union-attr]
    assert calls == [("call_a", "add", '{"x": 1}'), ("call_b", "add", "{}")]
    assert done.usage is not None
    assert done.usage.completion_tokens_details is not None
    assert done.usage.completion_tokens_details.reasoning_tokens == 3


def test_calls_are_streamed_in_fragments_with_their_name_once(asked: OpenAI) -> None:
    stream = asked.chat.completions.create(model="", messages=USER, tools=[TOOL], stream=True)  # type: ignore[list-item]
    chunks = [chunk.choices[0] for chunk in stream]
    fragments = [call for one in chunks for call in one.delta.tool_calls or []]
    named = [one for one in fragments if one.id is not None]
    assert [(one.index, one.id) for one in named] == [(0, "call_a"), (1, "call_b")]
    assert all(one.type == "function" for one in named)
    arguments = ["", ""]
    for one in fragments:
        assert one.function is not None
        arguments[one.index] += one.function.arguments or ""
    assert [json.loads(text) for text in arguments] == [{"x": 1}, {}]
    thoughts = [getattr(one.delta, "reasoning_content", None) or "" for one in chunks]
    assert "".join(thoughts) == "I shall add."
    assert chunks[-1].finish_reason == "tool_calls"


def test_a_call_that_is_cut_off_has_arguments_that_no_client_can_read(
    asked: OpenAI, script: Script
) -> None:
    script.reason, cut = "length", '{"path": "home/anna'
    script.extra = [*CALLS[:8], ToolCallText(1, cut), ToolCallEnded(1, is_whole=False)]
    given: Any = {"model": "", "messages": USER, "tools": [TOOL]}
    (choice,) = asked.chat.completions.create(**given).choices
    texts = [call.function.arguments for call in choice.message.tool_calls or []]  # type: ignore[union-attr]
    assert texts == ['{"x": 1}', cut]
    chunks = [one.choices[0] for one in asked.chat.completions.create(**given, stream=True)]
    assert chunks[-1].finish_reason == choice.finish_reason == "length"
    calls = [call for one in chunks for call in one.delta.tool_calls or []]
    streamed = "".join(call.function.arguments for call in calls if call.index == 1)
    assert streamed == cut + '"]'


@pytest.mark.parametrize("is_parallel", [True, False])
def test_only_one_call_comes_unless_several_are_wanted(
    asked: OpenAI, scripted: EngineOnThread, is_parallel: bool
) -> None:
    """As llama.cpp has it; the engine ends the answer."""
    wish: Any = {"parallel_tool_calls": True} if is_parallel else {}
    asked.chat.completions.create(model="", messages=USER, tools=[TOOL], **wish)  # type: ignore[list-item]
    assert scripted.last_command().parallel_tool_calls == is_parallel


def test_what_is_asked_reaches_the_engine(asked: OpenAI, scripted: EngineOnThread) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    asked.chat.completions.create(
        model="", messages=USER, tools=[TOOL], reasoning_effort="minimal",  # type: ignore[list-item]
        tool_choice={"type": "function", "function": {"name": "add"}},
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        temperature=0.5, top_p=0.9, presence_penalty=0.1, frequency_penalty=0.2, seed=-1,
        stop="x", logit_bias={"7": -100, "8": 2}, max_completion_tokens=9, max_tokens=5,
        extra_body={
            "chat_template_kwargs": {"enable_thinking": False, "day": 3}, "top_k": 5, "min_p": None,
        },
    )  # fmt: skip
    command = scripted.last_command()
    assert command.in_parts
    assert command.tools == (Tool("add", "Adds.", '{"type": "object"}'),)
    assert command.tool_choice == "=add"
    assert (command.effort, command.thinks) == ("low", False)
    assert json.loads(command.variables) == {"enable_thinking": False, "day": 3}
    assert command.grammar == Grammar("json_schema", json.dumps(schema))
    sampling = command.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 0.2)
    assert (sampling.seed, sampling.stop, sampling.max_tokens) == (None, ("x",), 9)
    assert sampling.logit_bias == ((7, float("-inf")), (8, 2.0))


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_schema", ANY_OBJECT)),
        ({"grammar": "root ::= x"}, Grammar("gbnf", "root ::= x")),
        ({"regex": "a+"}, Grammar("regex", "a+")),
    ],
    ids=str,
)  # fmt: skip
def test_forms_of_answers_are_grammars(
    asked: OpenAI, scripted: EngineOnThread, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    asked.chat.completions.create(model="", messages=USER, extra_body=fields)
    assert scripted.last_command().grammar == grammar


def test_logprobs_that_json_lacks_are_told_otherwise(asked: OpenAI, script: Script) -> None:
    never = TokenLogprob(5, float("-inf"), ((6, -0.5),))
    script.extra = [TokenText("x", (5,), logprobs=(never,))]
    done = asked.chat.completions.create(
        model="", messages=USER, logprobs=True, top_logprobs=1, stream=False
    )
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].logprob == -9999.0


def test_a_crash_before_the_first_token_has_a_status(asked: OpenAI, script: Script) -> None:
    script.extra, script.answer_error = [], EngineCrashed("The engine has ended.", "See the log.")
    with pytest.raises(InternalServerError, match=r"has ended\. See the log") as caught:
        asked.chat.completions.create(model="", messages=USER, stream=True)
    assert caught.value.code == "engine_error"


def test_a_crash_in_a_stream_is_an_event(asked: OpenAI, script: Script) -> None:
    script.answer, script.answer_error = "Hello", EngineCrashed("The engine has ended.")
    stream = asked.chat.completions.create(model="", messages=USER, stream=True)
    with pytest.raises(APIError, match="The engine has ended"):
        list(stream)


def test_a_model_file_that_is_gone_is_told(asked: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> None:
        raise ModelFileError(path, "the file is gone")

    monkeypatch.setattr("engine.load_tokenizer", fail, raising=False)
    with pytest.raises(APIStatusError, match="the file is gone") as caught:
        asked.chat.completions.create(model="", messages=USER, logprobs=True)
    assert caught.value.status_code == 500


def test_prompts_are_in_the_log_only_if_wanted(
    scripted: EngineOnThread, caplog: pytest.LogCaptureFixture
) -> None:
    for wanted in (False, True):
        with Served(scripted, logs_prompts=wanted) as server, server.client() as client:
            client.chat.completions.create(model="", messages=USER)
        assert ("Add 1 and 2" in caplog.text) == wanted


def test_figures_tell_what_was_done(scripted: EngineOnThread) -> None:
    with (
        Served(scripted) as server,
        server.client() as client,
        httpx2.Client(base_url=server.address, trust_env=False) as http,
    ):
        client.chat.completions.create(model="", messages=USER)
        text = http.get("/metrics").text
        assert http.get("/slots").json()["slots"] == []
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    route = 'tandem_requests_total{route="POST /v1/chat/completions",status="200"}'
    assert lines[route] == "1"
    assert lines["tandem_completion_tokens_total"] == "3"
    assert lines['tandem_client_completion_tokens_total{client="127.0.0.1"}'] == "3"
    assert lines["tandem_prompt_tokens_total"] == "20"
    assert lines["tandem_answers_running"] == "0"
    assert lines["tandem_model_loaded"] == "1"
    names = {name.partition("{")[0] for name in lines}
    typed = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert names <= typed


def test_slots_show_what_runs(scripted: EngineOnThread, script: Script) -> None:
    script.answer, script.hold, script.hold_after = "Hello", True, 1
    with (
        Served(scripted) as server,
        server.client() as client,
        httpx2.Client(base_url=server.address, trust_env=False) as http,
    ):
        stream = client.chat.completions.create(model="", messages=USER, stream=True)
        for _ in range(4):
            next(stream)
        (slot,) = http.get("/slots").json()["slots"]
        stream.close()
    assert (slot["state"], slot["client"]) == ("writing", "127.0.0.1")
    assert (slot["n_prompt_to_read"], slot["n_prompt_read"]) == (4, 1)
    assert slot["n_decoded"] == 4
    assert slot["model"] == "tandem-demo"
