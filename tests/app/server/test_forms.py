"""Answers in the form that a request asks for, and the server's own description."""

import json
import re

import httpx2
import pytest
from openai import BadRequestError, OpenAI

from app.server.web.operations import STATUSES

ASKED = [{"role": "user", "content": "What is a rank?"}]

SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["rank", "fast"],
    "properties": {
        "rank": {"type": "integer", "maximum": 99, "minimum": 0}, "fast": {"type": "boolean"},
    },
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_the_schema_that_was_asked_for(client: OpenAI, *, stream: bool) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    done = client.chat.completions.create(
        model="",
        messages=ASKED,
        response_format=asked,
        seed=1,
        stream=stream,  # type: ignore[call-overload]
    )
    if stream:
        text = "".join(one.choices[0].delta.content or "" for one in done)
    else:
        text = done.choices[0].message.content
        assert done.choices[0].finish_reason == "stop"
    found = json.loads(text)
    assert set(found) == {"rank", "fast"}
    assert found["rank"] in range(100)
    assert isinstance(found["fast"], bool)


def test_an_answer_matches_a_regular_expression(client: OpenAI) -> None:
    done = client.completions.create(
        model="", prompt="A rank", seed=1, extra_body={"regex": "(yes|no), [0-9]{3}"}
    )
    assert re.fullmatch("(yes|no), [0-9]{3}", done.choices[0].text)


@pytest.mark.parametrize("fields", [{"grammar": "root ::= ("}, {"regex": "("}])
def test_a_grammar_that_is_none_is_a_bad_request(client: OpenAI, fields: dict[str, str]) -> None:
    with pytest.raises(BadRequestError):
        client.chat.completions.create(model="", messages=ASKED, extra_body=fields)  # type: ignore[arg-type]


def test_the_server_describes_itself(http: httpx2.Client) -> None:
    page = http.get("/openapi.json").json()
    chat = page["paths"]["/v1/chat/completions"]["post"]
    assert set(chat["responses"]) == {"200", *STATUSES}
    named = page["components"]["schemas"]
    request = named["ChatRequest"]
    assert request["required"] == ["messages"]
    temperature = request["properties"]["temperature"]["anyOf"][0]
    assert temperature == {"type": "number", "minimum": 0.0, "maximum": 5.0}
    assert {"parameters": [{"in": "path", "name": "model"}]}.keys() <= (
        page["paths"]["/v1/models/{model}"]["get"].keys()
    )
    referred = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(page)))
    assert referred <= set(named), "each reference leads somewhere"
