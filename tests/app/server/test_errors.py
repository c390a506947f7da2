"""What cannot be answered is told in a sentence that names the field, with the right status."""

from typing import Any

import httpx2
import pytest
from openai import BadRequestError, NotFoundError, OpenAI

USER = {"role": "user", "content": "Hello"}
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("change", "param", "sentence"),
    [
        ({"messages": None}, "messages", "messages must be a list of at least 1"),
        ({"messages": []}, "messages", "messages must be a list of at least 1"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "messages[0].role is missing."),
        (
            {"messages": [USER, {"role": "user", "content": 3}]}, "messages[1].content",
            "messages[1].content must be a string or a list, not 3.",
        ),
        (
            {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role",
            'messages[0].role must be "system" or "developer"',
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].image_url.url", "missing",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x.example/a.png"}}]}]},
            "messages[0].content[0].image_url", "other URLs are not fetched",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0].type", "only text and images are supported",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        ({"messages": []}, "messages", "a list of at least 1 and at most 10000, not a list of 0."),
        ({"temperature": True}, "temperature", "must be a number from 0.0 to 5.0, not true."),
        ({"temperature": "hot"}, "temperature", 'not "hot".'),
        ({"temperature": 9}, "temperature", "from 0.0 to 5.0, not 9."),
        ({"max_tokens": 1.5}, "max_tokens", "must be a whole number"),
        ({"n": 0}, "n", "n must be a whole number from 1 to 16, not 0."),
        ({"n": 17}, "n", "from 1 to 16"),
        ({"stop": [1]}, "stop[0]", "stop[0] must be a string, not 1."),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids from 0 to 1535, not x."),
        ({"logit_bias": {"1536": 1}}, "logit_bias", "not 1536."),
        ({"logit_bias": {"5": None}}, "logit_bias.5", "logit_bias.5 must be a number, not null."),
        ({"samplers": ["heat"]}, None, "samplers"),
        ({"top_logprobs": 2}, "top_logprobs", "requires logprobs"),
        ({"modalities": ["audio"]}, "modalities", "Only text"),
        ({"functions": [{}]}, "functions", "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice", "tool_choice must be"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice",
            "not name one of the tools",
        ),
        ({"tools": [{"type": "web"}]}, "tools[0]", "is not a function"),
        ({"response_format": {"type": "xml"}}, "response_format.type", '"text" or "json_object"'),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"grammar": "root ::= x", "regex": "a"}, "response_format", "Only one of"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_wrong_field_is_named(
    http: httpx2.Client, change: dict[str, Any], param: str | None, sentence: str
) -> None:
    response = http.post(CHAT, json={"messages": [USER], "max_tokens": 1, **change})
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert sentence in error["message"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[]", "The request body must be an object, not a list of 0."),
        (b'{"temperature": NaN}', "is not a valid number"),
        (b'{"messages": [], "top_p": 1e999}', "too large"),
        (b'{"seed": 1' + b"0" * 5000 + b"}", "is not JSON"),
        (b'{"seed": 1' + b"0" * 400 + b"}", "too large"),
        (b"[" * 100, "is not JSON"),
        (b"[" * 90 + b"]" * 90, "levels"),
        (b"[" * 200_000, "levels"),
        (b"\xff\xfe", "UTF-8"),
    ],
    ids=range(11),
)
def test_a_body_that_is_no_request_is_a_sentence(
    http: httpx2.Client, body: bytes, sentence: str
) -> None:
    response = http.post(CHAT, content=body)
    assert response.status_code == 400
    assert sentence in response.json()["error"]["message"]


def test_half_a_character_does_no_harm(http: httpx2.Client) -> None:
    body = b'{"messages": [{"role": "user", "content": "x\\ud83d"}], "max_tokens": 1}'
    assert http.post(CHAT, content=body).status_code == 200


def test_a_model_that_is_not_there_is_named_with_those_that_are(client: OpenAI) -> None:
    with pytest.raises(NotFoundError, match="no model 'gpt-9'; available: tandem-demo") as caught:
        client.chat.completions.create(model="gpt-9", messages=[USER])  # type: ignore[list-item]
    assert caught.value.code == "model_not_found"
    with pytest.raises(NotFoundError):
        client.models.retrieve("gpt-9")


def test_models_are_listed(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by, model.object) == ("tandem-demo", "tandem", "model")
    assert client.models.retrieve("Tandem Demo").id == "tandem-demo"
    assert "/" not in str(model.to_dict()), "no folder of this machine is told"
    told: dict[str, Any] = model.to_dict()
    for name in ("n_ctx", "max_model_len", "context_length"):
        assert told[name] == told["meta"]["n_ctx"] == 1024
    assert told["meta"]["n_vocab"] == 1536
    assert told["capabilities"] == ["completion", "tools"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_a_bad_request(client: OpenAI, *, stream: bool) -> None:
    """In a stream as well, as nothing has been sent by then."""
    long = [{"role": "user", "content": "word " * 2000}]
    with pytest.raises(
        BadRequestError, match="exceeds the available context size of 1024"
    ) as caught:
        client.chat.completions.create(model="", messages=long, stream=stream)  # type: ignore[call-overload]
    assert caught.value.code == "context_length_exceeded"


def test_paths_and_methods_that_are_not_there_are_told(http: httpx2.Client) -> None:
    lost = http.get("/v2/chat")
    assert (lost.status_code, lost.json()["error"]["message"]) == (404, "There is no /v2/chat.")
    wrong = http.get(CHAT)
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert "does not support GET" in wrong.json()["error"]["message"]


def test_an_unknown_field_gets_one_line(
    http: httpx2.Client, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        body = {"messages": [{**USER, "colour": 1}], "max_tokens": 1, "flavour": 2}
        assert http.post(CHAT, json=body).status_code == 200
    lines = [record.getMessage() for record in caplog.records]
    assert sum("'flavour'" in line for line in lines) == 1
    assert sum("'messages[0].colour'" in line for line in lines) == 1
