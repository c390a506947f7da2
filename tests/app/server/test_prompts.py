"""Prompts as token ids, and prompts that are repeated with the probabilities of their tokens."""

import json
import math
import time
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from app.core.paths import demo_model
from app.server.models import Spell
from app.server.openai.answer import TokenPlaces, completion_logprobs, prompt_logprobs
from app.server.openai.texts import CompletionRequest, separate_inputs
from app.server.refusal import Refusal
from app.server.request_fields import read_request
from engine import TokenLogprob, TokensScored, load_tokenizer

TEXT = "Tensor parallelism: a rank computes its slice, über all."

PATH = "/v1/completions"

NO_END = {str(token): -100 for token in load_tokenizer(str(demo_model())).eog_ids}
"""Biases with which an answer does not end by itself."""


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return load_tokenizer(str(demo_model())).encode(TEXT)


def ask(http: httpx2.Client, **fields: Any) -> dict[str, Any]:
    """Ask for a completion at temperature 0, and return the document."""
    response = http.post(PATH, json={"temperature": 0, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_tokens_are_gone_on_with_as_the_text_that_they_spell(
    client: OpenAI, ids: list[int]
) -> None:
    asked: list[Any] = [TEXT, ids, [ids], [TEXT, TEXT], [ids, ids[:5], ids]]
    found = [
        client.completions.create(model="", prompt=one, temperature=0, max_tokens=6)
        for one in asked
    ]
    texts = [[choice.text for choice in one.choices] for one in found]
    (expected,) = texts[0]
    assert [len(one) for one in texts] == [1, 1, 1, 2, 3]
    assert {one for some in texts[:4] for one in some} == {expected}
    assert texts[4][::2] == [expected, expected] != texts[4][:2]
    usage = found[1].usage
    assert usage is not None
    assert usage.prompt_tokens == len(ids)


def test_a_prompt_of_tokens_is_repeated_as_their_text(http: httpx2.Client, ids: list[int]) -> None:
    (choice,) = ask(http, prompt=ids, max_tokens=4, echo=True)["choices"]
    (alone,) = ask(http, prompt=TEXT, max_tokens=4)["choices"]
    assert choice["text"] == TEXT + alone["text"]
    assert choice["logprobs"] is None


def test_a_repeated_prompt_has_the_probabilities_of_its_tokens(
    http: httpx2.Client, ids: list[int]
) -> None:
    """Those of tokens that the model wrote are the same when they are read."""
    (written,) = ask(http, prompt=ids, max_tokens=8, logprobs=2, logit_bias=NO_END)["choices"]
    continued = ids + load_tokenizer(str(demo_model())).encode(written["text"])
    (choice,) = ask(http, prompt=continued, max_tokens=0, logprobs=2, echo=True)["choices"]
    assert choice["text"] == TEXT + written["text"]
    assert choice["finish_reason"] == "length"
    told, expected = choice["logprobs"], written["logprobs"]
    assert {len(column) for column in told.values()} == {len(continued)}
    assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
    assert told["tokens"][-8:] == expected["tokens"]
    assert told["token_logprobs"][-8:] == pytest.approx(expected["token_logprobs"], abs=1e-6)
    assert told["text_offset"][-8:] == [len(TEXT) + at for at in expected["text_offset"]]
    for value, top in zip(told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True):
        assert 2 <= len(top) <= 3
        assert min(top.values()) <= value <= max(top.values())
        assert sum(map(math.exp, top.values())) <= 1.0001
    ends = [*told["text_offset"][1:], len(choice["text"])]
    for token, at, end in zip(told["tokens"], told["text_offset"], ends, strict=True):
        assert "\ufffd" in token or choice["text"][at:end] == token
    assert [*told["text_offset"]] == sorted(told["text_offset"])


def test_an_evaluation_finds_the_choice_that_the_model_would_write(http: httpx2.Client) -> None:
    """As lm-evaluation-harness reads it: all tokens behind the context but the last, written one.

    Source: `parse_logprobs` in its lm_eval/models/openai_completions.py.
    """
    encode = load_tokenizer(str(demo_model())).encode
    ids = encode("Tensor parallelism splits")
    best = encode(ask(http, prompt=ids, max_tokens=4)["choices"][0]["text"])[-4:]
    prompts = [ids + best, [*ids, *reversed(best)]]
    asked = {"prompt": prompts, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    scores = []
    for choice in ask(http, **asked)["choices"]:
        logprobs = choice["logprobs"]
        values = logprobs["token_logprobs"][len(ids) : -1]
        tops = logprobs["top_logprobs"][len(ids) : -1]
        pairs = zip(values, tops, strict=True)
        scores.append((sum(values), all(value == max(top.values()) for value, top in pairs)))
    assert scores[0][1]
    assert not scores[1][1]
    assert scores[0][0] > scores[1][0]


def test_the_token_that_ends_an_answer_is_told_with_the_others(
    http: httpx2.Client, ids: list[int]
) -> None:
    """Else who leaves out the last token would leave out one of the prompt."""
    end = min(load_tokenizer(str(demo_model())).eog_ids)
    asked = {"prompt": ids, "max_tokens": 1, "logprobs": 1, "echo": True}
    asked["logit_bias"] = {str(end): 100}
    for stream in (False, True):
        response = http.post(PATH, json={"temperature": 0, **asked, "stream": stream})
        choices = [response.json()["choices"][0]] if not stream else chunks_of(response)
        columns = [one["logprobs"] for one in choices if one["logprobs"]]
        values = [value for one in columns for value in one["token_logprobs"]]
        offsets = [at for one in columns for at in one["text_offset"]]
        assert len(values) == len(ids) + 1
        assert offsets[-1] == len(TEXT)
        assert "".join(one["text"] for one in choices) == TEXT
        assert choices[-1]["finish_reason"] == "stop"


def chunks_of(response: httpx2.Response) -> list[dict[str, Any]]:
    """Return the choices of a stream's chunks."""
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    return [choice for line in lines for choice in json.loads(line)["choices"]]


def test_a_stream_has_the_same_prompts_and_probabilities(
    http: httpx2.Client, ids: list[int]
) -> None:
    asked = {
        "prompt": [TEXT, "A rank"], "n": 2, "max_tokens": 3, "logprobs": 1, "echo": True,
        "temperature": 0, "logit_bias": NO_END,
    }  # fmt: skip
    whole = ask(http, **asked)["choices"]
    assert [one["text"][: len(TEXT)] == TEXT for one in whole] == [True, True, False, False]
    chunks = chunks_of(http.post(PATH, json={**asked, "stream": True}))
    for index, expected in enumerate(whole):
        mine = [one for one in chunks if one["index"] == index]
        assert "".join(one["text"] for one in mine) == expected["text"]
        for name, column in expected["logprobs"].items():
            parts = [one["logprobs"][name] for one in mine if one["logprobs"]]
            assert [value for part in parts for value in part] == column
        assert mine[-1]["finish_reason"] == "length"


def test_nothing_is_written_where_nothing_is_asked_for(http: httpx2.Client) -> None:
    done = ask(http, prompt=TEXT, max_tokens=0)
    (choice,) = done["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert done["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"prompt": [-1]}, "prompt[0]", "prompt[0] must be from 0 to 1535, not -1."),
        ({"prompt": [5, 1536]}, "prompt[1]", "not 1536."),
        ({"prompt": [1e9]}, "prompt[0]", "not 1000000000."),
        ({"prompt": [[5], [5, 10**30]]}, "prompt[1][1]", "must be from 0 to 1535"),
        ({"prompt": [True]}, "prompt[0]", "must be a string or a whole number or a list, not true"),
        ({"prompt": [5, 5.5]}, "prompt[1]", "must be a whole number, not 5.5."),
        ({"prompt": [5, "x"]}, "prompt[1]", 'must be a whole number, not "x".'),
        ({"prompt": ["x", 5]}, "prompt[1]", "must be a string, not 5."),
        ({"prompt": [[5], 5]}, "prompt[1]", "must be a list, not 5."),
        ({"prompt": [[5, None]]}, "prompt[0][1]", "must be a whole number, not null."),
        ({"prompt": [[[5]]]}, "prompt[0][0]", "must be a whole number, not a list of 1."),
        ({"prompt": {}}, "prompt", "must be a string or a list"),
        ({"prompt": []}, "prompt", "at least 1"),
        ({"prompt": [[]]}, "prompt[0]", "must have 1 to"),
        ({"prompt": [[5], []]}, "prompt[1]", "must have 1 to"),
        ({"prompt": [[5]] * 17}, "n", "the limit is 16"),
        ({"prompt": [[5]] * 9, "n": 2}, "n", "the limit is 16"),
        ({"prompt": [5] * 2000}, None, "2000 tokens exceeds the available context size of 1024"),
        ({"prompt": [5] * 2000, "echo": True, "logprobs": 1}, None, "context size of 1024"),
        ({"prompt": "a word " * 30000}, None, "tokens exceeds the available context size of 1024"),
        ({"prompt": "a" * 1000000}, None, "at least 71429 tokens exceeds the"),
        ({"prompt": "x", "echo": True, "best_of": 2}, "best_of", "must equal n"),
        ({"prompt": "x", "echo": True, "suffix": "y"}, "echo", "cannot be combined with suffix"),
        ({"prompt": "x", "echo": True, "logprobs": 21}, "logprobs", "from 0 to 20"),
        ({"prompt": "x", "echo": True, "logprobs": True}, "logprobs", "a whole number"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_prompt_is_told(
    http: httpx2.Client, fields: dict[str, Any], param: str | None, sentence: str, *, stream: bool
) -> None:
    response = http.post(PATH, json={"max_tokens": 1, **fields, "stream": stream})
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert sentence in error["message"]
    assert error["param"] == param


def test_a_million_tokens_hold_up_nobody() -> None:
    """They are read in one go; the first wrong one is named all the same."""
    ids = [5] * 1_000_000
    start = time.process_time()
    request = read_request(CompletionRequest, json.dumps({"prompt": [ids, ids]}).encode())
    (first, _) = separate_inputs(request.prompt, "prompt", 1536)
    assert time.process_time() - start < 2.0, "a look at each would take many"
    assert first == tuple(ids)
    ids[-1] = -1
    with pytest.raises(Refusal, match=r"prompt\[999999\] must be from 0 to 1535, not -1"):
        separate_inputs(tuple(ids), "prompt", 1536)


SPELT = {
    0: b"<s>", 1: b" Hello", 2: b" \xc3", 3: b"\xbc", 4: b"\xe2\x82", 5: b"\xac", 6: b"\xff",
    7: b"!",
}  # fmt: skip

SPELL = Spell(SPELT.__getitem__, lambda token: token == 0)


def test_what_a_text_has_not_has_no_place_in_it() -> None:
    """Such as BOS, and the space with which some models begin; characters in halves have one."""
    text = "Hello ü€!"
    ids = (0, 1, 2, 3, 4, 5, 7)
    scores = tuple(TokenLogprob(one, -0.5) for one in ids[1:])
    found = prompt_logprobs(TokensScored(ids, scores), text, SPELL)
    assert found["text_offset"] == [0, 0, 5, 6, 7, 7, 8]
    assert found["tokens"][:2] == ["<s>", " Hello"]
    assert found["token_logprobs"] == [None, *[-0.5] * 6]
    other = prompt_logprobs(TokensScored(ids, scores), "hi", SPELL)
    assert all(0 <= at <= 2 for at in other["text_offset"]), "the model has changed the text"


def test_a_token_that_answers_do_not_show_has_no_width() -> None:
    places = TokenPlaces(4)
    assert places.of(map(SPELL.shown, (7, 0, 0, 4))) == [4, 5, 5, 5]
    assert places.of(map(SPELL.shown, (5, 7))) == [5, 6], "half a character came before"


def test_the_likeliest_of_tokens_that_are_spelt_alike_is_told() -> None:
    token = TokenLogprob(7, -3.0, ((5, -0.5), (3, -1.0), (6, -2.0)))
    (top,) = completion_logprobs([token], SPELL, [0])["top_logprobs"]
    assert top == {"\ufffd": -0.5, "!": -3.0}
