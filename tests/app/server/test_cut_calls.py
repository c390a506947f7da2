"""Calls that break off are never told as whole ones, in no protocol, streamed or not."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any, Protocol

import pytest

from app.server.anthropic.messages import MessageAnswer
from app.server.anthropic.request import MessageRequest
from app.server.ollama.answer import OllamaAnswer
from app.server.openai.answer import ChatAnswer, misfit
from app.server.openai.conversation import ChatRequest
from app.server.openai_responses.answer import ResponseAnswer
from app.server.openai_responses.request import ResponseRequest
from engine import (
    Event,
    Finished,
    Timings,
    TokenText,
    ToolCallBegun,
    ToolCallEnded,
    ToolCallText,
    Usage,
)
from engine.generation.answers import in_parts
from engine.text.tool_calls.formats import AnswerFormat
from engine.text.tool_calls.parser import AnswerParser
from engine.text.tool_calls.turns import ANSWER_FORMATS
from tests.helpers.answer_texts import ANSWERS, TYPES

Calls = list[tuple[str, Any]]
"""Names and arguments, as text or as an object."""

LENGTHS = ("length", "incomplete", "max_tokens")


class Answer(Protocol):
    """The answer of a protocol."""

    async def collect(self, events: Any) -> dict[str, Any]: ...

    def stream(self, events: Any) -> AsyncGenerator[bytes, None]: ...


def cut_events(form: AnswerFormat, text: str) -> list[Event]:
    """Return the events of an answer that a limit of tokens cuts off behind a text."""

    def steps() -> Iterator[Event]:
        yield TokenText(text, (1,))
        yield Finished("length", Usage(), Timings())

    return list(in_parts(steps(), AnswerParser(form, TYPES)))  # type: ignore[arg-type]


async def played(events: Sequence[Event]) -> AsyncGenerator[tuple[int, Event], None]:
    for event in events:
        yield 0, event


async def documents(answer: Answer, events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return what a stream tells, frame by frame."""
    frames = [frame async for frame in answer.stream(played(events))]
    data = [frame.partition(b"data: ")[2] or frame for frame in frames]
    return [json.loads(one) for one in data if not one.startswith(b"[DONE]")]


def of_chat(told: list[dict[str, Any]]) -> tuple[Calls, str]:
    names, texts, reason = dict[int, str](), dict[int, str](), ""
    for choice in (choice for one in told for choice in one["choices"]):
        part = choice.get("delta") or choice.get("message") or {}
        for place, call in enumerate(part.get("tool_calls") or ()):
            index = call.get("index", place)
            names.setdefault(index, call["function"].get("name", ""))
            texts[index] = texts.get(index, "") + call["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return [(names[index], texts[index]) for index in names], reason


def of_responses(told: list[dict[str, Any]]) -> tuple[Calls, str]:
    """Return the calls of an answer, which its items and deltas tell alike."""
    whole = told[-1].get("response", told[-1])
    items = [item for item in whole["output"] if item["type"] == "function_call"]
    for item in items:
        deltas = [
            one["delta"] for one in told if one.get("item_id") == item["id"] and "delta" in one
        ]
        end = "" if item["status"] == "completed" else misfit(item["arguments"])
        assert len(told) == 1 or "".join(deltas) == item["arguments"] + end
    return [(item["name"], item["arguments"]) for item in items], whole["status"]


def of_messages(told: list[dict[str, Any]]) -> tuple[Calls, str]:
    """Return the calls of an answer; a block that has begun counts, as clients run it."""
    if len(told) == 1:
        blocks = [one for one in told[0]["content"] if one["type"] == "tool_use"]
        return [(one["name"], one["input"]) for one in blocks], told[0]["stop_reason"]
    begun = {one["index"]: one["content_block"] for one in told if "content_block" in one}
    texts = {
        index: "".join(
            one["delta"]["partial_json"]
            for one in told
            if one.get("index") == index and "partial_json" in one.get("delta", ())
        )
        for index, block in begun.items()
        if block["type"] == "tool_use"
    }
    return [(begun[index]["name"], json.loads(text)) for index, text in texts.items()], next(
        one["delta"]["stop_reason"] for one in told if one["type"] == "message_delta"
    )


def of_ollama(told: list[dict[str, Any]]) -> tuple[Calls, str]:
    calls = [call for one in told for call in one["message"].get("tool_calls", ())]
    found = [(one["function"]["name"], one["function"]["arguments"]) for one in calls]
    return found, told[-1]["done_reason"]


PROTOCOLS: dict[str, tuple[Callable[[], Answer], Callable[..., tuple[Calls, str]]]] = {
    "chat": (lambda: ChatAnswer(ChatRequest(messages=()), "m", None), of_chat),
    "responses": (lambda: ResponseAnswer(ResponseRequest(input="?"), "m"), of_responses),
    "messages": (
        lambda: MessageAnswer(MessageRequest(model="", messages=(), max_tokens=9), "m"),
        of_messages,
    ),
    "ollama": (lambda: OllamaAnswer("m", is_chat=True), of_ollama),
}


@pytest.mark.parametrize("form", [pytest.param(form, id=form.name) for form in ANSWER_FORMATS])
def test_a_call_that_is_cut_anywhere_is_whole_or_unreadable(form: AnswerFormat) -> None:
    text, read = ANSWERS[form]

    async def try_all() -> None:
        for end in range(text.index("get_weather"), len(text)):
            events = cut_events(form, text[:end])
            for make, calls_of in PROTOCOLS.values():
                for told in (
                    [await make().collect(played(events))],
                    await documents(make(), events),
                ):
                    calls, reason = calls_of(told)
                    assert reason in LENGTHS
                    check(calls, read.calls)

    asyncio.run(try_all())


def test_a_chat_answer_that_a_stop_string_ends_inside_a_call_has_no_call_to_run() -> None:
    events = [
        ToolCallBegun(0, "call_0", "f"), ToolCallText(0, '{"path": "home'), ToolCallEnded(0, False),
        Finished("stop", Usage(), Timings()),
    ]  # fmt: skip
    make, calls_of = PROTOCOLS["chat"]
    told = asyncio.run(make().collect(played(events)))
    assert calls_of([told]) == ([("f", '{"path": "home')], "stop")


def check(calls: Calls, wanted: Calls) -> None:
    """Check that calls are those that are wanted, except for a last one that is unreadable."""
    for at, (name, arguments) in enumerate(calls):
        assert name == wanted[at][0]
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                assert at == len(calls) - 1
                return
        assert arguments == wanted[at][1]


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        ("{", "]"),
        ('{"a": "home/anna', '"]'),
        ('{"a": "x\\', '\\"]'),
        ('{"a": "x\\\\', '"]'),
        ('{"a": [1, {"b": 2}', "}"),
        ('{"a": ["]", ', "}"),
    ],
)
def test_what_is_streamed_of_a_cut_call_ends_in_a_bracket_that_does_not_fit(
    arguments: str, end: str
) -> None:
    """LangChain closes what is open in a stream's arguments and would run the call."""
    assert misfit(arguments) == end
