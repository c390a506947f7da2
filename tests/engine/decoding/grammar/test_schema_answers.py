"""Answers with the form of a JSON schema are JSON that the schema describes, at temperature 1."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.core.paths import demo_model
from engine import (
    AnswerRequest,
    ChatMessage,
    Finished,
    Model,
    SamplingParams,
    TokenText,
    load_model,
)
from tests.helpers.json_schemas import random_schema

N_ALL = 320
OTHER_MODEL = "TANDEM_SCHEMA_MODEL"
"""Environment variable with the path of another model to try all schemas with."""


@pytest.fixture(scope="module")
def demo() -> Iterator[Model]:
    path = demo_model()
    assert path is not None
    with load_model(path, n_ctx=1024) as model:
        yield model


@pytest.fixture(scope="module")
def other() -> Iterator[Model]:
    if OTHER_MODEL not in os.environ:
        pytest.skip(f"{OTHER_MODEL} names no model")
    with load_model(Path(os.environ[OTHER_MODEL]), n_ctx=1024) as model:
        yield model


def check_answer(model: Model, seed: int) -> bool:
    """Check an answer to a random schema; return whether it came to its end.

    One that came to the end of the context only has to be the beginning of JSON, which nothing
    here looks at.
    """
    import jsonschema  # takes seconds

    schema = random_schema(seed)
    jsonschema.Draft202012Validator.check_schema(schema)
    sampling = SamplingParams(temperature=1.0, seed=seed, json_schema=json.dumps(schema))
    message = ChatMessage("user", f"Write an example of {json.dumps(schema)[:100]}")
    events = list(model.answer(AnswerRequest((message,), sampling=sampling)))
    text = "".join(event.text for event in events if isinstance(event, TokenText))
    last = events[-1]
    assert isinstance(last, Finished)
    if last.reason != "stop":
        return False
    jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    ).validate(json.loads(text))
    return True


@pytest.mark.parametrize("seed", range(15))
def test_answers_fit_their_schema(demo: Model, seed: int) -> None:
    assert check_answer(demo, seed)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", ["demo", "other"])
def test_many_answers_fit_their_schema(name: str, request: pytest.FixtureRequest) -> None:
    model: Model = request.getfixturevalue(name)
    n_whole = sum(check_answer(model, seed) for seed in range(N_ALL))
    assert n_whole >= 0.97 * N_ALL
