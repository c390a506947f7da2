"""Completions, tokens and templates."""

import math

import httpx2
import pytest
from openai import BadRequestError, OpenAI

from app.core.paths import demo_model
from engine import load_tokenizer

PROMPT = "Tensor parallelism splits"


def test_a_text_is_gone_on_with(client: OpenAI) -> None:
    done = client.completions.create(model="", prompt=PROMPT, temperature=0, max_tokens=8)
    chat = client.completions.create(
        model="", prompt=PROMPT, temperature=0, max_tokens=8, echo=True
    )
    (choice,) = done.choices
    assert (done.object, choice.finish_reason) == ("text_completion", "length")
    assert choice.text
    assert chat.choices[0].text == PROMPT + choice.text
    assert done.usage is not None
    assert done.usage.completion_tokens == 8


def test_sixteen_tokens_are_written_unless_more_are_asked_for(client: OpenAI) -> None:
    done = client.completions.create(
        model="", prompt=PROMPT, temperature=0, extra_body={"ignore_eos": True}
    )
    assert done.usage is not None
    assert done.usage.completion_tokens == 16


def test_several_prompts_have_several_answers(client: OpenAI) -> None:
    prompts = [PROMPT, "A rank is"]
    done = client.completions.create(model="", prompt=prompts, temperature=0, max_tokens=4, n=2)
    alone = [
        client.completions.create(model="", prompt=one, temperature=0, max_tokens=4)
        for one in prompts
    ]
    texts = [one.choices[0].text for one in alone]
    assert [one.text for one in done.choices] == [texts[0], texts[0], texts[1], texts[1]]
    assert done.usage is not None
    assert done.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone if one.usage)


def test_a_stream_repeats_the_prompt_once(client: OpenAI) -> None:
    options = {"model": "", "prompt": PROMPT, "temperature": 0, "max_tokens": 6, "echo": True}
    whole = client.completions.create(**options)  # type: ignore[call-overload]
    chunks = list(client.completions.create(**options, stream=True))  # type: ignore[call-overload]
    assert "".join(one.choices[0].text for one in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_logprobs_are_those_of_the_tokens(client: OpenAI) -> None:
    tokenizer = load_tokenizer(str(demo_model()))
    known = {tokenizer.token_bytes(i).decode("utf-8", "replace") for i in range(1536)}
    done = client.chat.completions.create(
        model="", messages=[{"role": "user", "content": "What is a rank?"}], temperature=0,
        max_tokens=6, logprobs=True, top_logprobs=3,
    )  # fmt: skip
    (choice,) = done.choices
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert len(content) == 6
    spelt = b"".join(bytes(one.bytes or []) for one in content)
    assert spelt.decode() == choice.message.content
    for one in content:
        assert len(one.top_logprobs) == 3
        assert one.token == one.top_logprobs[0].token, "temperature 0 takes the likeliest"
        assert math.isclose(one.logprob, one.top_logprobs[0].logprob)
        assert sum(math.exp(other.logprob) for other in one.top_logprobs) <= 1.0001
        assert one.token in known
    older = client.completions.create(
        model="", prompt=PROMPT, temperature=0, max_tokens=4, logprobs=2
    )
    logprobs = older.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == older.choices[0].text
    assert logprobs.text_offset == [
        len("".join((logprobs.tokens or [])[:at])) for at in range(4)
    ]  # fmt: skip


def test_a_gap_needs_a_model_that_fills_gaps(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="fill"):
        client.completions.create(model="", prompt="def f(", suffix="return 1")


def test_tokens_and_texts_are_turned_into_each_other(http: httpx2.Client) -> None:
    text = "Tensor parallelism, über all."
    wanted = load_tokenizer(str(demo_model())).encode(text, False, True)
    found = http.post("/tokenize", json={"content": text}).json()
    assert found == {"tokens": wanted, "count": len(wanted)}
    pieces = http.post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
    spelt = [one["piece"] for one in pieces]
    assert b"".join(one.encode() if isinstance(one, str) else bytes(one) for one in spelt) == (
        text.encode()
    )
    back = http.post("/detokenize", json={"tokens": wanted}).json()
    assert back == {"content": text}
    wrong = http.post("/detokenize", json={"tokens": [1, 99999]})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "tokens[1]"


def test_a_conversation_becomes_a_prompt(http: httpx2.Client, client: OpenAI) -> None:
    messages = [{"role": "user", "content": "What is a rank?"}]
    prompt = http.post("/apply-template", json={"messages": messages}).json()["prompt"]
    assert "What is a rank?" in prompt
    raw = client.completions.create(model="", prompt=prompt, temperature=0, max_tokens=8)
    chat = client.chat.completions.create(
        model="",
        messages=messages,
        temperature=0,
        max_tokens=8,  # type: ignore[arg-type]
    )
    assert raw.choices[0].text == chat.choices[0].message.content
