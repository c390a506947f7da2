"""Refusals and failures have the shape of the protocol that was asked."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic import Anthropic
from openai import APIError, OpenAI

from app.cli.server.serve import HINTS
from app.server.web.routes import shape_of
from engine import EngineCrashed, TokenText
from tests.helpers.fake_host import FakeHost, Script
from tests.helpers.served import EngineOnThread, Served

KEY = "correct horse battery"
TURN = {"role": "user", "content": "Hello"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [TURN]},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"model": "", "messages": [TURN], "max_tokens": 9},
    "/api/chat": {"messages": [TURN]},
    "/api/generate": {"prompt": "Hello"},
}
"""A request by the path of each operation that answers."""

EACH = ("/v1/chat/completions", "/v1/messages", "/api/chat")
"""A path of each shape of errors."""


def message_of(path: str, document: Any) -> str:
    """Return the sentence of an error document, which must be of its path's protocol."""
    if path.startswith("/api/"):
        assert set(document) == {"error"}
        return str(document["error"])
    if path.startswith("/v1/messages"):
        assert set(document) == {"type", "error"}
        assert document["type"] == "error"
        assert set(document["error"]) == {"type", "message"}
    else:
        assert set(document) == {"error"}
        assert set(document["error"]) == {"message", "type", "param", "code"}
    return str(document["error"]["message"])


@pytest.fixture
def script() -> Script:
    return Script(answer="Hello", chunk=5)


@pytest.fixture
def scripted(script: Script) -> Iterator[EngineOnThread]:
    engine = EngineOnThread(lambda on_event: FakeHost(on_event, script))
    yield engine
    engine.close()


@pytest.fixture
def bare(scripted: EngineOnThread) -> Iterator[httpx2.Client]:
    with (
        Served(scripted, has_ollama=True) as server,
        httpx2.Client(base_url=server.address, trust_env=False, timeout=60) as client,
    ):
        yield client


@pytest.mark.parametrize("path", [*EACH, "/v1/models", "/v1/messages/count_tokens", "/api/tags"])
def test_the_gate_speaks_the_protocol_of_the_path(scripted: EngineOnThread, path: str) -> None:
    with (
        Served(scripted, has_ollama=True, key=KEY, hints=HINTS) as server,
        httpx2.Client(base_url=server.address, trust_env=False) as client,
    ):
        key = {"x-api-key": KEY}
        refused = [
            (403, "--allow-host", client.post(path, headers={**key, "host": "evil.example"})),
            (403, "--cors", client.post(path, headers={**key, "origin": "http://evil.example"})),
            (401, "The key is missing", client.post(path)),
            (404, "There is no", client.post(f"{path}/nowhere", headers=key)),
            (405, "does not support PUT", client.put(path, headers=key)),
        ]
    for status, sentence, response in refused:
        if path == "/v1/models" and status == 404:
            continue  # a model's name may have slashes
        assert response.status_code == status
        assert sentence in message_of(path, response.json())


def test_a_server_without_hints_names_no_options(scripted: EngineOnThread) -> None:
    with (
        Served(scripted) as server,
        httpx2.Client(base_url=server.address, trust_env=False) as client,
    ):
        for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}, {}):
            response = client.post("/api/chat", headers=headers, json=BODIES["/api/chat"])
            assert response.status_code in (403, 404)
            assert "--" not in message_of("/api/chat", response.json())


def test_ollamas_clients_are_told_that_nobody_speaks_their_protocol(
    scripted: EngineOnThread,
) -> None:
    with (
        Served(scripted, hints=HINTS) as server,
        httpx2.Client(base_url=server.address, trust_env=False) as client,
    ):
        told = client.get("/api/tags")
    assert told.status_code == 404
    assert message_of("/api/tags", told.json()) == (
        "Ollama's API is not enabled on this server. Start the server with --ollama."
    )


@pytest.mark.parametrize("path", EACH)
def test_limits_are_told_in_the_protocol_of_the_path(
    scripted: EngineOnThread, script: Script, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        limits = {
            "most_body": 500, "most_pictures": 0, "most_running": 1, "most_waiting": 0,
            "has_ollama": True,
        }  # fmt: skip
        server = stack.enter_context(Served(scripted, **limits))
        client = stack.enter_context(
            httpx2.Client(base_url=server.address, trust_env=False, timeout=60)
        )
        large = client.post(path, content=b" " * 501)
        assert large.status_code == 413
        assert "larger than 500 bytes" in message_of(path, large.json())
        script.hold = True
        streamed = {"prompt": "x", "stream": True}
        stack.enter_context(client.stream("POST", "/v1/completions", json=streamed))
        full = client.post(path, json=BODIES[path])
        assert full.status_code == 429
        assert int(full.headers["retry-after"]) > 0
        assert "already waiting" in message_of(path, full.json())
        monkeypatch.setattr("app.server.web.server.MAX_CONNECTIONS", 1)
        crowded = client.post(path, json=BODIES[path])
        assert crowded.status_code == 503
        assert int(crowded.headers["retry-after"]) > 0
        assert "more than 1 connections" in message_of(path, crowded.json())


def test_paths_that_only_begin_alike_are_others() -> None:
    shapes = {path: shape_of(path) for path in (*BODIES, "/api", "/apis", "/v1/messages2", "/")}
    assert shapes["/apis"] is shapes["/v1/messages2"] is shapes["/"] is shapes["/v1/responses"]
    assert shapes["/api"] is shapes["/api/chat"] is not shapes["/"]
    assert shapes["/v1/messages"] not in (shapes["/"], shapes["/api"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_crash_before_the_answer_has_a_status(
    bare: httpx2.Client, script: Script, *, stream: bool
) -> None:
    script.answer = ""
    script.answer_error = EngineCrashed("The engine has ended.", "See the log.")
    for path, body in BODIES.items():
        response = bare.post(path, json={**body, "stream": stream})
        assert response.status_code == 500
        assert "retry-after" not in response.headers, "it would fail again"
        assert message_of(path, response.json()) == "The engine has ended. See the log."


@pytest.mark.parametrize("path", EACH)
def test_a_crash_that_costs_the_model_says_when_to_come_again(
    bare: httpx2.Client, script: Script, path: str
) -> None:
    script.answer, script.loses_model = "", True
    script.answer_error = EngineCrashed("The engine has ended.", "Your chats are kept.")
    assert bare.get("/health").status_code == 200
    for sentence in (
        "The engine has ended. Load the model again in Tandem.",
        "No model is loaded. Open one in Tandem.",
    ):
        response = bare.post(path, json=BODIES[path])
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        assert message_of(path, response.json()) == sentence
    health = bare.get("/health")
    assert health.status_code == 503
    assert health.json() == {"status": "waiting", "reason": "No model is loaded."}
    assert int(health.headers["retry-after"]) > 0


@pytest.mark.parametrize("is_bug", [False, True])
def test_a_crash_in_a_stream_is_an_event_of_the_protocol(
    bare: httpx2.Client, script: Script, monkeypatch: pytest.MonkeyPatch, *, is_bug: bool
) -> None:
    sentence = "this is a bug in Tandem" if is_bug else "The engine has ended."
    if is_bug:
        script.extra, script.answer = [TokenText("Hel", (1,)), None], ""  # type: ignore[list-item]
        monkeypatch.setattr("app.server.request_log.RequestRecord.note", fail_at_none)
    else:
        script.answer_error = EngineCrashed("The engine has ended.")
    for path, body in BODIES.items():
        response = bare.post(path, json={**body, "stream": True})
        assert response.status_code == 200
        *before, last = told_in(response.text, has_lines=path.startswith("/api/"))
        assert before, "the text so far has come"
        if path != "/v1/responses":
            assert sentence in message_of(path, last)
            continue
        assert (last["type"], sentence in last["message"]) == ("error", True)
        numbers = [one["sequence_number"] for one in (*before, last)]
        assert numbers == [*range(len(numbers))]


def told_in(text: str, *, has_lines: bool) -> list[Any]:
    """Return the documents of a stream: one in each line, or in each event."""
    lines = [line for line in text.splitlines() if line]
    if not has_lines:
        lines = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(line) for line in lines]


def fail_at_none(record: object, event: object) -> None:
    """Fail as a bug would, at an event that is none."""
    assert event is not None


def test_official_clients_raise_what_a_stream_ends_with(
    scripted: EngineOnThread, script: Script
) -> None:
    script.answer_error = EngineCrashed("The engine has ended.")
    with Served(scripted) as server, server.client() as gpt:
        with pytest.raises(APIError, match="The engine has ended"):
            list(gpt.chat.completions.create(model="", messages=[TURN], stream=True))  # type: ignore[call-overload]
        with pytest.raises(APIError, match="The engine has ended"):
            list(gpt.completions.create(model="", prompt="x", stream=True))
        assert "error" in [
            event.type for event in gpt.responses.create(model="", input="x", stream=True)
        ]
        with (
            Anthropic(
                base_url=server.address, api_key="none", max_retries=0,
                http_client=anthropic.DefaultHttpxClient(trust_env=False),
            ) as claude,
            pytest.raises(anthropic.APIStatusError, match="The engine has ended"),
        ):  # fmt: skip
            list(claude.messages.create(model="", messages=[TURN], max_tokens=9, stream=True))  # type: ignore[call-overload]


# what only the engine can check is told with its place

BAD = {"type": "object", "properties": {"x": {"type": "nonsense"}}}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": BAD}}


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": BAD}}},
            "response_format.json_schema.schema",
        ),
        (
            "/v1/chat/completions", {"response_format": {"type": "json_object", "schema": BAD}},
            "response_format.schema",
        ),
        ("/v1/chat/completions", {"grammar": "root ::= ("}, "grammar"),
        ("/v1/completions", {"regex": "("}, "regex"),
        (
            "/v1/chat/completions",
            {"tools": [{"function": {"name": "g"}}, FUNCTION], "tool_choice": "required"},
            "tools[1].function.parameters",
        ),
        (
            "/v1/responses", {"text": {"format": {"type": "json_schema", "schema": BAD}}},
            "text.format.schema",
        ),
        (
            "/v1/responses",
            {
                "tools": [
                    {"type": "web_search"}, {"type": "function", "name": "f", "parameters": BAD},
                ],
                "tool_choice": "required",
            },
            "tools[1].parameters",
        ),
        (
            "/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": BAD}}},
            "output_config.format.schema",
        ),
        (
            "/v1/messages", {"output_format": {"type": "json_schema", "schema": BAD}},
            "output_format.schema",
        ),
        (
            "/v1/messages",
            {"tools": [{"name": "f", "input_schema": BAD}], "tool_choice": {"type": "any"}},
            "tools[0].input_schema",
        ),
        ("/api/chat", {"format": BAD}, "format"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_the_place_of_a_wrong_schema_is_named(
    llama: httpx2.Client, path: str, fields: dict[str, Any], place: str, *, stream: bool
) -> None:
    response = llama.post(path, json={**BODIES[path], **fields, "stream": stream})
    assert response.status_code == 400, response.text
    document = response.json()
    message = message_of(path, document)
    assert "cannot be used" in message
    if path.startswith(("/api/", "/v1/messages")):
        assert message.startswith(f"{place}: ")
    else:
        assert document["error"]["param"] == place


@pytest.fixture(scope="module")
def llama(demo_engine: EngineOnThread) -> Iterator[httpx2.Client]:
    """A client of the demo model, which checks schemas."""
    with (
        Served(demo_engine, has_ollama=True) as server,
        httpx2.Client(base_url=server.address, timeout=60, trust_env=False) as client,
    ):
        yield client


def test_a_client_of_openais_knows_the_field(client: OpenAI) -> None:
    with pytest.raises(APIError) as caught:
        client.chat.completions.create(
            model="", messages=[TURN],  # type: ignore[list-item]
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": BAD}},
        )  # fmt: skip
    assert caught.value.param == "response_format.json_schema.schema"
