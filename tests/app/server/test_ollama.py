"""Ollama's protocol, which a server has only if that is asked for."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import httpx2
import pytest

from app.server.ollama.answer import OllamaAnswer
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
from tests.helpers.served import EngineOnThread, Served

ASKED = [{"role": "user", "content": "What is tensor parallelism?"}]
SURE = {"temperature": 0, "num_predict": 20}


@pytest.fixture(scope="module")
def llama(demo_engine: EngineOnThread) -> Iterator[httpx2.Client]:
    with (
        Served(demo_engine, has_ollama=True) as server,
        httpx2.Client(base_url=server.address, timeout=60, trust_env=False) as client,
    ):
        yield client


def test_only_a_server_that_is_told_so_has_it(http: httpx2.Client, llama: httpx2.Client) -> None:
    assert http.get("/api/version").status_code == 404
    assert llama.get("/api/version").json()["version"]
    assert "/api/chat" in llama.get("/openapi.json").json()["paths"]


def test_an_answer_is_that_of_the_other_protocol(llama: httpx2.Client) -> None:
    done = llama.post(
        "/api/chat", json={"model": "tandem-demo", "messages": ASKED, "stream": False,
                           "options": SURE},
    ).json()  # fmt: skip
    other = llama.post(
        "/v1/chat/completions", json={"messages": ASKED, "temperature": 0, "max_tokens": 20}
    ).json()
    assert done["message"] == {
        "role": "assistant", "content": other["choices"][0]["message"]["content"],
    }  # fmt: skip
    assert (done["done"], done["done_reason"], done["eval_count"]) == (True, "length", 20)
    assert done["prompt_eval_count"] == other["usage"]["prompt_tokens"]
    assert done["total_duration"] > 0


def test_a_stream_has_a_document_on_each_line(llama: httpx2.Client) -> None:
    asked = {"prompt": ASKED[0]["content"], "options": SURE}
    whole = llama.post("/api/generate", json=asked | {"stream": False}).json()
    reply = llama.post("/api/generate", json=asked)
    assert reply.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert "".join(line["response"] for line in lines) == whole["response"]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]


def test_a_conversation_reaches_the_engine(
    llama: httpx2.Client, demo_engine: EngineOnThread
) -> None:
    call = {"function": {"name": "add", "arguments": {"x": 1}}}
    messages = [
        {"role": "system", "content": "Be short."},
        *ASKED,
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_name": "add"},
    ]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    llama.post("/api/chat", json={
        "messages": messages, "tools": [tool], "think": "low", "stream": False,
        "options": {"num_predict": 1, "seed": 5, "stop": ["x"], "num_ctx": 4096},
    }).raise_for_status()  # fmt: skip
    asked = demo_engine.last_command()
    assert asked.messages[0] == ChatMessage("system", "Be short.")
    assert asked.messages[2].reasoning == "hm"
    assert asked.messages[2].tool_calls[0].arguments == '{"x": 1}'
    assert asked.messages[3] == ChatMessage("tool", "3", name="add")
    assert (asked.tools[0].name, asked.effort) == ("add", "low")
    assert (asked.sampling.max_tokens, asked.sampling.seed) == (1, 5)
    assert "x" in asked.sampling.stop


def test_raw_texts_and_system_texts_reach_the_engine(
    llama: httpx2.Client, demo_engine: EngineOnThread
) -> None:
    few = {"stream": False, "options": {"num_predict": 1}}
    llama.post("/api/generate", json={"prompt": "Once", "raw": True, **few}).raise_for_status()
    assert demo_engine.last_command().prompt == "Once"
    llama.post("/api/generate", json={"prompt": "Once", "system": "Hi", **few}).raise_for_status()
    asked = demo_engine.last_command()
    assert asked.messages == (ChatMessage("system", "Hi"), ChatMessage("user", "Once"))


def test_models_are_listed_and_described(llama: httpx2.Client) -> None:
    (listed,) = llama.get("/api/tags").json()["models"]
    (running,) = llama.get("/api/ps").json()["models"]
    assert listed["name"] == running["name"] == "tandem-demo"
    assert listed["details"]["format"] == "gguf"
    assert running["context_length"] > 0
    shown = llama.post("/api/show", json={"model": "tandem-demo:latest"}).json()
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"][f"{listed['details']['family']}.context_length"] > 0
    assert shown["model_info"]["general.architecture"] == listed["details"]["family"]
    assert llama.post("/api/chat", json={"model": ""}).json()["done_reason"] == "load"


def test_embeddings_are_those_of_the_other_protocol(llama: httpx2.Client) -> None:
    done = llama.post("/api/embed", json={"input": ["One", "Two words"]}).json()
    other = llama.post("/v1/embeddings", json={"input": ["One", "Two words"]}).json()
    assert done["embeddings"] == [one["embedding"] for one in other["data"]]
    assert done["prompt_eval_count"] == other["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/api/chat", {"model": "llama9", "messages": ASKED}, 404, "no model 'llama9'; available"),
        ("/api/chat", {"messages": [{"role": "king"}]}, 400, "must be one of"),
        ("/api/chat", {"messages": [{"role": "user", "images": ["x"]}]}, 400, "cannot see"),
        ("/api/chat", {"messages": ASKED, "format": "xml"}, 400, "JSON schema"),
        ("/api/generate", {"prompt": "a", "template": "b"}, 400, "cannot be replaced"),
        ("/api/generate", {"prompt": "a", "options": {"temperature": 9}}, 400, "temperature"),
        ("/api/show", {"model": "llama9"}, 404, "no model 'llama9'; available"),
    ],
)
def test_what_cannot_be_answered_is_said(
    llama: httpx2.Client, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    told = llama.post(path, json=body)
    assert told.status_code == status
    assert message in told.json()["error"]


def test_thoughts_and_whole_calls_are_told() -> None:
    events: Sequence[Event] = [
        TokenText("hm", (1,), "reasoning"),
        TokenText("Adding.", (2,)),
        ToolCallBegun(0, "a", "add"),
        ToolCallText(0, '{"x": '),
        ToolCallText(0, "1}"),
        ToolCallEnded(0, is_whole=True),
        ToolCallBegun(1, "b", "add"),
        ToolCallText(1, '{"x": 2'),
        ToolCallEnded(1, is_whole=False),
        Finished("length", Usage(3, 1, 9), Timings(prompt_s=1.5)),
    ]

    async def play() -> AsyncGenerator[tuple[int, Event], None]:
        for event in events:
            yield 0, event

    async def read() -> list[bytes]:
        return [line async for line in OllamaAnswer("m", is_chat=True).stream(play())]

    lines = [json.loads(line) for line in asyncio.run(read())]
    said = [
        {key: value for key, value in line["message"].items() if key != "role" and value}
        for line in lines
    ]
    calls = [{"function": {"name": "add", "arguments": {"x": 1}}}]
    assert said == [{"thinking": "hm"}, {"content": "Adding."}, {"tool_calls": calls}, {}]
    assert (lines[-1]["prompt_eval_duration"], lines[-1]["eval_count"]) == (1_500_000_000, 9)
    whole = asyncio.run(OllamaAnswer("m", is_chat=True).collect(play()))
    assert whole["message"]["tool_calls"] == calls
    assert (whole["message"]["thinking"], whole["message"]["content"]) == ("hm", "Adding.")
