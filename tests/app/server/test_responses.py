"""OpenAI's Responses protocol, asked by OpenAI's own client on a real socket."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from app.server.openai_responses.answer import ResponseAnswer, response_command
from app.server.openai_responses.request import ResponseRequest, ResponseTool
from engine import (
    ChatMessage,
    Event,
    Finished,
    Timings,
    TokenText,
    ToolCallBegun,
    ToolCallEnded,
    ToolCallText,
    Usage,
)
from tests.helpers.served import EngineOnThread

QUESTION = "What is tensor parallelism?"


def test_a_response_is_the_answer_of_the_other_protocol(client: OpenAI) -> None:
    done = client.responses.create(
        model="tandem-demo", input=QUESTION, instructions="Be short.", temperature=0,
        max_output_tokens=24,
    )  # fmt: skip
    messages: Any = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": QUESTION},
    ]
    other = client.chat.completions.create(
        model="", messages=messages, temperature=0, max_tokens=24
    )
    assert done.output_text == other.choices[0].message.content
    assert (done.status, done.model) == ("incomplete", "tandem-demo")
    assert done.incomplete_details is not None
    assert done.incomplete_details.reason == "max_output_tokens"
    assert done.usage is not None
    assert other.usage is not None
    assert done.usage.input_tokens == other.usage.prompt_tokens
    assert (done.usage.output_tokens, done.usage.total_tokens) == (24, other.usage.total_tokens)


def test_a_stream_has_the_same_response(client: OpenAI) -> None:
    asked: Any = {"model": "", "input": QUESTION, "temperature": 0, "max_output_tokens": 20}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    last = events[-1].response
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    assert last.output_text == whole.output_text
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.output_tokens == whole.usage.output_tokens


def test_a_conversation_reaches_the_engine(client: OpenAI, demo_engine: EngineOnThread) -> None:
    items: Any = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "input_text", "text": "Add."}]},
        {"type": "reasoning", "id": "r", "summary": [],
         "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed",
         "content": [{"type": "output_text", "text": "Well.", "annotations": []}]},
        {"type": "function_call", "call_id": "a", "name": "add", "arguments": '{"x": 1}'},
        {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "+1"},
        {"type": "function_call_output", "call_id": "a", "output": "3"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": "done"},
    ]  # fmt: skip
    tools: Any = [
        {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True},
        {"type": "custom", "name": "patch", "description": "Patches.",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}},
        {"type": "web_search"},
    ]  # fmt: skip
    client.responses.create(
        model="", input=items, max_output_tokens=1, tools=tools, tool_choice="none"
    )
    asked = demo_engine.last_command()
    system, user, answer, added, patched = asked.messages
    assert (system, user) == (ChatMessage("system", "Be short."), ChatMessage("user", "Add."))
    assert (answer.content, answer.reasoning) == ("Well.", "hm")
    assert [(call.name, call.id) for call in answer.tool_calls] == [("add", "a"), ("patch", "b")]
    assert answer.tool_calls[1].arguments == '{"input": "+1"}'
    assert added == ChatMessage("tool", "3", tool_call_id="a", name="add")
    assert patched == ChatMessage("tool", "done", tool_call_id="b", name="patch")
    assert [tool.name for tool in asked.tools] == ["add", "patch"]
    assert asked.tools[1].description == "Patches.\n\nIts input:\nstart: /x/"
    assert asked.tool_choice == "none"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "gpt-9"}, "no model 'gpt-9'; available"),
        ({"input": []}, "input must be"),
        ({"previous_response_id": "resp_1"}, "does not store conversations"),
        ({"background": True}, "does not support background mode"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "is not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "must be a data URI"),
    ],
)
def test_what_cannot_be_answered_is_said(
    client: OpenAI, change: dict[str, object], message: str
) -> None:
    with pytest.raises(openai.APIStatusError, match=message) as told:
        client.responses.create(model="", input=QUESTION, extra_body=change)
    assert told.value.status_code == (404 if "model" in change else 400)


# what the demo model does not do: answers of events that are made up

CALLING: list[Event] = [
    TokenText("hm", (1,), "reasoning"),
    TokenText("Adding.", (2,)),
    ToolCallBegun(0, "call_1", "add"),
    ToolCallText(0, '{"x": '),
    ToolCallText(0, "1}"),
    ToolCallEnded(0, is_whole=True),
    ToolCallBegun(1, "call_2", "patch"),
    ToolCallText(1, '{"input": "a\\n'),
    ToolCallText(1, 'b"}'),
    ToolCallEnded(1, is_whole=True),
    Finished("stop", Usage(10, 4, 6), Timings()),
]
TOOLS = (ResponseTool(type="function", name="add"), ResponseTool(type="custom", name="patch"))


def played(events: Sequence[Event]) -> AsyncGenerator[tuple[int, Event], None]:
    """Yield events as those of an only answer."""

    async def play() -> AsyncGenerator[tuple[int, Event], None]:
        for event in events:
            yield 0, event

    return play()


def answer() -> ResponseAnswer:
    return ResponseAnswer(ResponseRequest(input="?", tools=TOOLS), "m")


def test_thoughts_and_calls_are_items_of_their_own() -> None:
    done = Response.model_validate(asyncio.run(answer().collect(played(CALLING))))
    thought, message, add, patch = done.output
    assert (thought.type, message.type) == ("reasoning", "message")
    assert (add.type, patch.type) == ("function_call", "custom_tool_call")
    assert thought.model_dump()["content"][0]["text"] == "hm"
    assert done.output_text == "Adding."
    assert add.model_dump()["arguments"] == '{"x": 1}'
    assert (patch.model_dump()["input"], patch.model_dump()["call_id"]) == ("a\nb", "call_2")
    assert done.status == "completed"


def test_a_stream_tells_each_item_from_its_beginning_to_its_end() -> None:
    async def read() -> list[bytes]:
        return [frame async for frame in answer().stream(played(CALLING))]

    told = [json.loads(frame.partition(b"data: ")[2]) for frame in asyncio.run(read())]
    of_client = TypeAdapter[ResponseStreamEvent](ResponseStreamEvent)
    assert [of_client.validate_python(one).type for one in told] == [one["type"] for one in told]
    opened = [one["output_index"] for one in told if one["type"].endswith("output_item.added")]
    closed = [one["output_index"] for one in told if one["type"].endswith("output_item.done")]
    assert opened == closed == [0, 1, 2, 3]
    pieces: dict[int, str] = {}
    for one in told:
        if one["type"].endswith(".delta"):
            pieces[one["output_index"]] = pieces.get(one["output_index"], "") + one["delta"]
    assert pieces == {0: "hm", 1: "Adding.", 2: '{"x": 1}', 3: "a\nb"}
    assert told[-1]["type"] == "response.completed"


def test_a_cut_input_of_a_custom_tool_is_left_out() -> None:
    """Any text is an input, so that nothing would show that it is not whole."""
    cut = [*CALLING[:7], ToolCallText(1, '{"input": "a'), ToolCallEnded(1, is_whole=False)]
    cut.append(Finished("length", Usage(), Timings()))

    async def read() -> list[bytes]:
        return [frame async for frame in answer().stream(played(cut))]

    told = [json.loads(frame.partition(b"data: ")[2]) for frame in asyncio.run(read())]
    assert not [one for one in told if "done" in one["type"] and one["output_index"] == 3]
    for done in (told[-1]["response"], asyncio.run(answer().collect(played(cut)))):
        assert [item["type"] for item in done["output"]][2:] == ["function_call"]
        assert {item["status"] for item in done["output"]} == {"completed"}
        assert done["status"] == "incomplete"


@pytest.mark.parametrize("is_parallel", [True, False])
def test_whether_several_calls_may_come_reaches_the_engine(is_parallel: bool) -> None:
    fields = {"parallel_tool_calls": True} if is_parallel else {}
    assert response_command(ResponseRequest(input="?", **fields)).parallel_tool_calls == is_parallel
