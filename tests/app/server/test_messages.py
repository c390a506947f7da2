"""Anthropic's Messages protocol, asked by Anthropic's own client on a real socket.

Importing the client takes seconds, so only what asks imports it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from app.server.anthropic.messages import MessageAnswer, message_command
from app.server.anthropic.request import MessageRequest, MessageTurn, ToolWish
from engine import (
    ChatMessage,
    Event,
    Finished,
    PrefillProgress,
    Timings,
    TokenText,
    ToolCallBegun,
    ToolCallEnded,
    ToolCallText,
    Usage,
)
from tests.helpers.served import EngineOnThread, Served

if TYPE_CHECKING:
    from anthropic import Anthropic
    from anthropic.types import Message

QUESTION = "What is tensor parallelism?"
ASKED = [{"role": "user", "content": QUESTION}]

SURE = {"temperature": 0}
"""A field that the client has no argument for any more."""


@pytest.fixture(scope="module")
def claude(served: Served) -> Iterator[Anthropic]:
    from anthropic import Anthropic, DefaultHttpxClient

    with Anthropic(
        base_url=served.address, api_key="none", max_retries=0, timeout=60,
        http_client=DefaultHttpxClient(trust_env=False),
    ) as client:  # fmt: skip
        yield client


def test_an_answer_is_that_of_the_other_protocol(claude: Anthropic, http: httpx2.Client) -> None:
    done = claude.messages.create(
        model="tandem-demo", messages=ASKED, max_tokens=24, extra_body=SURE, system="Be short."
    )
    messages = [{"role": "system", "content": "Be short."}, *ASKED]
    other = http.post(
        "/v1/chat/completions", json={"messages": messages, "max_tokens": 24, "temperature": 0}
    ).json()
    (block,) = done.content
    assert block.type == "text"
    assert block.text == other["choices"][0]["message"]["content"]
    assert (done.role, done.stop_reason, done.stop_sequence) == ("assistant", "max_tokens", None)
    usage = done.usage
    assert usage.cache_read_input_tokens is not None
    assert usage.input_tokens + usage.cache_read_input_tokens == other["usage"]["prompt_tokens"]
    assert usage.output_tokens == 24


def test_a_stream_has_the_same_message(claude: Anthropic) -> None:
    whole = claude.messages.create(
        model="", messages=ASKED, max_tokens=30, extra_body={"top_k": 1, "top_p": 0.9}
    )
    with claude.messages.stream(
        model="", messages=ASKED, max_tokens=30, extra_body={"top_k": 1, "top_p": 0.9}
    ) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_message()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
    assert last.content[0].model_dump()["text"] == whole.content[0].model_dump()["text"]
    assert last.stop_reason == whole.stop_reason
    assert last.usage.output_tokens == whole.usage.output_tokens


def test_the_stop_text_is_told(claude: Anthropic) -> None:
    def ask(*stops: str) -> Message:
        return claude.messages.create(
            model="", messages=ASKED, max_tokens=24, extra_body=SURE, stop_sequences=stops
        )

    text = ask().content[0].model_dump()["text"]
    stop = text.split()[3]
    done = ask("never so", stop)
    assert (done.stop_reason, done.stop_sequence) == ("stop_sequence", stop)
    assert done.content[0].model_dump()["text"] == text.partition(stop)[0]


def test_a_conversation_reaches_the_engine(claude: Anthropic, demo_engine: EngineOnThread) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Add."}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "Well."},
            {"type": "tool_use", "id": "a", "name": "add", "input": {"x": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "is_error": True,
             "content": [{"type": "text", "text": "too large"}]},
            {"type": "text", "text": "Again."},
        ]},
    ]  # fmt: skip
    tool = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
    claude.messages.create(
        model="", messages=messages, max_tokens=1, tools=[tool],  # type: ignore[list-item]
        tool_choice={"type": "none"}, thinking={"type": "disabled"},
        system=[{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}],
    )  # fmt: skip
    asked = demo_engine.last_command()
    system, first, answer, result, again = asked.messages
    assert (system.role, system.content) == ("system", "One.\nTwo.")
    assert first == ChatMessage("user", "Add.")
    assert (answer.content, answer.reasoning) == ("Well.", "hm")
    assert (answer.tool_calls[0].name, answer.tool_calls[0].arguments) == ("add", '{"x": 1}')
    assert result == ChatMessage("tool", "Error: too large", tool_call_id="a", name="add")
    assert again == ChatMessage("user", "Again.")
    assert (asked.tools[0].name, asked.tool_choice, asked.thinks) == ("add", "none", False)


def test_the_tokens_of_a_prompt_are_counted(claude: Anthropic) -> None:
    counted = claude.messages.count_tokens(model="", messages=ASKED, system="Be short.")
    done = claude.messages.create(model="", messages=ASKED, system="Be short.", max_tokens=1)
    assert done.usage.cache_read_input_tokens is not None
    n_prompt = done.usage.input_tokens + done.usage.cache_read_input_tokens
    assert counted.input_tokens == n_prompt


def test_an_answer_that_has_begun_is_continued(claude: Anthropic) -> None:
    whole = claude.messages.create(model="", messages=ASKED, max_tokens=24, extra_body=SURE)
    text = whole.content[0].model_dump()["text"]
    begun = text[: text.index(" ", 20)]
    done = claude.messages.create(
        model="", max_tokens=24, extra_body=SURE,
        messages=[*ASKED, {"role": "assistant", "content": begun}],
    )  # fmt: skip
    assert (begun + done.content[0].model_dump()["text"]).startswith(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "gpt-9"}, "no model 'gpt-9'; available"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"messages": []}, "messages must be"),
        ({"tools": [{"type": "web_search_1", "name": "web"}]}, "which this server cannot run"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"mcp_servers": [{"url": "http://x"}]}, "MCP"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "source must be base64",
        ),
        (
            {"messages": [*ASKED, {"role": "assistant", "content": [
                {"type": "tool_use", "id": "a", "name": "add", "input": {}}]}]},
            "has no result",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_said(
    claude: Anthropic, change: dict[str, object], message: str
) -> None:
    from anthropic import APIStatusError

    with pytest.raises(APIStatusError, match=message) as told:
        claude.messages.create(model="", max_tokens=4, messages=ASKED, extra_body=change)
    assert told.value.status_code == (404 if "model" in change else 400)
    assert isinstance(told.value.body, dict)
    assert told.value.body["type"] == "error"


# what the demo model does not do: answers of events that are made up


CALLING: list[Event] = [
    PrefillProgress(6, 6),
    TokenText("I must ", (1, 2), "reasoning"),
    TokenText("add.", (3,), "reasoning"),
    TokenText("", (4,)),
    TokenText("Adding.", (5,)),
    ToolCallBegun(0, "call_1", "add"),
    ToolCallText(0, '{"x": '),
    ToolCallText(0, "1}"),
    ToolCallEnded(0, is_whole=True),
    ToolCallBegun(1, "call_2", "add"),
    ToolCallText(1, "{}"),
    ToolCallEnded(1, is_whole=True),
    Finished("stop", Usage(10, 4, 6), Timings()),
]


def frames_of(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return the events of the stream that tells an answer, without pings."""
    request = MessageRequest(model="", messages=(), max_tokens=9)

    async def played() -> AsyncGenerator[tuple[int, Event], None]:
        for event in events:
            yield 0, event

    async def read() -> list[bytes]:
        answer = MessageAnswer(request, "m")
        return [frame async for frame in answer.stream(played())]

    frames = asyncio.run(read())
    told = [json.loads(frame.partition(b"data: ")[2]) for frame in frames]
    return [one for one in told if one["type"] != "ping"]


def test_thoughts_and_calls_are_blocks_of_their_own() -> None:
    told = frames_of(CALLING)
    assert told[0]["message"]["usage"]["input_tokens"] == 6
    blocks = [one["content_block"]["type"] for one in told if "content_block" in one]
    assert blocks == ["thinking", "text", "tool_use", "tool_use"]
    deltas = [(one["index"], one["delta"]) for one in told if one["type"].endswith("block_delta")]
    assert deltas == [
        (0, {"type": "thinking_delta", "thinking": "I must "}),
        (0, {"type": "thinking_delta", "thinking": "add."}),
        (1, {"type": "text_delta", "text": "Adding."}),
        (2, {"type": "input_json_delta", "partial_json": '{"x": 1}'}),
        (3, {"type": "input_json_delta", "partial_json": "{}"}),
    ]
    started = [one["index"] for one in told if one["type"] == "content_block_start"]
    stopped = [one["index"] for one in told if one["type"] == "content_block_stop"]
    assert started == stopped == [0, 1, 2, 3]
    assert told[-2]["delta"]["stop_reason"] == "tool_use"
    assert told[-2]["usage"]["input_tokens"] == 6
    assert told[-2]["usage"]["cache_read_input_tokens"] == 4


def test_a_call_that_is_cut_off_is_left_out() -> None:
    """Clients run what has begun: Anthropic's own closes the arguments that have come."""
    cut = [*CALLING[:10], ToolCallText(1, '{"x": '), ToolCallEnded(1, is_whole=False)]
    told = frames_of([*cut, Finished("length", Usage(), Timings())])
    calls = [one["content_block"]["id"] for one in told if "id" in one.get("content_block", ())]
    assert calls == ["call_1"]
    assert told[-2]["delta"]["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("is_single", [True, False])
def test_whether_several_calls_may_come_reaches_the_engine(is_single: bool) -> None:
    wish = ToolWish(type="auto", disable_parallel_tool_use=True) if is_single else None
    turn = MessageTurn(role="user", content="?")
    request = MessageRequest(model="", messages=(turn,), max_tokens=9, tool_choice=wish)
    assert message_command(request).parallel_tool_calls != is_single
